"""Memory of the virtual GPU: tensors whose storages are blocks of the allocator, and a history of every allocation.

A block lives as long as the storage of its tensor. PyTorch keeps the Python object of a storage alive as long as the
storage itself, so a weak reference to that object tells when the memory is freed, in whichever thread it happens.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ullage.allocator import (
    Block,
    CachingAllocator,
    OutOfMemory,
    PoolId,
    PoolState,
    checkpoint,
    format_size,
    restore,
)
from ullage.allocator.private_pools import NO_POOL, stream_of
from ullage.virtual.native import current_stream, set_length, tensor_without_data
from ullage.virtual.shared_card.process import SharedCard
from ullage.virtual.tracking.lead import FREE, MOST_LAUNCHES, SEGMENT, HostLead

ACTIVATIONS, PARAMETERS, GRADIENTS, OPTIMIZER, WORKSPACE, COPIES = range(6)
WITHOUT_LIMIT = 1 << 44  # bytes: addresses have 47 bits, and expandable segments set aside several times the card
MOST_AHEAD = 2 * MOST_LAUNCHES  # allocator calls that the host is ahead of the GPU at most
LONGEST_REQUEST = 5.0  # seconds after which a thread that is in the middle of one is not waited for
KINDS = ("activations", "parameters", "gradients", "optimizer", "workspace", "copies")

_storage_of: Any = torch._C.TensorBase.untyped_storage


class Span:
    """One allocation: its block, when it began and ended (in allocator calls), its rounded size, what it was for."""

    __slots__ = ("begin", "block", "end", "index", "kind", "origin", "size")

    def __init__(self, begin: int, index: int, block: Block, kind: int, origin: int) -> None:
        self.begin, self.end, self.index, self.kind, self.origin = begin, -1, index, kind, origin
        self.block: Block | None = block
        self.size = block.size


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that is also the span of its memory: one object less for every tensor."""

    __slots__ = ("begin", "block", "end", "index", "kind", "marks", "origin", "size", "value")
    begin: int
    block: Block | None
    end: int
    index: int
    kind: int
    marks: int | None  # at most so many of its elements are not zero; None: nobody knows (values.py)
    origin: int
    size: int
    value: Any  # a tensor of the CPU with the same values, where they are known (values.py)


class _Waiting(NamedTuple):
    """A block that was freed while other streams were at work on it."""

    block: Block
    number: int  # of its span, or its size in bytes
    since: int  # in allocator calls
    streams: set[int]
    done: float = 0.0  # when the GPU will have done what was launched before, by the clocks of `HostLead`


class SideRequest(int):
    """Bytes asked for on another stream than the default one, or in a private pool: `lane` says where."""

    lane: int

    def __new__(cls, nbytes: int, lane: int) -> SideRequest:
        request = super().__new__(cls, nbytes)
        request.lane = lane
        return request


def lane_of(request: int) -> int:
    """Where the allocator serves a request of `DeviceMemory.requests`.

    >>> lane_of(512), lane_of(SideRequest(512, 7))
    (0, 7)
    """
    return request.lane if type(request) is SideRequest else 0


def address_of(storage: Any) -> int:
    """The address of a storage: that of its block, or the one that it was made for."""
    watch = getattr(storage, "ullage", None)
    if watch is not None and watch.block is not None:
        return int(watch.block.address)
    return int(getattr(storage, "ullage_address", 0))


class DeviceMemory:
    """Tensors and workspaces over one caching allocator.

    >>> memory = DeviceMemory(CachingAllocator(1 << 30))
    >>> tensor = memory.tensor((2, 3), (3, 1), torch.float32, 24)
    >>> memory.allocator.allocated
    512
    """

    def __init__(
        self, allocator: CachingAllocator, context: int = 0, total: int = 0, keeps_history: bool = True
    ) -> None:
        self.allocator = allocator
        self.keeps_history = keeps_history
        self.context, self.total = context, total
        self.kind = ACTIVATIONS
        kept: Callable[[], list[Any]] = list if keeps_history else _Forgetful
        self.spans: list[Span | _Watch] = kept()
        # Bytes asked for; for a free, minus how many requests ago it was asked for; 0 where the cache was emptied.
        self.requests: list[int] = kept()
        self.tried_at: list[int] = kept()  # places in `requests` of workspaces that were only tried, see `try_out`
        self.tried = 0, 0  # the highest `allocated` and `reserved` with those; the allocator's own peaks leave them out
        self.possible_sizes: list[tuple[int, int]] = kept()  # places in `requests`, and bytes that may be asked for
        self.copied_from: dict[int, int] = {}  # the index of a copy's span to that of what it was copied from
        self.clock = 0
        self.peak_clock = 0
        self.closed = False
        self.repeating = False  # inside `repeat`, where the allocator's events belong to no request of the run
        self.origin: Callable[[], int] = lambda: 0  # the number of the present origin
        self.before_request: Callable[[], None] | None = None
        self.peak_reserved_clock = 0
        self._reserved = 0
        self._peak_reserved = 0
        self.out_of_memory: str | None = None  # the last such error; code may have caught it
        self.reserved_at: list[tuple[int, int]] = kept()
        self._used_elsewhere: dict[int, set[int]] = {}  # the index of a span to the streams it was recorded on
        self.waiting: list[_Waiting] = []  # freed, but other streams may be at work on them
        self._late: list[_Waiting] = []  # those that would wait if the host were as far ahead as it can be
        self.most_late = 0  # bytes of these at their peak
        self.lead: HostLead | None = None  # from the first `record_stream` on
        self.held_back = 0  # bytes that somebody holds for a time after their last use: NCCL's watchdog
        self._lock = threading.RLock()
        self._peak = -1

    @property
    def stream(self) -> int:
        """The number of the stream that is current; native code sets it too, in a backward pass."""
        return current_stream.value

    @stream.setter
    def stream(self, number: int) -> None:
        current_stream.value = number

    def tensor(self, size: Any, stride: Any, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """Make a tensor; raises `torch.OutOfMemoryError` if the GPU is full."""
        tensor = tensor_without_data(size, stride, dtype)
        if nbytes:
            self.attach(tensor, nbytes)
        return tensor

    def attach(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Allocate memory for a tensor that was made without any."""
        self._attach(_storage_of(tensor), nbytes, self.kind)

    def _attach(self, storage: Any, nbytes: int, kind: int) -> None:
        with self._lock:
            block = self._block(nbytes)
            watch = _Watch(storage, self._storage_died)
            watch.block, watch.size, watch.kind = block, block.size, kind
            watch.begin, watch.end, watch.origin = self.clock, -1, self.origin()
            watch.value = watch.marks = None
            spans = self.spans
            watch.index = len(spans)
            spans.append(watch)
            storage.ullage = watch  # this keeps the weak reference alive, too

    def resize(self, storage: Any, nbytes: int) -> None:
        """`UntypedStorage.resize_`: new memory is taken, then the old is given back (resize_bytes_cuda)."""
        with self._lock:
            before = getattr(storage, "ullage", None)
            if nbytes:
                self._attach(storage, nbytes, self.kind if before is None else before.kind)
            if before is not None and before.block is not None:
                self._free(before)
            set_length(storage, nbytes)

    def record_stream(self, span: Span | _Watch | None, stream: int) -> None:
        """`Tensor.record_stream`: the memory is not free before this stream is done with it."""
        if span is not None and span.block is not None and stream != stream_of(span.block.stream):
            self._used_elsewhere.setdefault(span.index, set()).add(stream)

    def read_back(self) -> None:
        """The host waits for what the current stream has to do."""
        if self.lead is not None:
            self.lead.wait(self.lead.done(self.stream))
        if self.waiting:
            self.synchronized(self.stream)

    def moment(self, stream: int) -> tuple[int, float]:
        """Now, in allocator calls, and when a stream will have done what was launched on it so far."""
        return self.clock, 0.0 if self.lead is None else self.lead.done(stream)

    def synchronized(self, stream: int | None = None, since: int | None = None) -> None:
        """All work is done, or all that one stream had, or had at a time (in allocator calls)."""
        for entry in self.waiting + self._late:
            if since is None or entry.since <= since:
                entry.streams.difference_update(list(entry.streams) if stream is None else (stream,))
        self._late = [entry for entry in self._late if entry.streams]
        self._free_what_is_done()

    def _free_what_is_done(self) -> None:
        """What the GPU has come to since it was freed; PyTorch looks only where no graph is being captured."""
        if self.allocator.private.underway:
            return
        with self._lock:
            now = 0.0 if self.lead is None else self.lead.host
            for entry in self.waiting:
                if not entry.streams or entry.done <= now:
                    self.allocator.free_now(entry.block)
                    self.requests.append(entry.number - len(self.spans))
                    entry.streams.clear()
            self.waiting = [entry for entry in self.waiting if entry.streams]

    def take(self, nbytes: int, kind: int | None = None) -> Span:
        """Allocate a block without a tensor, for a temporary or a workspace; `give_back` frees it."""
        with self._lock:
            block = self._block(nbytes)
            span = Span(self.clock, len(self.spans), block, self.kind if kind is None else kind, self.origin())
            self.spans.append(span)
            return span

    def _block(self, nbytes: int) -> Block:
        if self.before_request is not None:
            self.before_request()
        if self.waiting:
            self._free_what_is_done()
        allocator = self.allocator
        try:
            block = allocator.malloc(nbytes, self.stream)
        except OutOfMemory as error:
            if self.waiting and not allocator.private.underway:  # the host waits for the GPU before it gives up
                self.synchronized()
                return self._block(nbytes)
            self.out_of_memory = self._message(error)
            raise torch.OutOfMemoryError(self.out_of_memory) from None
        self.clock = clock = self.clock + 1
        self.requests.append(SideRequest(nbytes, block.stream) if block.stream else nbytes)
        if allocator.allocated > self._peak:
            self._peak = allocator.allocated
            self.peak_clock = clock
        if allocator.reserved != self._reserved:
            self.note_reserved()
            if self.lead is not None:
                self.lead.host += SEGMENT
        return block

    def empty_cache(self, pool: PoolId = NO_POOL) -> None:
        """Give what is cached back to the card, or what one private pool has cached."""
        with self._lock:
            self.synchronized()
            self.allocator.empty_cache(pool)
            if self.requests and pool == NO_POOL:
                self.requests.append(0)
            self.note_reserved()

    def try_out(self, sizes: Sequence[int], room: int, larger: int = 0) -> int:
        """Take the largest of these sizes that there is room for, empty the cache, and return what it was.

        So `cudnn.benchmark` tries plans (aten/src/ATen/native/cudnn/Conv_v8.cpp, generate_and_filter_plans): those
        with a workspace larger than all that is free on the card and than the largest cached block are left out, and
        what the allocator refuses is halved. `larger` is what the largest size may be. A job does not need this
        memory: the allocator's peaks stay as they are, and `tried` has those with it.

        >>> memory = DeviceMemory(CachingAllocator(1 << 30))
        >>> memory.try_out([3 << 30, 512 << 20, 1 << 20], room=1 << 30) >> 20
        512
        >>> memory.allocator.peak_reserved, memory.tried[1] >> 20
        (0, 512)
        """
        with self._lock:
            allocator = self.allocator
            peaks = allocator.peak_allocated, allocator.peak_reserved
            most = max(room, allocator.largest_cached_block())
            size = max((size for size in sizes if size <= most), default=0)
            while size:
                try:
                    span = self.take(size, WORKSPACE)
                except torch.OutOfMemoryError:
                    size, self.out_of_memory = size // 2, None
                    continue
                self.tried_at.append(len(self.requests) - 1)
                if larger > size:
                    self.possible_sizes.append((len(self.requests) - 1, larger))
                self.give_back(span)
                break
            self.empty_cache()
            now = allocator.peak_allocated, allocator.peak_reserved
            self.tried = max(self.tried[0], now[0]), max(self.tried[1], now[1])
            allocator.peak_allocated, allocator.peak_reserved = peaks
            return size

    def note_reserved(self) -> None:
        """Record that the reserved memory has changed."""
        self._reserved = self.allocator.reserved
        self.reserved_at.append((self.clock, self._reserved))
        if self._reserved > self._peak_reserved:
            self._peak_reserved = self._reserved
            self.peak_reserved_clock = self.clock

    @property
    def timeline(self) -> list[tuple[int, int, int]]:
        """Allocator calls, each with the bytes allocated and reserved after it."""
        end = self.clock  # whatever a garbage collector frees from here on is later
        changes = [0] * (end + 1)
        for span in self.spans:
            if span.begin <= end:
                changes[span.begin] += span.size
            if -1 < span.end <= end:
                changes[span.end] -= span.size
        points, allocated, reserved = [], 0, 0
        steps = dict(self.reserved_at)
        for clock in range(1, end + 1):
            allocated += changes[clock]
            reserved = steps.get(clock, reserved)
            points.append((clock, allocated, reserved))
        return points

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """A `with` inside which no other thread asks for memory or frees it."""
        held = self._lock.acquire(timeout=LONGEST_REQUEST)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def give_back(self, taken: Span | _Watch) -> None:
        """Free a block that `take` returned, or one that no tensor will give back."""
        with self._lock:
            self._free(taken)

    def span_of(self, tensor: torch.Tensor) -> Span | _Watch | None:
        """The allocation behind a tensor; `None` for one that is not on this GPU, or that `torch.func` made."""
        try:
            return getattr(_storage_of(tensor), "ullage", None)
        except NotImplementedError:
            return None

    def adopt(self, storage: Any, span: Span) -> None:
        """Let a storage hold an allocation that nobody holds, from now on."""
        with self._lock:
            watch = _Watch(storage, self._storage_died)
            for name in Span.__slots__:
                setattr(watch, name, getattr(span, name))
            watch.value = watch.marks = None
            self.spans[span.index] = storage.ullage = watch

    def address_of(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's storage on the virtual card; 0 for one without elements."""
        return address_of(_storage_of(tensor))

    def written(self, tensor: torch.Tensor) -> None:
        """Something unknown was written to a tensor's memory."""
        watch = getattr(_storage_of(tensor), "ullage", None)
        if watch is not None:
            watch.value = watch.marks = None

    def mark(self, tensor: torch.Tensor, kind: int) -> None:
        """Say what a tensor's memory is for."""
        span = self.span_of(tensor)
        if span is not None:
            span.kind = kind

    def note_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Remember what a tensor was copied from."""
        if self.keeps_history:
            whole, copy = self.span_of(source), self.span_of(target)
            if whole is not None and copy is not None and whole is not copy:
                self.copied_from[copy.index] = whole.index

    def mark_copies(self, since: int) -> None:
        """Copies of parameters that have lived since a moment are copies of weights: a moving average, a teacher."""
        for index, source in list(self.copied_from.items()):
            copy = self.spans[index]
            if copy.block is None:
                del self.copied_from[index]
            elif copy.begin <= since and copy.kind == ACTIVATIONS and self.spans[source].kind in (PARAMETERS, COPIES):
                copy.kind = COPIES

    def can_repeat(self, requests: list[int], live: set[int] | None = None, end: int | None = None) -> bool:
        """Whether an iteration's requests can be repeated: all that they free must be there.

        `live` are the spans in use and `end` is the number of all spans, if not those of this moment are meant.
        """
        live = {span.index for span in self.spans if span.block is not None} if live is None else set(live)
        before, begin = set(live), len(self.spans) if end is None else end
        end = begin
        for _ in range(2):
            for number in requests:
                if number > 0:
                    live.add(end)
                    end += 1
                elif end + number in live:
                    live.remove(end + number)
                elif number:
                    return False
        shift = end - begin
        return all(index in live or index + shift in live for index in before)

    def repeat(self, requests: list[int], times: int, quiet: int, go_on: bool = False) -> int:
        """Repeat the requests of one iteration on the allocator alone; returns how often that was done.

        At most `times` times, until `quiet` repetitions in a row have not raised the reserved memory. Afterwards
        tensors no longer give anything back, or, with `go_on`, those that a repetition has replaced hold the blocks
        of the last one.
        """
        with self._lock:
            self.closed, self.repeating = not go_on, True
            blocks: list[Any] = [span.block for span in self.spans]
            allocated = self.allocator.peak_allocated
            try:
                done = self._repeat_until_quiet(requests, blocks, times, quiet)
            except OutOfMemory as error:
                self.out_of_memory = self._message(error)
                raise torch.OutOfMemoryError(self.out_of_memory) from None
            finally:
                self.repeating = False
                if self.lead is not None:  # what was let go counts as allocated here, until the GPU was done with it
                    self.allocator.peak_allocated = allocated
            if go_on:
                self._move_to_blocks_of_last_repetition(len(blocks) - len(self.spans), blocks)
        return done

    def _repeat_until_quiet(self, requests: list[int], blocks: list[Any], times: int, quiet: int) -> int:
        allocator = self.allocator
        unchanged = 0
        for done in range(times):
            before = highest = allocator.peak_reserved
            for index, number in enumerate(requests):
                if number > 0:
                    blocks.append(allocator.malloc(number, lane_of(number)))
                    if allocator.peak_reserved > highest:
                        highest = allocator.peak_reserved
                        self.peak_reserved_clock = self.clock - len(requests) + index + 1
                elif number:
                    allocator.free(blocks[number])
                    blocks[number] = None
                else:
                    allocator.empty_cache()
            unchanged = unchanged + 1 if highest == before else 0
            if unchanged == quiet:
                return done + 1
        return times

    def checkpoint_pool(self, pool: PoolId) -> PoolState:
        """The state of a private pool."""
        return checkpoint(self.allocator, pool)

    def restore_pool(self, state: PoolState) -> dict[int, Span | _Watch]:
        """Put a private pool back into a state that it had; returns by address what is in use in it now.

        A tensor whose block the state does not have keeps no memory. A block that no tensor holds gets a span alone.
        """
        with self._lock:
            restored = restore(self.allocator, state)
            in_use = {block.address: block for block in restored.in_use}
            freed = set(restored.freed)
            held: dict[int, Span | _Watch] = {}
            for span in self.spans:
                if span.block is None or span.block.address not in freed:
                    continue
                block = in_use.get(span.block.address)
                if block is None:
                    self._note_free(span)
                else:
                    span.block, held[block.address] = block, span
            for address, block in in_use.items():
                if address not in held:
                    self.clock += 1
                    self.requests.append(SideRequest(block.size, block.stream))
                    held[address] = span = Span(self.clock, len(self.spans), block, self.kind, self.origin())
                    self.spans.append(span)
            return held

    def origin_at(self, clock: int) -> int | None:
        """The number of the origin of the request at a moment; `None` if there was none."""
        index = bisect_left(self.spans, clock, key=lambda span: span.begin)
        found = index < len(self.spans) and self.spans[index].begin == clock
        return self.spans[index].origin if found else None

    def _move_to_blocks_of_last_repetition(self, shift: int, blocks: list[Any]) -> None:
        """A tensor whose block was given back in a repetition has the place of its counterpart in the last one."""
        for span in self.spans:
            if span.block is not None and blocks[span.index] is None:
                span.block = blocks[span.index + shift]
                assert span.block is not None
                span.size = span.block.size
        if self.allocator.reserved != self._reserved:
            self.note_reserved()

    def alive_from(self, begin: int, end: int) -> list[Span | _Watch]:
        """What was taken after one moment and not given back before another."""
        first = bisect_left(self.spans, begin + 1, key=lambda span: span.begin)
        last = bisect_left(self.spans, end + 1, key=lambda span: span.begin)
        return [span for span in self.spans[first:last] if span.end == -1 or span.end > end]

    def largest_by_kind(self) -> dict[str, int]:
        """The most rounded bytes of each kind, each at a moment of its own."""
        spans = list(self.spans)
        changes = [[0] * (self.clock + 1) for _ in KINDS]
        for span in spans:
            changes[span.kind][span.begin] += span.size
            if span.end != -1:
                changes[span.kind][span.end] -= span.size
        return {name: max(accumulate(of_kind), default=0) for name, of_kind in zip(KINDS, changes, strict=True)}

    def live_at_peak(self) -> dict[str, int]:
        """Rounded bytes by kind at the moment of the highest `allocated`."""
        totals = [0] * len(KINDS)
        moment = self.peak_clock
        for span in self.spans:
            if span.begin <= moment and (span.end == -1 or span.end > moment):
                totals[span.kind] += span.size
        return dict(zip(KINDS, totals, strict=True))

    def _storage_died(self, watch: _Watch) -> None:
        if not self.closed and watch.block is not None:
            with self._lock:
                self._free(watch)

    def _free(self, span: Span | _Watch) -> None:
        assert span.block is not None
        if span.index in self._used_elsewhere:
            self._free_later(span, self._used_elsewhere.pop(span.index))
        else:
            self.allocator.free(span.block)
            self._note_free(span)
            if self.lead is not None:
                self.lead.host += FREE

    def _free_later(self, span: Span | _Watch, streams: set[int]) -> None:
        assert span.block is not None
        self.allocator.free_later(span.block)
        self.clock = span.end = self.clock + 1
        # What waits for a GPU that is behind is in the figures, and not once more in what `upper` adds to them.
        behind = sum(entry.block.size for entry in self.waiting)
        done = 0.0 if self.lead is None else self.lead.free_later(stream_of(span.block.stream), streams)
        self.waiting.append(_Waiting(span.block, span.index, self.clock, streams, done))
        self._late = [entry for entry in self._late if entry.since >= self.clock - MOST_AHEAD]
        self._late.append(_Waiting(span.block, span.size, self.clock, set(streams)))
        self.most_late = max(self.most_late, sum(entry.number for entry in self._late) - behind)
        span.block = None

    def _note_free(self, span: Span | _Watch) -> None:
        span.block = None
        self.clock = span.end = self.clock + 1
        self.requests.append(span.index - len(self.spans))

    def _message(self, error: OutOfMemory) -> str:
        if isinstance(self.allocator.driver, SharedCard):
            return error.message(process=self.allocator.driver.report())
        in_use = format_size(self.context + self.allocator.reserved)
        return error.message(process=f"Including non-PyTorch memory, this process has {in_use} memory in use. ")


class _Forgetful(list[Any]):
    """A history that nobody will ask for: a job of a million steps must not keep each of its allocations."""

    def append(self, item: Any) -> None:
        return
