"""One process's share of a virtual card: the card's file has the memory of its allocator and CUDA context.

The context is taken at the first allocation. A forked child does not own its parent's memory. It cannot use CUDA if its
parent did; otherwise it starts with nothing.
"""

import os
from typing import Any

import torch

from ullage.allocator import format_size
from ullage.virtual.shared_card.cards import Card

_DeviceError: Any = getattr(torch._C, "AcceleratorError", RuntimeError)
_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
    "you must use the 'spawn' start method"
)
_NO_CONTEXT = (
    "CUDA error: out of memory\nThe card has {free} left, and the CUDA context of this process needs {size}. "
    "Other processes on it: {others}"
)


class SharedCard:
    """One process's share of a card; the `Driver` of its allocator."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._context = 0  # to be taken with the first segment
        self._owner: int | None = None  # the process that has a context

    @property
    def in_use(self) -> bool:
        return self._owner == os.getpid()

    @property
    def is_of_parent(self) -> bool:
        return self._owner not in (None, os.getpid())

    def take(self, size: int) -> bool:
        if self._owner is None:
            self._need(self._context)
            self._owner = os.getpid()
        self.refuse_if_forked()
        return self.card.take(size)

    def give(self, size: int) -> None:
        if self.in_use:
            self.card.give(size)

    def free(self) -> int:
        return self.card.free()

    def take_context(self, size: int) -> None:
        """Enlarge the CUDA context, by its first part or by the code of a library."""
        if self._owner is None:
            self._context += size
        elif self.in_use:
            self._need(size)

    def report(self) -> str:
        """Describe the processes on the card, in the words of PyTorch's message."""
        return "".join(
            ("Including non-PyTorch memory, this process" if pid == os.getpid() else f"Process {pid}")
            + f" has {format_size(taken)} memory in use. "
            for pid, taken in self.card.processes().items()
        )

    def refuse_if_forked(self) -> None:
        """Raise PyTorch's error in a child of a process that uses CUDA."""
        if self.is_of_parent:
            raise RuntimeError(_FORKED)

    def _need(self, size: int) -> None:
        if not self.card.take(size):
            taken = self.card.processes()
            others = ", ".join(f"{pid} with {format_size(held)}" for pid, held in taken.items() if pid != os.getpid())
            raise _DeviceError(
                _NO_CONTEXT.format(free=format_size(self.card.free()), size=format_size(size), others=others or "none")
            )
