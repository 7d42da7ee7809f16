"""Work that makes many objects and no garbage, done without the garbage collector.

It would look at each of them again and again: a tenth of a second for every second in which PyTorch is imported.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Inside this `with` no garbage is looked for.

    >>> with gc_disabled():
    ...     gc.isenabled()
    False
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports of many modules. Their functions and classes stay until the process ends: they are never looked at."""
    with gc_disabled():
        yield
        gc.freeze()
