"""Decide how far to follow a script: until its training has settled, and then to its end by the shortest way.

Training has settled after at least `steps` optimizer steps (backward passes without an optimizer), when an iteration
requests the same memory as the one before. Then validation and checkpoints are watched, which may need more memory than
training. To get there soon, epochs over DataLoaders end early: a training epoch after one batch, any other epoch as
soon as three batches in a row requested the same memory and kept nothing. A smaller last batch of an epoch still comes:
the allocator may need other blocks for it. Loaders that do not touch the GPU are left alone. When a second validation
has not raised the peak, or after as much time again as settling took, Ullage leaves training: loops end (`loops.py`),
frameworks get their signal to stop, and the code after training is followed to the end of the script. Training is
stopped in the middle only if it cannot be ended otherwise.
"""

import functools
import math
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import BatchSampler, dataloader
from torch.utils.data._utils import fetch

from ullage.estimation.scripts.longest_batch import LongestBatch, longest_batch, size_of
from ullage.estimation.scripts.loops import LEAST_ROUNDS, LoopWatcher, takes_single_items
from ullage.units import format_bytes
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.watching.convergence import ConvergenceWatch
from ullage.virtual.watching.progress import BackwardPasses, Phases

if TYPE_CHECKING:
    from ullage.virtual import VirtualGPU
    from ullage.virtual.memory.tensors import DeviceMemory
    from ullage.virtual.watching.step_calls import OperatorCalls

SHORTEST_LOOK, LONGEST_LOOK = 3.0, 20.0  # seconds that a script is followed after its training has settled
STEPS_WITHOUT_GPU = 10  # after this many optimizer steps without a request, the script trains on the CPU
SAME_BATCHES = 3  # in a row, before a validation epoch ends early
LONGEST_EPOCH = 20.0  # seconds, if validation keeps something of each batch on the GPU
FIRST_RECORD = 2  # the place of the first of `LongestBatch.records` among a loader's batches, if they vary
MOST_LONGEST = 40  # batches in which the largest may be put in
MOST_SURVEYS = 8  # data sets whose items are inspected
LONGEST_AFTER = 60.0  # seconds for the code after training
MOST_STEPS_LEAVING = 50  # optimizer steps after which training is assumed not to end early
_Iterator: Any = dataloader._BaseDataLoaderIter


class _Epoch:
    """One pass over a loader: the state of the allocator at each batch."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, int]] = []  # requests so far, bytes allocated
        self.begin = time.monotonic()
        self.is_over = False


class _Source:
    """A data set as one kind of loader reads it: the number of batches drawn and returned, and the largest one."""

    def __init__(self, dataset: Any, longest: LongestBatch | None) -> None:
        self.dataset, self.longest = dataset, longest  # the data set is kept, so that its identity stays its own
        self.drawn = self.handed_out = 0
        self.indices: Any = None  # of the batch that was drawn last
        self.reserved: int | None = None  # at most, before the largest batch was handed out

    @property
    def longest_at(self) -> int:
        """The place of the first largest batch: a long run meets the batches before it earlier."""
        return FIRST_RECORD + (0 if self.longest is None else len(self.longest.records))

    @property
    def largest_batch_pending(self) -> bool:
        """Whether the largest batch has yet to come between others and twice in a row."""
        return self.longest is not None and self.handed_out < self.longest_at + 5

    def draw(self, indices: Any) -> Any:
        """Return the largest batch instead of those at certain places, after smaller ones in order."""
        place, self.drawn, self.indices = self.drawn, self.drawn + 1, indices
        after = place - self.longest_at
        if self.longest is None or place < FIRST_RECORD or after in (1, 2) or place >= MOST_LONGEST:
            return indices
        return self.longest.records[place - FIRST_RECORD] if after < 0 else self.longest.indices


class LoaderWatcher:
    """Watches every DataLoader of the process, ends its epochs early, and makes it return its largest batch."""

    def __init__(self, memory: "DeviceMemory", calls: "OperatorCalls", note: Callable[[str, str], None]) -> None:
        self._memory, self._calls, self._note = memory, calls, note
        self._sources: dict[Any, _Source] = {}
        self._streams: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # bytes of their first batches
        self._epochs: WeakKeyDictionary[Any, _Epoch] = WeakKeyDictionary()
        self._training: dict[int, Any] = {}  # the samplers of training loaders, by identity
        self._delivered: dict[int, Any] = {}  # those that handed out a batch since the last backward pass
        self._feeding: dict[Any, Any] = {}  # those that handed out the last batch before a backward pass, by their key
        self.hurry = False
        self.end_training_epochs = True  # unless a framework counts the batches itself

    def install(self, replacements: Replacements) -> None:
        next_batch, resetting, next_index = _Iterator.__next__, _Iterator._reset, _Iterator._next_index

        def __next__(iterator: Any) -> Any:
            if self._is_over(iterator) and not takes_single_items(sys._getframe(1)):
                return self._last_batch(iterator)
            batch = next_batch(iterator)
            self._handed_out(iterator, batch)
            return batch

        def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> Any:
            self._epochs.pop(iterator, None)
            return resetting(iterator, loader, first_iter)

        def _next_index(iterator: Any) -> Any:
            indices = next_index(iterator)
            source = self._source_of(iterator)
            return indices if source is None else source.draw(indices)

        replacements.put(_Iterator, "_next_index", _next_index)
        replacements.put(_Iterator, "__next__", __next__)
        replacements.put(_Iterator, "next", __next__)
        replacements.put(_Iterator, "_reset", _reset)

    def after_backward(self) -> None:
        """Note, after a backward pass, that the batches before it were training data."""
        self._training.update(self._delivered)
        if self._delivered:
            last = next(reversed(self._delivered.values()))
            self._feeding[_key(last)] = last
        self._delivered.clear()

    def has_ended(self, iterator: Any) -> bool:
        epoch = self._epochs.get(iterator) if isinstance(iterator, _Iterator) else None
        return epoch is not None and epoch.is_over

    @property
    def largest_batch_pending(self) -> bool:
        """Whether a training loader has not returned its largest batch often enough."""
        sources = map(self._sources.get, map(_key, self._training.values()))
        return any(source is not None and source.largest_batch_pending for source in sources)

    def about_longest(self) -> list[str]:
        """Describe the largest batches and their effect so far."""
        reserved = self._memory.allocator.peak_reserved
        return [
            _about_longest(source.longest, source.reserved, reserved)
            for source in list(self._sources.values())
            if source.longest is not None and source.reserved is not None
        ]

    @property
    def epoch_samples(self) -> int | None:
        """The samples of a training epoch; `None` if no loader knows, or several do."""
        samplers = list(self._feeding.values())
        return _epoch_samples(samplers[0]) if len(samplers) == 1 else None

    @property
    def replicas(self) -> int:
        """The number of ranks that share training data, by their samplers; 0 if unknown."""
        return max(map(_replicas, self._feeding.values()), default=0)

    def _source_of(self, iterator: Any) -> _Source | None:
        """Return the source of a loader of a data set with indices; its items are surveyed at the first read for the
        GPU."""
        if iterator._dataset_kind != dataloader._DatasetKind.Map:
            return None
        key = _key(iterator._index_sampler)
        if key not in self._sources and self._memory.requests and len(self._sources) < MOST_SURVEYS:
            longest = longest_batch(iterator)
            self._sources[key] = _Source(iterator._dataset, longest)
            if longest is not None:
                self._note("sizes", "in a long run, batches of sizes that were not seen may leave more memory cached")
            if longest is not None and longest.looked_at < longest.items:
                self._note("lengths", "not all items of a data set could be looked at: the largest may be missing")
        return self._sources.get(key)

    def _handed_out(self, iterator: Any, batch: Any) -> None:
        if iterator._dataset_kind == dataloader._DatasetKind.Iterable and self._memory.requests:
            size = size_of(batch)[0]
            if size > self._streams.setdefault(iterator, size):
                self._note("lengths", "batches of a stream vary in size: later ones may be larger than those seen")
        sampler = iterator._index_sampler
        source = self._sources.get(_key(sampler))
        if source is not None:
            if source.handed_out == source.longest_at:
                source.reserved = self._memory.allocator.peak_reserved
            source.handed_out += 1
        self._delivered.pop(id(sampler), None)
        self._delivered[id(sampler)] = sampler  # the last one
        self._calls.samples += _samples_of(sampler, batch)
        epoch = self._epochs.setdefault(iterator, _Epoch())
        epoch.marks.append((len(self._memory.requests), self._memory.allocator.allocated))

    def _is_over(self, iterator: Any) -> bool:
        epoch = self._epochs.get(iterator)
        if epoch is None:
            return False
        if epoch.is_over:
            return True
        if id(iterator._index_sampler) in self._training:
            if not self.end_training_epochs or len(epoch.marks) < LEAST_ROUNDS:
                return False  # a script may divide by the index of the last batch
            if self.hurry:
                self._note("epochs", "after training had settled, epochs over training data were cut short")
            return self.hurry
        if time.monotonic() > epoch.begin + LONGEST_EPOCH and self._uses_gpu(epoch):
            self._note("epochs", "an epoch without training was too long to be followed to its end")
            return True
        if self._repeats(epoch):
            self._note("epochs", "epochs without training were cut short once their batches repeated")
            return True
        return False

    def _last_batch(self, iterator: Any) -> Any:
        """Return the last batch of an epoch that ends early, if it is smaller than the others; then end the epoch."""
        epoch, sampler = self._epochs[iterator], iterator._index_sampler
        source = self._sources.get(_key(sampler))
        was_over, epoch.is_over = epoch.is_over, True
        if was_over or source is None or type(sampler) is not BatchSampler or sampler.drop_last:
            raise StopIteration
        items: Any = sampler.sampler
        rest = len(items) % sampler.batch_size
        if not rest:
            raise StopIteration
        fetcher = fetch._MapDatasetFetcher(iterator._dataset, True, iterator._collate_fn, False)
        return fetcher.fetch(source.indices[:rest])

    def _uses_gpu(self, epoch: _Epoch) -> bool:
        return len(epoch.marks) > SAME_BATCHES and len(self._memory.requests) > epoch.marks[0][0]

    def _repeats(self, epoch: _Epoch) -> bool:
        """Return whether the last batches requested the same memory and kept none of it."""
        if len(epoch.marks) <= SAME_BATCHES:
            return False
        memory = self._memory
        marks = [*epoch.marks[-SAME_BATCHES:], (len(memory.requests), memory.allocator.allocated)]
        if len({allocated for _, allocated in marks[1:]}) > 1:
            return False
        batches = [memory.requests.sizes(begin, end) for (begin, _), (end, _) in zip(marks, marks[1:], strict=False)]
        return bool(batches[0]) and all(sizes == batches[0] for sizes in batches)


def _key(sampler: Any) -> Any:
    """Return a key that stays the same when a script makes the same loader again for each epoch."""
    inner = getattr(sampler, "sampler", sampler)
    data = getattr(inner, "data_source", None)
    return (id(sampler),) if data is None else (id(data), type(inner), getattr(sampler, "batch_size", None))


def _samples_of(sampler: Any, batch: Any) -> int:
    """Return the samples of a batch, by its sampler or by the first size of its largest tensor."""
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else next(iter(size_of(batch)[1]), 1)


def _replicas(sampler: Any) -> int:
    """Return the ranks that share a sampler: PyTorch's `DistributedSampler`, or accelerate's."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        for name in ("num_replicas", "num_processes"):
            if isinstance(ranks := getattr(each, name, None), int):
                return ranks
    return 0


def _epoch_samples(sampler: Any) -> int | None:
    """Return the samples of an epoch; `None` if the sampler does not know, as for a stream."""
    try:
        return len(sampler) * sampler.batch_size if sampler.drop_last else len(sampler.sampler)
    except (TypeError, AttributeError):
        return None


def _about_longest(longest: LongestBatch, before: int, now: int) -> str:
    seen = "all " if longest.looked_at == longest.items else f"{longest.looked_at} of "
    return (
        f"batches vary in size: one of the largest of {seen}{longest.items} items, {longest.shape}, was put in (the "
        f"first was {longest.drawn_shape}): {format_bytes(before)} were reserved before it, {format_bytes(now)} in all"
    )


_LIGHTNING_LOOPS = ("lightning.pytorch.loops.training_epoch_loop", "pytorch_lightning.loops.training_epoch_loop")


def _hurry_frameworks(loaders: LoaderWatcher, loops: LoopWatcher, replacements: Replacements) -> None:
    """Use the switches of frameworks that count batches and epochs themselves."""
    for name in _LIGHTNING_LOOPS:
        replacements.when_imported(name, lambda module: _hurry_lightning(module, loaders, loops, replacements))
    replacements.when_imported(
        "transformers.trainer_callback", lambda module: _hurry_transformers(module, loops, replacements)
    )
    replacements.when_imported(
        "ignite.engine.engine", lambda module: _hurry_ignite(module, loaders, loops, replacements)
    )


def _hurry_lightning(
    module: ModuleType, loaders: LoaderWatcher, loops: LoopWatcher, replacements: Replacements
) -> None:
    """Let Lightning validate after one batch; `should_stop` ends its training."""
    loop: Any = getattr(module, "_TrainingEpochLoop", None)
    if loop is None:
        return
    advance = loop.advance

    def advance_in_a_hurry(self: Any, *args: Any, **options: Any) -> Any:
        loaders.end_training_epochs = False
        if loaders.hurry:
            self.trainer.fit_loop.max_batches = 1
            self.trainer.val_check_batch = 1
        if loops.leaving:
            self.trainer.should_stop = True
        return advance(self, *args, **options)

    replacements.put(loop, "advance", advance_in_a_hurry)


def _hurry_transformers(module: ModuleType, loops: LoopWatcher, replacements: Replacements) -> None:
    """Let Hugging Face's Trainer evaluate and save once more, if it does at all, and end its training."""
    handler: Any = getattr(module, "CallbackHandler", None)
    if handler is None:
        return
    on_step_end = handler.on_step_end

    def on_last_step_end(self: Any, args: Any, state: Any, control: Any) -> Any:
        control = on_step_end(self, args, state, control)
        if loops.leaving:
            control.should_training_stop = True
            control.should_evaluate |= str(getattr(args, "eval_strategy", "no")) not in ("no", "IntervalStrategy.NO")
            control.should_save |= str(getattr(args, "save_strategy", "no")) not in ("no", "SaveStrategy.NO")
        return control

    replacements.put(handler, "on_step_end", on_last_step_end)


def _hurry_ignite(module: ModuleType, loaders: LoaderWatcher, loops: LoopWatcher, replacements: Replacements) -> None:
    """End ignite's epochs: an engine restarts a loader until it has counted all batches of an epoch."""
    engine: Any = module.Engine
    fire = engine._fire_event

    def fire_in_a_hurry(self: Any, event: Any, *args: Any, **options: Any) -> Any:
        fired = fire(self, event, *args, **options)
        name = getattr(event, "name", None)
        if name == "DATALOADER_STOP_ITERATION" and loaders.has_ended(self._dataloader_iter):
            self.terminate_epoch()
        if name == "EPOCH_COMPLETED" and loops.leaving:
            self.terminate()
        return fired

    replacements.put(engine, "_fire_event", fire_in_a_hurry)


class RunWatcher:
    """Watches a run of a script; calls `stop` when nothing new is expected."""

    def __init__(
        self, card: "VirtualGPU", steps: int | None, stop: Callable[[], None], on_settled: Callable[[], None]
    ) -> None:
        self._card, self._steps, self._stop, self._on_settled = card, steps, stop, on_settled
        self._begin = self._now()
        self._validations_before = self._validations = 0  # seen before training settled, and after
        self._peaks = 0, 0
        self._left_at = 0  # after how many steps training was left
        self._follow_until = math.inf
        self.phases = Phases(card)
        self.loaders = LoaderWatcher(card.memory, card.calls, card.note)
        self.loops = LoopWatcher(card, lambda: self.steps, lambda: self.backward.count, steps or 1)
        self._watch_anew()
        self.backward = BackwardPasses(self._after_backward, self._watch_anew)

    def install(self, replacements: Replacements) -> None:
        self._card.progress.on_step = self._after_step
        replacements.on_undo(self.phases.install())
        self.backward.install(replacements)
        self.loaders.install(replacements)
        self.loops.install(replacements)
        _hurry_frameworks(self.loaders, self.loops, replacements)
        self._answer_who_counts(replacements)

    def _answer_who_counts(self, replacements: Replacements) -> None:
        """Return rank 0 without a process group, if epochs ended early: torchvision's scripts count what they
        evaluated, and ask for the rank if that is too little."""
        ask = getattr(torch.distributed, "get_rank", None)  # missing from builds without torch.distributed
        if ask is None:
            return

        @functools.wraps(ask)
        def get_rank(*args: Any, **options: Any) -> Any:
            try:
                return ask(*args, **options)
            except ValueError:
                if not any(kind == "epochs" for kind, _ in self._card.noted):
                    raise
                return 0

        replacements.put(torch.distributed, "get_rank", get_rank)

    def _now(self) -> float:
        """Return the time, less the time spent in PyTorch's compiler."""
        return time.monotonic() - self._card.compiling.seconds

    @property
    def look_until(self) -> float:
        """The end of the time to follow the script, by `time.monotonic()`."""
        return self._follow_until + self._card.compiling.seconds

    @property
    def settled(self) -> bool:
        return self._look_until is not None

    @property
    def steps(self) -> int:
        """Optimizer steps; backward passes without an optimizer."""
        return self._card.progress.optimizer_steps or (0 if self.backward.optimizers else self.backward.count)

    def _watch_anew(self) -> None:
        """Start over, also when the first optimizer is made: earlier backward passes were not training."""
        self._settling = ConvergenceWatch(self._card, self._steps or 1)
        self._look_until: float | None = None
        self.loaders.hurry = self.phases.settled = self.loops.settled = self._card.calls.settled = False

    def _after_backward(self) -> None:
        self.loaders.after_backward()
        if not self.backward.optimizers:
            self._card.calls.end_step()
            self._after_step()

    def _after_step(self) -> None:
        self.phases.after_step()
        if self._steps is None:
            return
        self.loaders.hurry = self.settled
        if not self._card.memory.requests:
            if self.steps >= STEPS_WITHOUT_GPU:
                self._stop()
        elif self._look_until is None:
            if self._settling.is_settled(go_on=True, hold=self.loaders.largest_batch_pending):
                self._look_around()
        elif self.loops.leaving:
            if self.steps - self._left_at > MOST_STEPS_LEAVING or self._now() > self._look_until:
                self._card.note("after", "training could not be cut short: the code after it did not run")
                self._stop()
        elif self._has_looked_enough():
            self._leave()

    def _look_around(self) -> None:
        self._look_until = self._as_long_again()
        self._follow_until = self._look_until + LONGEST_AFTER
        self.loaders.hurry = not self.loops.is_something_due  # otherwise from the next step on, which does that work
        self.phases.settled = self.loops.settled = self._card.calls.settled = True
        self._validations_before = len(self.phases.stretches())
        self._on_settled()

    def _leave(self) -> None:
        """Continue to the code after training."""
        self._look_until = self._as_long_again()
        self._left_at, self.loops.leaving = self.steps, True

    def _as_long_again(self) -> float:
        """Return the time at which as much time has passed again, within limits."""
        now = self._now()
        return now + min(LONGEST_LOOK, max(SHORTEST_LOOK, now - self._begin))

    def _has_looked_enough(self) -> bool:
        assert self._look_until is not None
        if self._now() > self._look_until:
            return True
        seen = len(self.phases.stretches()) - self._validations_before
        if seen <= self._validations:
            return False
        peaks, before = (self._card.peak_allocated, self._card.peak_reserved), self._peaks
        self._validations, self._peaks = seen, peaks
        return seen >= 2 and peaks == before
