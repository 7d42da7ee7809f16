"""What was chosen because nobody said otherwise: it goes into the notes of the virtual GPU in use."""

from __future__ import annotations

from ullage.virtual.gpu import current


def assume(text: str) -> None:
    """Note an assumption; on a real GPU there is nobody to tell.

    >>> assume("batch size 32")
    """
    card = current()
    if card is not None and text not in card.notes:  # said once: each iteration assumes the same
        card.note("default", text)
