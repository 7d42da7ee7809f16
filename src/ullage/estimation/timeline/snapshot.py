"""A trace as PyTorch's own memory snapshot, which its viewer opens.

    python -m torch.cuda._memory_viz trace_plot out.pickle -o out.html

and https://pytorch.org/memory_viz read it. The frames of an event name the operator, the module and the pass instead of
lines of Python.
"""

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.allocator.blocks import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SMALL_BUFFER,
)
from ullage.errors import InvalidValue
from ullage.estimation.timeline.trace import Trace

_ACTIONS = {
    ALLOC: "alloc",
    FREE_REQUESTED: "free_requested",
    FREE_COMPLETED: "free_completed",
    SEGMENT_ALLOC: "segment_alloc",
    SEGMENT_FREE: "segment_free",
}

Frames = list[dict[str, Any]]

REPEATED: Frames = [{"name": "the step before, repeated", "filename": "training", "line": 0}]


def write(trace: Trace, path: str | Path) -> None:
    """Write a trace as a memory snapshot.

    Not covered: the requests of the repetitions that let the allocator settle, and streams.
    """
    data = snapshot(trace)
    try:
        with open(path, "wb") as file:
            pickle.dump(data, file)
    except OSError as error:
        raise InvalidValue(f"cannot write the snapshot to {path}: {error.strerror}") from None


def snapshot(trace: Trace) -> dict[str, Any]:
    """Return what `torch.cuda.memory._snapshot()` would return at the end of the run, with its whole history."""
    frames = _frames(trace)
    steps = trace.steps.tolist()
    entries: list[dict[str, Any]] = []
    segments: dict[int, int] = {}
    blocks: dict[int, tuple[int, int, Frames]] = {}  # by address: size, requested bytes, frames
    call = 0
    for action, address, size, block in trace.events.tolist():
        where: Frames = []
        if action == ALLOC:
            step = bisect_left(steps, call + 1) + 1
            who = frames[trace.place[block]] if block >= 0 else REPEATED
            where = [*who, {"name": f"step {step}", "filename": "training", "line": step}]
            blocks[address] = int(trace.size[block]) if block >= 0 else size, size, where
        elif action in (FREE_REQUESTED, FREE_COMPLETED):
            where = blocks[address][2]
            if action == FREE_COMPLETED:
                del blocks[address]
        elif action == SEGMENT_ALLOC:
            segments[address] = size
        elif action == SEGMENT_FREE:
            _unmap(segments, address, size)
        call += block >= 0 and action in (ALLOC, FREE_COMPLETED)
        entries.append(
            {"action": _ACTIONS[action], "addr": address, "size": size, "stream": 0, "time_us": call, "frames": where}
        )
    return {
        "segments": [_segment(*part, trace.expandable) for part in _parts(segments, blocks, trace.expandable)],
        "device_traces": [entries],
        "external_annotations": [],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": trace.allocator_settings},
    }


def _frames(trace: Trace) -> list[Frames]:
    rows = []
    for operator, module, part in trace.places.tolist():
        words = [(trace.operators[operator] or "no operator", "operator")]
        name = trace.modules[module]
        words += [(name, f"module, {trace.passes[part]} pass")] if name else [("outside of the model", "module")]
        rows.append([{"name": text, "filename": what, "line": 0} for text, what in words])
    return rows


def _unmap(segments: dict[int, int], address: int, size: int) -> None:
    """Remove a range; it may be a part of an expandable segment."""
    start = max((begin for begin in segments if begin <= address), default=None)
    if start is None:
        return
    end = start + segments.pop(start)
    if start < address:
        segments[start] = address - start
    if address + size < end:
        segments[address + size] = end - address - size


def _parts(
    segments: dict[int, int], blocks: dict[int, tuple[int, int, Frames]], expandable: bool
) -> Iterator[tuple[int, int, list[tuple[int, tuple[int, int, Frames]]]]]:
    """Yield each segment with its blocks; adjacent mapped pages form one expandable segment."""
    ranges: list[list[int]] = []
    for begin in sorted(segments):
        if expandable and ranges and ranges[-1][1] == begin:
            ranges[-1][1] += segments[begin]
        else:
            ranges.append([begin, begin + segments[begin]])
    addresses = sorted(blocks)
    for begin, end in ranges:
        inside = addresses[bisect_left(addresses, begin) : bisect_right(addresses, end - 1)]
        yield begin, end, [(address, blocks[address]) for address in inside]


def _segment(
    begin: int, end: int, inside: list[tuple[int, tuple[int, int, Frames]]], expandable: bool
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    used = requested = 0
    at = begin

    def gap(until: int) -> None:
        if until > at:
            free = {"address": at, "size": until - at, "requested_size": 0, "state": "inactive", "frames": []}
            blocks.append(free)

    for address, (size, requested_size, frames) in inside:
        gap(address)
        taken = {"address": address, "size": size, "requested_size": requested_size, "state": "active_allocated"}
        blocks.append({**taken, "frames": frames})
        used, requested, at = used + size, requested + requested_size, address + size
    gap(end)
    return {
        "device": 0,
        "address": begin,
        "total_size": end - begin,
        "allocated_size": used,
        "active_size": used,
        "requested_size": requested,
        "stream": 0,
        "is_expandable": expandable,
        "segment_pool_id": (0, 0),
        "segment_type": "small" if end - begin <= SMALL_BUFFER else "large",
        "blocks": blocks,
        "frames": [],
    }
