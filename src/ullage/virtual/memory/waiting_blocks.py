"""Freed blocks that other streams may still use (`Tensor.record_stream`)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from ullage.allocator import Block, CachingAllocator, RequestLog
from ullage.allocator.private_pools import stream_of
from ullage.virtual.memory.launch_clock import MOST_LAUNCHES, LaunchClock

MOST_AHEAD = 2 * MOST_LAUNCHES  # the most allocator calls that the host is ahead of the GPU


class WaitingBlock(NamedTuple):
    """A block, its size, its request's number, the time of its free (in allocator calls), and its streams."""

    block: Block
    size: int
    number: int
    since: int
    streams: set[int]
    done: float = 0.0  # when the GPU will have finished earlier launches, by the clocks of `LaunchClock`


class WaitingBlocks:
    """The waiting blocks of one memory. They count as free and are reused only after their streams have passed."""

    def __init__(
        self, lock: AbstractContextManager[bool], allocator: Callable[[], CachingAllocator], requests: RequestLog
    ) -> None:
        self._lock, self._allocator, self._requests = lock, allocator, requests
        self._waiting: list[WaitingBlock] = []
        self._late: list[WaitingBlock] = []  # those that would wait if the host were as far ahead as possible
        self._streams: dict[int, set[int]] = {}  # by request number: streams recorded for its memory
        self.most_late = 0  # bytes of the late ones at their peak
        self.launch_clock: LaunchClock | None = None  # from the first `record_stream` on

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingBlock]:
        return iter(self._waiting)

    def record(self, number: int, stream: int) -> None:
        """Keep the memory of a request until this stream is done with it."""
        self._streams.setdefault(number, set()).add(stream)

    def recorded(self, number: int) -> set[int] | None:
        """Return the streams recorded for the memory of a request that is freed now."""
        return self._streams.pop(number, None)

    def add(self, block: Block, number: int, now: int, streams: set[int]) -> None:
        """Add a freed block that streams may still use."""
        self._allocator().free_later(block)
        # Blocks that wait for a GPU that is behind are in the figures, so `upper` must not add them again.
        behind = sum(entry.size for entry in self._waiting)
        done = 0.0 if self.launch_clock is None else self.launch_clock.free_later(stream_of(block.stream), streams)
        self._waiting.append(WaitingBlock(block, block.size, number, now, streams, done))
        self._late = [entry for entry in self._late if entry.since >= now - MOST_AHEAD]
        self._late.append(WaitingBlock(block, block.size, number, now, set(streams)))
        self.most_late = max(self.most_late, sum(entry.size for entry in self._late) - behind)

    def synchronized(self, stream: int | None = None, since: int | None = None) -> None:
        """End the waits for all work, for one stream, or for a stream's work up to a time (in allocator calls)."""
        for entry in self._waiting + self._late:
            if since is None or entry.since <= since:
                entry.streams.difference_update(list(entry.streams) if stream is None else (stream,))
        self._late = [entry for entry in self._late if entry.streams]
        self.release()

    def release(self) -> None:
        """Free the blocks that the GPU has passed; PyTorch does so only while no graph is captured."""
        allocator = self._allocator()
        if allocator.private.underway:
            return
        with self._lock:
            now = 0.0 if self.launch_clock is None else self.launch_clock.host
            for entry in self._waiting:
                if not entry.streams or entry.done <= now:
                    allocator.free_now(entry.block)
                    self._requests.free(entry.number)
                    entry.streams.clear()
            self._waiting = [entry for entry in self._waiting if entry.streams]
