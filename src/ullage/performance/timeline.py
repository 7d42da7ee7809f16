"""The time of a step from host and GPU: the host launches one call after the other, and the GPU runs them in order.

A call begins on the GPU when it is launched and those before it are done. A host that waits for the GPU continues when
all launched calls are done; most steps wait so for the copy of their batch. A host that never waits runs ahead, and the
longer of the two decides. Nothing here imports PyTorch.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ullage.performance.data_sheet import LATENCY_S
from ullage.performance.rates import HOST_PARTS, Floats, of_call

_OF_LAUNCHES = ("lists", "listed_tensors", "optimizer_calls", "waits")  # parts that belong to single launches


class Launch(NamedTuple):
    """A call that the host launches. `host` is the key of its host time: an operator in a pass (`alone.host_name`),
    "lists" with their number of `tensors`, "optimizer_calls", or "" for none. `work` is its place among the works of
    the step, -1 for none. `waits` says that the host then waits for the GPU. `times` multiplies the host time."""

    host: str
    work: int = -1
    tensors: int = 0
    waits: bool = False
    times: float = 1.0


@dataclass(frozen=True)
class Launches:
    """The launches of a step: distinct launches (`each`), and their `order` by number, beginning after a wait."""

    each: Sequence[Launch]
    order: npt.NDArray[np.int64]

    @classmethod
    def of(cls, launches: Mapping[int, Launch], order: Sequence[int]) -> Self:
        """Select the launches of an order of calls, which repeats: it is rotated so that it ends with a wait."""
        places = np.full(max(launches, default=-1) + 2, -1, dtype=np.int64)
        places[list(launches)] = np.arange(len(launches))
        numbers = places[np.minimum(np.array(order, dtype=np.int64), len(places) - 1)]
        numbers = numbers[numbers >= 0]
        each = list(launches.values())
        waiting = np.flatnonzero(np.array([launch.waits for launch in each], dtype=bool)[numbers])
        return cls(each, np.roll(numbers, -int(waiting[-1]) - 1) if len(waiting) else numbers)

    @functools.cached_property
    def _ends(self) -> list[int]:
        waits = np.array([launch.waits for launch in self.each], dtype=bool)[self.order]
        return [place + 1 for place in np.flatnonzero(waits).tolist()]

    @functools.cached_property
    def _of_pass(self) -> list[npt.NDArray[np.int64]]:
        passes = np.array([_pass(launch) for launch in self.each], dtype=np.int64)[self.order]
        return [np.flatnonzero(passes == number) for number in range(len(HOST_PARTS))]

    def on_host(self, parts: Mapping[str, float], calls: Mapping[str, float], counts: Mapping[str, float]) -> Floats:
        """Return the host seconds of each launch, in order: its own, and its share of the other host work in its pass.
        `parts` and `calls` are those of `Rates`, `counts` has the number of each part in the step."""
        own = np.array([_own(launch, parts, calls) for launch in self.each], dtype=np.float64)
        seconds = own[self.order]
        for here, several in zip(self._of_pass, HOST_PARTS.values(), strict=True):
            rest = sum(parts.get(name, 0.0) * counts.get(name, 0.0) for name in several if name not in _OF_LAUNCHES)
            if len(here):
                seconds[here] += rest / len(here)
            else:
                seconds[:1] += rest
        return seconds

    def on_gpu(self, times: Floats) -> Floats:
        """Return the GPU seconds of each launch, in order, if the works of the step take these times."""
        places = np.array([launch.work for launch in self.each], dtype=np.int64)
        return np.asarray(np.append(times, 0.0)[places[self.order]])

    def end(self, host: Floats, gpu: Floats) -> float:
        """Return the seconds until the step is done, given the host and GPU seconds of each launch."""
        if not self._ends:
            return max(float(host.sum()), float(gpu.sum()))
        # The time until a launch plus the GPU work from there on: the largest sum is the end.
        until, after = host.cumsum(), -gpu.cumsum()
        begins = [0, *self._ends[:-1]]
        both = np.maximum.reduceat(until + after + gpu, begins)
        starts = np.array([until[begin - 1] if begin else 0.0 for begin in begins])
        ends = np.array(self._ends) - 1
        works = after[ends]
        busy = both - works + LATENCY_S * (both > until[ends] + works)
        return float((np.maximum(busy, until[ends]) - starts).sum())

    def host_factor(self, host: Floats, gpu: Floats, seconds: float) -> float:
        """Return the factor on the `host` times with which the step takes this many seconds."""
        low, high = 0.1, 10.0
        while high > 1.002 * low:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.end(middle * host, gpu) > seconds else (middle, high)
        return float((low * high) ** 0.5)


def _own(launch: Launch, parts: Mapping[str, float], calls: Mapping[str, float]) -> float:
    waiting = parts.get("waits", 0.0) * launch.waits
    which, _, operator = launch.host.partition(" ")
    if operator:
        return waiting + launch.times * of_call(calls, launch.host)
    return waiting + parts.get(which, 0.0) + parts.get("listed_tensors", 0.0) * launch.tensors


def _pass(launch: Launch) -> int:
    which, _, operator = launch.host.partition(" ")
    return list(HOST_PARTS).index(which if operator else "optimizer") if launch.host else len(HOST_PARTS)
