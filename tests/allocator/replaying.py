"""Replay a recorded history of the allocator, and find the first difference between the replay and the recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ullage.allocator.blocks import ALLOC, FREE_COMPLETED, NO_LIMIT, SEGMENT_ALLOC, SEGMENT_FREE, Block
from ullage.allocator.caching import CachingAllocator
from ullage.allocator.config import AllocatorConfig

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")


class AllocatorEvent(NamedTuple):
    """One entry of a history: ``action`` indexes ACTIONS, ``size`` is as requested (segments: as taken)."""

    action: int
    addr: int
    size: int

    @property
    def name(self) -> str:
        return ACTIONS[self.action]


@dataclass
class History:
    """What an allocator did: three lists of one length, and the settings it ran with."""

    action: list[int]
    addr: list[int]
    size: list[int]
    config: AllocatorConfig = field(default_factory=AllocatorConfig)

    def __post_init__(self) -> None:
        if not len(self.action) == len(self.addr) == len(self.size):
            raise ValueError(
                f"a history needs lists of one length, not {len(self.action)}, {len(self.addr)} and {len(self.size)}"
            )

    def __len__(self) -> int:
        return len(self.action)

    def events(self) -> list[AllocatorEvent]:
        return [AllocatorEvent(*entry) for entry in zip(self.action, self.addr, self.size, strict=True)]

    def segments(self) -> list[tuple[int, int]]:
        """Address and size of every segment, in the order in which they were taken."""
        return [(event.addr, event.size) for event in self.events() if event.action == SEGMENT_ALLOC]

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a history: ``.npz`` with arrays action, addr and size (needs numpy), or ``.json``.

        The JSON form is ``{"config": "max_split_size_mb:64", "events": [["alloc", 0, 512], ...]}``, the
        settings optional.
        """
        path = Path(path)
        if path.suffix == ".npz":
            return cls._load_arrays(path)
        if path.suffix == ".json":
            return cls._load_json(path)
        raise ValueError(f"a history ends in .npz or .json, {path.name!r} does not")

    @classmethod
    def _load_arrays(cls, path: Path) -> History:
        import numpy

        with numpy.load(path) as arrays:
            return cls(*(arrays[name].astype("int64").tolist() for name in ("action", "addr", "size")))

    @classmethod
    def _load_json(cls, path: Path) -> History:
        content = json.loads(path.read_text())
        events = content["events"]
        return cls(
            [ACTIONS.index(name) for name, _, _ in events],
            [addr for _, addr, _ in events],
            [size for _, _, size in events],
            AllocatorConfig.parse(content.get("config", "")),
        )


@dataclass(frozen=True)
class ReplayDifference:
    """The first event that differs between a history and its replay; None stands for the end of one of them."""

    index: int
    expected: AllocatorEvent | None
    got: AllocatorEvent | None

    def __str__(self) -> str:
        expected, got = (
            "nothing" if event is None else f"{event.name} of {event.size} at {event.addr}"
            for event in (self.expected, self.got)
        )
        return f"event {self.index}: {expected} expected, {got} got"


@dataclass
class ReplayResult:
    """What a replay did, and the first event in which it differs from the history, if any."""

    block_addresses: list[int]
    segments: list[tuple[int, int]]
    peak_allocated: int
    peak_reserved: int
    first_difference: ReplayDifference | None


def replay(history: History, *, true_segments: bool = True) -> ReplayResult:
    """Repeat the requests of a history on a GPU without limit, and compare.

    With ``true_segments`` new segments get the recorded addresses, so that every address can be compared;
    without, they get addresses of the allocator's own, and only actions and sizes are compared. Blocks
    become free where the history says so (``free_completed``). Recorded frees of segments are followed: with
    true segments one by one, otherwise as ``empty_cache``.
    """
    expected = history.events()
    done: list[AllocatorEvent] = []
    recorded = iter([event.addr for event in expected if event.action == SEGMENT_ALLOC])
    allocator = CachingAllocator(
        NO_LIMIT,
        history.config,
        segment_address=(lambda size: _next_address(recorded, done)) if true_segments else None,
    )
    allocator.on_event = lambda action, addr, size: done.append(AllocatorEvent(action, addr, size))
    live: dict[int, Block] = {}
    for event in expected:
        if event.action == ALLOC:
            live[event.addr] = allocator.malloc(event.size)
        elif event.action == FREE_COMPLETED:
            # A block allocated before the recording began is not known here; the comparison will say so.
            block = live.pop(event.addr, None)
            if block is not None:
                allocator.free(block)
        elif event.action == SEGMENT_FREE:
            _free_segment(allocator, event.addr if true_segments else None)
    return ReplayResult(
        [event.addr for event in done if event.action == ALLOC],
        [(event.addr, event.size) for event in done if event.action == SEGMENT_ALLOC],
        allocator.peak_allocated,
        allocator.peak_reserved,
        _first_difference(expected, done, addresses=true_segments),
    )


def _next_address(recorded: Iterator[int], done: list[AllocatorEvent]) -> int:
    """The next recorded segment; where the replay needs more than were recorded, one beyond all others."""
    address = next(recorded, None)
    if address is not None:
        return address
    return max((event.addr + event.size for event in done), default=0)


def _free_segment(allocator: CachingAllocator, address: int | None) -> None:
    if address is None:
        allocator.empty_cache()
        return
    for head in allocator.heads.values():
        if head.address == address and not head.allocated and not head.is_split:
            allocator.release_segment(head)
            return


def _first_difference(
    expected: list[AllocatorEvent], done: list[AllocatorEvent], *, addresses: bool
) -> ReplayDifference | None:
    for index, (wanted, got) in enumerate(zip(expected, done, strict=False)):
        same = wanted == got if addresses else (wanted.action, wanted.size) == (got.action, got.size)
        if not same:
            return ReplayDifference(index, wanted, got)
    if len(expected) == len(done):
        return None
    index = min(len(expected), len(done))
    return ReplayDifference(
        index, expected[index] if index < len(expected) else None, done[index] if index < len(done) else None
    )
