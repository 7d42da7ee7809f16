"""Ullage's own training loop: its last watched step is extrapolated.

The standard loop (`ullage.jobs.training`) does the same in each iteration, so only the model can differ. If the second
iteration made the same calls as the first, and leaves no state by which a third one could differ, the third step equals
the second: its requests are made without running the model.

Such state is random numbers drawn on the CPU, changed attributes of modules, and values read from the GPU. Only modules
and optimizers of known packages are trusted to have no other state. In all other cases the step is run.
"""

import functools
import gc
import random
import sys
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from ullage.allocator import RequestLog
from ullage.virtual.memory.tensors import DeviceMemory
from ullage.virtual.watching.request_origins import RequestOrigins
from ullage.virtual.watching.step_calls import OPTIMIZER, OUTSIDE, PASSES, OperatorCalls

PACKAGES = ("torch", "torchvision", "timm", "transformers", "ullage")
# Optimizers whose third step is like the second.
OPTIMIZERS = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


class _StepEnd(NamedTuple):
    clock: int
    requests: int
    spans: int
    notes: dict[tuple[str, str], int]
    draws: tuple[Any, ...]
    attributes: list[Any]


class OwnLoop:
    """One run of the standard loop on one virtual GPU; see `VirtualGPU.begin_own_loop`."""

    def __init__(
        self,
        memory: DeviceMemory,
        calls: OperatorCalls,
        origins: RequestOrigins,
        notes: dict[tuple[str, str], int],
        model: Any,
        optimizer: Any,
    ) -> None:
        self._memory, self._calls, self._origins, self._notes, self._model = memory, calls, origins, notes, model
        self._begins: list[int] = []  # calls before each iteration
        self._ends: list[_StepEnd] = []
        own = type(optimizer)
        modules = {type(module).__module__.partition(".")[0] for module in model.modules()}
        self._trusted = own.__name__ in OPTIMIZERS and (own.__module__ + ".").startswith("torch.optim.")
        self._trusted &= modules.issubset(PACKAGES)

    def begin_iteration(self) -> None:
        self._begins.append(self._calls.position)

    def end_step(self) -> None:
        if self._trusted:
            memory = self._memory
            places = memory.clock, len(memory.requests), len(memory.spans)
            self._ends.append(_StepEnd(*places, dict(self._notes), _draws(), _attributes(self._model)))

    def end(self) -> None:
        """Release the model: its memory is freed when its owner drops it."""
        self._model, self._trusted = None, False
        self._ends.clear()

    def extrapolate(self) -> bool:
        """Make the requests, calls and notes of the next step if they are known; return whether they were."""
        steps = len(self._ends)
        if steps < 2 or steps != len(self._begins) or not self._has_alike_iterations() or not self._left_nothing():
            return False
        step = self._next_step()
        if step is None:
            return False
        self._make(step)
        return True

    def _has_alike_iterations(self) -> bool:
        """Check whether the last two iterations made the same calls, up to the optimizer's."""
        calls = self._calls
        dropped = calls.position - len(calls.stream)
        before, last = (begin - dropped for begin in self._begins[-2:])
        if before < 0:
            return False
        return _are_alike(_until_optimizer(calls.stream[before:last]), _until_optimizer(calls.stream[last:]))

    def _left_nothing(self) -> bool:
        before, now = self._ends[-2:]
        if before.notes.keys() != now.notes.keys():
            return False
        if any(kind == "values" and count != before.notes[kind, text] for (kind, text), count in now.notes.items()):
            return False
        if before.draws != now.draws or len(before.attributes) != len(now.attributes):
            return False
        return all(map(is_, before.attributes, now.attributes))

    def _next_step(self) -> RequestLog | None:
        """Return the requests and frees of the next step; `None` if unknown."""
        memory, (before, now) = self._memory, self._ends[-2:]
        log, requests = memory.requests, memory.requests[before.requests :]
        if (
            not memory.keeps_history
            or memory.waiting.launch_clock is not None
            or memory.waiting
            or memory.stream
            or memory.held_back
            or log.tried_at
            or memory.before_request is not None
            or not requests.is_plain
            or any(place in (before.requests, now.requests) for place, _ in log.possible_sizes)
            or (memory.clock, len(log), len(memory.spans)) != now[:3]
            or now.clock - before.clock != len(requests)
            or len(log.sizes()) != now.spans
            or len(requests.sizes()) != now.spans - before.spans
        ):
            return None
        carried = self._carried(requests, before.spans)
        if carried is None:
            return None
        step, shift = RequestLog(first=now.spans), now.spans - before.spans
        for nbytes, number in requests.numbered(before.spans):
            assert number is not None, "no cache was emptied"
            if nbytes:
                step.ask(nbytes)
            else:
                step.free(number + shift if number >= before.spans else carried[number])
        live = {span.index for span in memory.spans if span.block is not None}
        end = step.change(live, now.spans)
        return step if end is not None and step.can_repeat(live, end) else None

    def _carried(self, requests: RequestLog, begin: int) -> dict[int, int] | None:
        """Map earlier allocations that the step freed to those that replace them: requested in the same order, by the
        same origin, with the same size and purpose."""
        spans, name = self._memory.spans, self._origins.origin
        older = (number for nbytes, number in requests.numbered(begin) if not nbytes)
        freed = sorted(number for number in older if number is not None and number < begin)
        left = [span.index for span in spans[begin:] if span.block is not None]
        sizes = self._memory.requests.sizes()
        pairs = dict(zip(freed, left, strict=False))
        alike = all(
            sizes[one] == sizes[two]
            and spans[one].kind == spans[two].kind
            and (spans[one].origin == spans[two].origin or name(spans[one].origin) == name(spans[two].origin))
            for one, two in pairs.items()
        )
        return pairs if len(freed) == len(left) and alike else None

    def _make(self, step: RequestLog) -> None:
        memory, (before, now) = self._memory, self._ends[-2:]
        origin, collects = memory.origin, gc.isenabled()
        models = iter(memory.spans[before.spans : now.spans])  # the same allocations, a step earlier
        gc.disable()
        try:
            for nbytes, number in step.numbered(now.spans):
                assert number is not None, "no cache is emptied"
                if nbytes:
                    memory.origin = functools.partial(int, (model := next(models)).origin)
                    memory.take(nbytes, model.kind)
                else:
                    memory.give_back(memory.spans[number])
        finally:
            memory.origin = origin
            if collects:
                gc.enable()
        later, shift = now.requests - before.requests, now.spans - before.spans
        for place, larger in list(memory.requests.possible_sizes):
            if place > before.requests:
                memory.requests.note_possible_size(larger, place + later)
        for copy, source in list(memory.copied_from.items()):
            if copy >= before.spans:
                memory.copied_from[copy + shift] = source + shift if source >= before.spans else source
        for note, count in now.notes.items():
            self._notes[note] += count - before.notes[note]
        self._calls.repeat_step()
        self._origins.repeat_step(before.clock, now.clock)


def _until_optimizer(calls: Sequence[int]) -> Sequence[int]:
    kinds = len(PASSES)
    return calls[: next((place for place, number in enumerate(calls) if number % kinds == OPTIMIZER), 0)]


def _are_alike(before: Sequence[int], last: Sequence[int]) -> bool:
    """Check whether two iterations made the same calls. Calls of the loop outside of the model, such as those of a
    `GradScaler`, may occur in the first one alone."""
    kinds, calls = len(PASSES), iter(before)
    for number in last:
        for one in calls:
            if one == number:
                break
            if one % kinds != OUTSIDE:
                return False
        else:
            return False
    return len(last) > 0 and all(one % kinds == OUTSIDE for one in calls)


def _draws() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    kind, keys, *rest = numpy.get_state() if numpy is not None else ("", b"")
    return random.getstate(), bytes(torch.default_generator.get_state().tolist()), kind, bytes(keys), *rest


def _attributes(model: Any) -> list[Any]:
    """Return the attributes of a model's modules, to compare them by identity: a number that was made again costs one
    step."""
    attributes: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            attributes += name, value
            if isinstance(value, dict):
                attributes.extend(value.values())
            elif isinstance(value, list | tuple):
                attributes.extend(value)
    return attributes
