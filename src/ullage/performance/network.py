"""The time in which ranks exchange data, and the part of it that the GPU waits. Modelled, not measured.

A collective takes the time of NCCL's own model (src/graph/tuning.cc): the steps of a ring, or of a tree if that is
faster, each with the latency of its network, and the bytes over the bandwidth of the narrowest place, times the factor
of the operation (doc/PERFORMANCE.md of nccl-tests). It begins when the calling stream is ready and the one before it in
the same group is done. The GPU computes until it needs the result.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ullage.performance.networks import FABRIC, NVLINK, PCIE, Interconnect
from ullage.performance.step import StepCalls

SPACE, WAIT = "collective", "collective.wait"

# Microseconds, of messages of 8 bytes with a flag each ("LL") and of whole chunks ("Simple"): before anything is sent,
# and for each step. Those of a tree are for a chunk.
_BEGIN = {"ring": (3.6, 8.4), "tree": (4.4, 0.0)}
_STEP = {
    "ring": {NVLINK: (0.47, 3.4), PCIE: (1.0, 5.7), FABRIC: (2.7, 9.6)},
    "tree": {NVLINK: (0.52, 28.0), PCIE: (1.0, 28.0), FABRIC: (5.0, 50.0)},
}
_SHARE = {"ring": (1 / 4, 1.0), "tree": (0.9 / 3.8, 0.9)}  # of the bandwidth


class Collective(NamedTuple):
    """One operation among `ranks` on `nodes` machines. `bytes` counts as in nccl-tests: all that is gathered, or all
    that is scattered. `peer` is the single rank of a message. `activations` marks an exchange in the forward pass,
    which shows that these ranks work on the same samples."""

    operation: str
    bytes: int
    ranks: int
    nodes: int = 1
    ranks_per_node: int = 1  # of the whole job: they share the adapters
    peer: int = -1
    activations: int = 0

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Self:
        values = {name: call["kwargs"][name] for name in cls._fields[1:] if name in call["kwargs"]}
        return cls(str(call["operator"]).partition(".")[2], **values)

    @property
    def factor(self) -> float:
        """The bytes that pass the narrowest place, over the bytes of the operation."""
        ranks = self.ranks
        if self.operation in ("broadcast", "reduce", "send", "recv"):
            return 1.0
        return (2 if self.operation == "all_reduce" else 1) * (ranks - 1) / ranks

    def seconds(self, by: Interconnect) -> float:
        """Return the seconds that the operation takes.

        >>> from ullage.hardware import gpu
        >>> from ullage.performance.networks import interconnect_of
        >>> h100 = interconnect_of(gpu("H100"))
        >>> round(1e3 * Collective("all_reduce", 1_000_000_000, ranks=8, ranks_per_node=8).seconds(h100), 2)
        4.78
        >>> Collective("all_reduce", 1_000_000_000, ranks=1).seconds(h100)
        0.0
        """
        if self.ranks < 2:
            return 0.0
        algorithms = ("ring", "tree") if self.operation == "all_reduce" else ("ring",)
        return min(self._by(algorithm, protocol, by) for algorithm in algorithms for protocol in range(2))

    def _by(self, algorithm: str, protocol: int, by: Interconnect) -> float:
        inside, between = (_STEP[algorithm][network.kind][protocol] for network in (by.inside, by.between))
        rings = {"all_reduce": 2, "send": 0, "recv": 0}.get(self.operation, 1)
        if algorithm == "tree":
            here, away = 2 * (self.ranks // self.nodes - 1), 2 * math.ceil(math.log2(self.nodes))
            factor = 2.0
        elif rings:
            here, away = rings * (self.ranks - self.nodes), rings * (self.nodes - 1)
            factor = self.factor
        else:
            here, away, factor = int(self.nodes == 1), int(self.nodes > 1), self.factor
        latency = _BEGIN[algorithm][protocol] + here * inside + away * between
        return 1e-6 * latency + self.bytes * factor / (_SHARE[algorithm][protocol] * self._bandwidth(by))

    def _bandwidth(self, by: Interconnect) -> float:
        """Return bytes per second at the narrowest place: a GPU's own, or the group's share of the adapters."""
        on_node = self.ranks / self.nodes
        own = by.inside.bandwidth if on_node > 1 else math.inf
        if self.nodes == 1:
            return 1e9 * own
        adapters = by.adapters or (self.ranks_per_node if by.between.per_gpu else 1)
        each = adapters * by.between.bandwidth / self.ranks_per_node
        alone = 1 if self.operation in ("all_to_all", "send", "recv") else on_node  # others leave a machine once
        return 1e9 * min(own, each * alone)


class Pipeline(NamedTuple):
    """`stages` of a model, each on a rank, through which a step sends `microbatches`."""

    stages: int
    microbatches: int

    @property
    def bubble(self) -> float:
        """A stage's wait for the others over its own time: the first micro-batch passes all others before it, or the
        last one after it. For equal stages, in GPipe and 1F1B; interleaved stages send more often."""
        return (self.stages - 1) / self.microbatches

    @classmethod
    def of(cls, sent: Mapping[Collective, int]) -> Self | None:
        """Return the pipeline that the messages of a step show: gradients come back from the rank that got activations.
        In a ring, as of attention, they do not."""
        to, back = ({one.peer for one in sent if one.operation == way} for way in ("send", "recv"))
        if not to or to != back:
            return None
        messages = {one: count for one, count in sent.items() if one.operation == "send"}
        return cls(max(one.ranks for one in messages), max(messages.values()))


@dataclass(frozen=True)
class Exchange:
    """The collectives of a step in their places among its calls.

    `order` has the number of each call, as in `StepCalls`; `events` are the places of collectives and waits, with
    their calls; `backward_ends` are the places of calls outside backward passes; `bubble` is that of `StepCalls`.
    """

    order: npt.NDArray[np.int64]
    events: list[tuple[int, dict[str, Any]]]
    backward_ends: list[int]
    bubble: float | None = None

    @classmethod
    def of(cls, step: StepCalls) -> Self | None:
        special = {number for number, call in enumerate(step.calls) if call["operator"].startswith(f"{SPACE}.")}
        if not special:
            return None
        backward = [call.get("pass") == "backward" for call in step.calls]
        events = [(place, step.calls[number]) for place, number in enumerate(step.order) if number in special]
        ends = [place for place, number in enumerate(step.order) if not backward[number]]
        return cls(np.array(step.order, dtype=np.int64), events, ends, step.bubble)

    def collectives(self) -> list[Collective]:
        return [Collective.of(call) for _, call in self.events if call["operator"] != WAIT]

    def _with_joins(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the events, and the waits of DDP for its buckets. The last one begins when the last gradient is ready;
        after that the backward pass only copies the sums."""
        last: dict[tuple[int, int], int] = {}  # of each backward pass and group
        for number, (place, call) in enumerate(self.events):
            if call["kwargs"].get("joins"):
                last[bisect.bisect_left(self.backward_ends, place), call["kwargs"]["group"]] = number
        joins = {number: group for (_, group), number in last.items()}
        events = []
        for number, (place, call) in enumerate(self.events):
            events.append((place, call))
            if number in joins:
                events.append((place, {"operator": WAIT, "kwargs": {"group": joins[number]}}))
        return events

    def waiting(self, seconds: Sequence[float] | npt.NDArray[np.float64], by: Interconnect) -> float:
        """Return the seconds in which the GPU waits for others in a step, given the `seconds` of each distinct call."""
        clock = np.concatenate([[0.0], np.cumsum(np.asarray(seconds)[self.order])])
        waited, places, shifts = 0.0, [0], [0.0]  # delays, each from a place on
        free: dict[int, float] = {}
        ends: list[float] = []
        for place, call in self._with_joins():
            values = call["kwargs"]
            if call["operator"] != WAIT:
                begin = max(0, place - values["lead"])
                ready = clock[begin] + shifts[bisect.bisect_right(places, begin) - 1]
                end = max(ready, free.get(values["group"], 0.0)) + Collective.of(call).seconds(by)
                free[values["group"]] = end
                ends.append(end)
                continue
            if "group" in values:
                done = free.get(values["group"], 0.0)
            else:
                done = ends[-1 - values["back"]] if values["back"] < len(ends) else 0.0
            late = done - (clock[place] + waited)
            if late > 0:
                waited += late
                places.append(place)
                shifts.append(waited)
        return waited + max(0.0, max(free.values(), default=0.0) - (float(clock[-1]) + waited))
