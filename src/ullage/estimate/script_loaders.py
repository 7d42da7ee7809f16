"""DataLoaders of a script that is followed: epochs end early once their batches bring nothing new.

After training has settled, each epoch over a training loader ends after one batch, so that the script soon comes to
its validation, its checkpoints and its end. An epoch over any other loader ends as soon as three batches in a row
asked for the same memory and left nothing behind. Passes that do not touch the GPU are left alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils.data import dataloader

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.memory import DeviceMemory

SAME_BATCHES = 3  # in a row, before an epoch of validation ends early
LONGEST_EPOCH = 20.0  # seconds, where validation keeps something of each batch on the GPU
_Iterator: Any = dataloader._BaseDataLoaderIter


class _Epoch:
    """One pass over a loader: where the allocator was when each batch was handed out."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, int]] = []  # requests so far, bytes allocated
        self.begin = time.monotonic()


class Loaders:
    """Watches every DataLoader of the process."""

    def __init__(self, memory: DeviceMemory, note: Callable[[str, str], None]) -> None:
        self._memory, self._note = memory, note
        self._epochs: WeakKeyDictionary[Any, _Epoch] = WeakKeyDictionary()
        self._training: dict[int, Any] = {}  # the samplers of training loaders, by identity
        self._delivered: dict[int, Any] = {}  # those that handed out a batch since the last backward pass
        self.hurry = False
        self.end_training_epochs = True  # not where a framework counts the batches itself
        self.look_until = math.inf

    def install(self, replacements: Replacements) -> None:
        """Begin to watch."""
        following, resetting = _Iterator.__next__, _Iterator._reset

        def __next__(iterator: Any) -> Any:
            if self._is_over(iterator):
                raise StopIteration
            batch = following(iterator)
            self._handed_out(iterator)
            return batch

        def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> Any:
            self._epochs.pop(iterator, None)
            return resetting(iterator, loader, first_iter)

        replacements.put(_Iterator, "__next__", __next__)
        replacements.put(_Iterator, "next", __next__)
        replacements.put(_Iterator, "_reset", _reset)

    def after_backward(self) -> None:
        """A backward pass is done: the batches handed out before it were for training."""
        self._training.update(self._delivered)
        self._delivered.clear()

    def _handed_out(self, iterator: Any) -> None:
        sampler = iterator._index_sampler
        self._delivered[id(sampler)] = sampler
        epoch = self._epochs.setdefault(iterator, _Epoch())
        epoch.marks.append((len(self._memory.requests), self._memory.allocator.allocated))

    def _is_over(self, iterator: Any) -> bool:
        epoch = self._epochs.get(iterator)
        if epoch is None:
            return False
        if id(iterator._index_sampler) in self._training:
            if not self.end_training_epochs:
                return False
            if self.hurry:
                self._note("epochs", "after training had settled, epochs over training data ended after one batch")
            return self.hurry
        if time.monotonic() > min(self.look_until, epoch.begin + LONGEST_EPOCH) and self._uses_gpu(epoch):
            self._note("epochs", "an epoch without training was too long to be followed to its end")
            return True
        if self._repeats(epoch):
            self._note("epochs", "epochs without training ended early, as soon as their batches repeated")
            return True
        return False

    def _uses_gpu(self, epoch: _Epoch) -> bool:
        return len(epoch.marks) > SAME_BATCHES and len(self._memory.requests) > epoch.marks[0][0]

    def _repeats(self, epoch: _Epoch) -> bool:
        """Whether the last batches asked for the same memory and kept none of it."""
        if len(epoch.marks) <= SAME_BATCHES:
            return False
        memory = self._memory
        marks = [*epoch.marks[-SAME_BATCHES:], (len(memory.requests), memory.allocator.allocated)]
        if len({allocated for _, allocated in marks[1:]}) > 1:
            return False
        asked = [
            [number for number in memory.requests[begin:end] if number > 0]
            for (begin, _), (end, _) in zip(marks, marks[1:], strict=False)
        ]
        return bool(asked[0]) and all(sizes == asked[0] for sizes in asked)
