"""Allocations of the virtual GPU: purpose, lifetime, and totals over a run."""

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ullage.allocator import Block

ACTIVATIONS, PARAMETERS, GRADIENTS, OPTIMIZER, WORKSPACE, COPIES = range(6)
KINDS = ("activations", "parameters", "gradients", "optimizer", "workspace", "copies")


class Allocation:
    """One allocation: its block, begin and end (in allocator calls), rounded size and purpose."""

    __slots__ = ("begin", "block", "end", "index", "kind", "origin", "size")

    def __init__(self, begin: int, index: int, block: Block, kind: int, origin: int) -> None:
        self.begin, self.end, self.index, self.kind, self.origin = begin, -1, index, kind, origin
        self.block: Block | None = block
        self.size = block.size


class TensorAllocation(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that is also its allocation, which saves an object per tensor."""

    __slots__ = ("begin", "block", "end", "index", "kind", "marks", "origin", "size", "value")
    begin: int
    block: Block | None
    end: int
    index: int
    kind: int
    marks: int | None  # the largest number of nonzero elements; None: unknown (values.py)
    origin: int
    size: int
    value: Any  # a CPU tensor with the same values, if they are known (values.py)


AnyAllocation = Allocation | TensorAllocation


def timeline(
    spans: Sequence[AnyAllocation], reserved_at: Sequence[tuple[int, int]], end: int
) -> list[tuple[int, int, int]]:
    """Return the bytes allocated and reserved after each allocator call until `end`."""
    allocated = _totals(spans, end)  # anything that a garbage collector frees from here on is later
    points, reserved, steps = [], 0, dict(reserved_at)
    for clock in range(1, end + 1):
        reserved = steps.get(clock, reserved)
        points.append((clock, allocated[clock], reserved))
    return points


def largest_by_kind(spans: Sequence[AnyAllocation], end: int) -> dict[str, int]:
    return {name: max(_totals([span for span in spans if span.kind == kind], end)) for kind, name in enumerate(KINDS)}


def _totals(spans: Sequence[AnyAllocation], end: int) -> list[int]:
    """Return the rounded bytes in use after each allocator call."""
    changes = [0] * (end + 1)
    for span in spans:
        if span.begin <= end:
            changes[span.begin] += span.size
        if -1 < span.end <= end:
            changes[span.end] -= span.size
    return list(accumulate(changes))


def live_by_kind(spans: Sequence[AnyAllocation], moment: int) -> dict[str, int]:
    totals = [0] * len(KINDS)
    for span in spans:
        if span.begin <= moment and (span.end == -1 or span.end > moment):
            totals[span.kind] += span.size
    return dict(zip(KINDS, totals, strict=True))


def alive_from(spans: Sequence[AnyAllocation], begin: int, end: int) -> list[AnyAllocation]:
    first, last = (bisect_left(spans, moment + 1, key=lambda span: span.begin) for moment in (begin, end))
    return [span for span in spans[first:last] if span.end == -1 or span.end > end]


def origin_at(spans: Sequence[AnyAllocation], clock: int) -> int | None:
    """Return the origin number of the request at a moment, or `None`."""
    index = bisect_left(spans, clock, key=lambda span: span.begin)
    return spans[index].origin if index < len(spans) and spans[index].begin == clock else None
