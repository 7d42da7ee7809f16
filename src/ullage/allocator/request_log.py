"""The allocator requests of a run, in order, to play them again on that allocator or on another one."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from ullage.allocator.blocks import NO_LIMIT, Block
from ullage.allocator.caching import CachingAllocator
from ullage.allocator.config import AllocatorConfig

_LOWEST_ADDRESS = 1 << 21  # of segments at rising addresses


class RequestLog:
    """The requests, frees and emptied caches of a run, or of a part of it (`log[begin:end]`).

    Requests are numbered from `first`. A free counts back to the request of its block, so a part of a log can be played
    after any other requests. With `keeps` false nothing is stored: a job of a million steps needs no history.
    """

    def __init__(self, keeps: bool = True, first: int = 0) -> None:
        self._keeps = keeps
        self._entries: list[int] = []  # bytes; for a free, minus how many requests ago; 0 for an emptied cache
        self._lanes: dict[int, int] = {}  # by place, unless on the default stream outside all private pools
        self._next = first
        self.tried_at: list[int] = []  # places of requests that were only tried
        self.possible_sizes: list[tuple[int, int]] = []  # places, and the bytes that may be requested there

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, part: slice) -> Self:
        """Return a part of the log as its own log, in which requests that were only tried count as needed."""
        begin, end, _ = part.indices(len(self))
        log = type(self)()
        log._entries = self._entries[begin:end]
        log._lanes = {place - begin: lane for place, lane in self._lanes.items() if begin <= place < end}
        return log

    def ask(self, nbytes: int, lane: int = 0) -> int:
        """Record a request that the allocator served on a lane (`private_pools.py`); return its number."""
        number = self._next
        if self._keeps:
            if lane:
                self._lanes[len(self._entries)] = lane
            self._entries.append(nbytes)
            self._next = number + 1
        return number

    def free(self, number: int) -> None:
        if self._keeps:
            self._entries.append(number - self._next)

    def empty_cache(self) -> None:
        if self._keeps:
            self._entries.append(0)

    def note_trial(self) -> None:
        """Record that the last request was only tried."""
        if self._keeps:
            self.tried_at.append(len(self) - 1)

    def note_possible_size(self, nbytes: int, place: int | None = None) -> None:
        """Record another size, in bytes, that the next request, or the one at a place, may have."""
        if self._keeps:
            self.possible_sizes.append((len(self) if place is None else place, nbytes))

    def sizes(self, begin: int = 0, end: int | None = None) -> list[int]:
        return [entry for entry in self._entries[begin:end] if entry > 0]

    @property
    def is_plain(self) -> bool:
        """Whether all requests are on the default stream, and the cache is never emptied."""
        return not self._lanes and 0 not in self._entries

    def __iter__(self) -> Iterator[tuple[int, int | None]]:
        return self.numbered(0)

    def numbered(self, first: int) -> Iterator[tuple[int, int | None]]:
        """Iterate over the log after `first` other requests: (bytes, number) of a request, (0, number) of a free, (0,
        None) of an emptied cache."""
        for entry in self._entries:
            if entry > 0:
                yield entry, first
                first += 1
            else:
                yield 0, first + entry if entry else None

    def change(self, live: set[int], first: int) -> int | None:
        """Apply the log to the numbers of `live` requests after `first` others; return the new count of requests, or
        `None` if the log frees a request that is not live."""
        for nbytes, number in self.numbered(first):
            if number is None:
                continue
            if nbytes:
                live.add(number)
                first = number + 1
            elif number in live:
                live.remove(number)
            else:
                return None
        return first

    def can_repeat(self, live: set[int], first: int) -> bool:
        """Check whether the log can be played again and again after `first` requests, of which `live` are in use: all
        blocks that it frees must exist, and the second time must leave as much as the first."""
        before, end = set(live), first
        live = set(live)
        for _ in range(2):
            after = self.change(live, end)
            if after is None:
                return False
            end = after
        shift = end - first
        return all(number in live or number + shift in live for number in before)

    def play(
        self,
        allocator: CachingAllocator,
        blocks: list[Block | None],
        on_new_peak: Callable[[int], None] = lambda place: None,
    ) -> None:
        """Play the log on an allocator; `blocks` has the block of each earlier request and gets those of the log.
        `on_new_peak` gets the place of each entry that raises the reserved memory to a new peak."""
        highest, lanes = allocator.peak_reserved, self._lanes
        for place, entry in enumerate(self._entries):
            if entry > 0:
                blocks.append(allocator.malloc(entry, lanes.get(place, 0)))
                if allocator.peak_reserved > highest:
                    highest = allocator.peak_reserved
                    on_new_peak(place)
            elif entry:
                block = blocks[entry]
                assert block is not None, "what is freed was asked for"
                allocator.free(block)
                blocks[entry] = None
            else:
                allocator.empty_cache()

    def at_largest(self, tried: bool) -> Self:
        """Return the log with each uncertain request at its largest size; `tried` keeps those that were only tried."""
        log = type(self)()
        numbers: list[int | None] = []  # in the new log, by those in this one
        left_out = set() if tried else set(self.tried_at)
        possible = defaultdict(list)
        for place, larger in self.possible_sizes:
            possible[place].append(larger)
        for place, (nbytes, number) in enumerate(self):
            if place in left_out:
                numbers.append(None)
                continue
            for larger in possible.get(place, ()):
                if 0 < nbytes <= larger:
                    nbytes = larger
                else:
                    log.free(log.ask(larger))
            if nbytes:
                numbers.append(log.ask(nbytes, self._lanes.get(place, 0)))
            elif number is None:
                log.empty_cache()
            elif (freed := numbers[number]) is not None:
                log.free(freed)
        return log

    def largest_reserved(self, config: AllocatorConfig, tried: bool = False, rising: bool = False) -> int:
        """Return the peak of reserved memory with every uncertain request at its largest size; `tried` counts those
        that were only tried, `rising` puts each segment above those before it."""
        if not self.possible_sizes and not rising:
            return 0
        ends = [_LOWEST_ADDRESS]  # of the segments so far

        def place(size: int) -> int:
            ends.append(ends[-1] + size)
            return ends[-2]

        allocator = CachingAllocator(NO_LIMIT, config, segment_address=place if rising else None)
        self.at_largest(tried).play(allocator, [])
        return allocator.peak_reserved


class History(NamedTuple):
    """An allocator's events: actions (`blocks.ALLOC` and the others), addresses, and sizes as requested (segments: as
    taken)."""

    action: list[int]
    addr: list[int]
    size: list[int]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a history from an `.npz` file with these arrays; needs NumPy."""
        import numpy

        with numpy.load(path) as arrays:
            return cls(*(arrays[name].astype("int64").tolist() for name in cls._fields))
