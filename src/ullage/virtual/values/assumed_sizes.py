"""Sizes that depend on data: the assumed ones, and those that the script's shapes show later (`x[mask].view(batch, 3,
size, size)`), when the largest size was allocated: they are kept for another run of the script."""

from collections import Counter
from weakref import WeakValueDictionary

import torch


class AssumedSizes:
    """The results of one virtual GPU whose first size was assumed. A kind is an operator with its shapes."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}  # by kind; from an earlier run
        self._made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._kinds: dict[int, tuple[str, int]] = {}
        self._assumed: Counter[str] = Counter()
        self._noted: Counter[str] = Counter()
        self._counts: dict[str, int] = {}
        self.saved = 0  # the most bytes of one result that need not have been allocated

    def assumed(self, kind: str, dims: int, out: torch.Tensor) -> None:
        """Record an assumed first size; `dims` numbers gave the place of each element."""
        self._made[id(out)] = out
        self._kinds[id(out)] = kind, 8 * dims
        self._assumed[kind] += 1

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        return self._made.get(id(tensor)) is tensor

    def note_length(self, tensor: torch.Tensor, count: int) -> None:
        kind, place = self._kinds[id(tensor)]
        del self._made[id(tensor)]  # each result counts once
        self._noted[kind] += 1
        self._counts[kind] = max(count, self._counts.get(kind, 0))
        row = tensor.shape[1:].numel() * tensor.element_size()
        self.saved = max(self.saved, (tensor.shape[0] - count) * (row + place))

    def learned(self) -> dict[str, int]:
        """Return the largest size of each kind whose results all became known."""
        return {kind: count for kind, count in self._counts.items() if self._noted[kind] == self._assumed[kind]}
