"""Memory of the virtual GPU: storages of tensors are blocks of the allocator, with a history of all allocations.

A block lives as long as its storage. PyTorch keeps the Python object of a storage alive as long as the storage, so a
weak reference to it reports when the memory is freed, in any thread.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ullage.allocator import Block, CachingAllocator, OutOfMemory, PoolId, PoolState, RequestLog, format_size, restore
from ullage.allocator.private_pools import NO_POOL, stream_of
from ullage.virtual.call.native import current_stream, set_length, storage_of, tensor_without_data
from ullage.virtual.memory.allocations import (
    ACTIVATIONS,
    COPIES,
    PARAMETERS,
    WORKSPACE,
    Allocation,
    AnyAllocation,
    TensorAllocation,
)
from ullage.virtual.memory.launch_clock import FREE, SEGMENT
from ullage.virtual.memory.waiting_blocks import WaitingBlocks

LONGEST_REQUEST = 5.0  # seconds to wait for a thread in the middle of a request


class CurrentStream:
    """The number of the current stream. In CUDA it belongs to a thread; while only one thread sets streams, all share
    one, which native code also sets in a backward pass."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._others: threading.local | None = None

    @property
    def number(self) -> int:
        """The number of this thread's current stream; 0 is the default stream."""
        if self._others is None or threading.get_ident() == self._home:
            return current_stream.value
        return getattr(self._others, "number", 0)

    @number.setter
    def number(self, number: int) -> None:
        if threading.get_ident() == self._home:
            current_stream.value = number
            return
        if self._others is None:
            self._others = threading.local()
        self._others.number = number


def address_of(storage: Any) -> int:
    """Return the address of a storage: that of its block, or the one that it was given."""
    watch = getattr(storage, "ullage", None)
    if watch is not None and watch.block is not None:
        return int(watch.block.address)
    return int(getattr(storage, "ullage_address", 0))


class DeviceMemory:
    """Tensors and workspaces over one caching allocator."""

    def __init__(
        self, allocator: CachingAllocator, context: int = 0, total: int = 0, keeps_history: bool = True
    ) -> None:
        self.allocator = allocator
        self.keeps_history = keeps_history
        self.context, self.total = context, total
        self.kind = ACTIVATIONS
        self.requests = RequestLog(keeps_history)
        self.spans: list[AnyAllocation] = [] if keeps_history else _DiscardingList()
        self.tried = 0, 0  # the highest `allocated` and `reserved`, including `try_out`
        self.copied_from: dict[int, int] = {}  # the index of a copy's span to that of its source
        self.clock = 0
        self.peak_clock = 0
        self.closed = False
        self.repeating = False  # inside `repeat`, where the allocator's events belong to no request of the run
        self.origin: Callable[[], int] = lambda: 0  # returns the number of the current origin
        self.before_request: Callable[[], None] | None = None
        self.peak_reserved_clock = 0
        self._reserved = 0
        self._peak_reserved = 0
        self.out_of_memory: str | None = None  # the last such error; code may have caught it
        self.reserved_at: list[tuple[int, int]] = [] if keeps_history else _DiscardingList()
        self.held_back = 0  # bytes that NCCL's watchdog keeps for a time after their last use
        self._lock = threading.RLock()
        self._peak = -1
        self.waiting = WaitingBlocks(self._lock, lambda: self.allocator, self.requests)
        self.current_stream = CurrentStream()

    @property
    def stream(self) -> int:
        return self.current_stream.number

    def tensor(self, size: Any, stride: Any, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """Make a tensor; raise `torch.OutOfMemoryError` if the GPU is full."""
        tensor = tensor_without_data(size, stride, dtype)
        if nbytes:
            self._attach(storage_of(tensor), nbytes, self.kind)
        return tensor

    def _attach(self, storage: Any, nbytes: int, kind: int) -> None:
        with self._lock:
            block = self._block(nbytes)
            watch = TensorAllocation(storage, self._storage_died)
            watch.block, watch.size, watch.kind = block, block.size, kind
            watch.begin, watch.end, watch.origin = self.clock, -1, self.origin()
            watch.value = watch.marks = None
            spans = self.spans
            watch.index = len(spans)
            spans.append(watch)
            storage.ullage = watch  # this keeps the weak reference alive, too

    def resize(self, storage: Any, nbytes: int) -> None:
        """`UntypedStorage.resize_`: allocate the new memory, then free the old (resize_bytes_cuda)."""
        with self._lock:
            before = getattr(storage, "ullage", None)
            if nbytes:
                self._attach(storage, nbytes, self.kind if before is None else before.kind)
            if before is not None and before.block is not None:
                self._free(before)
            set_length(storage, nbytes)

    def record_stream(self, span: AnyAllocation | None, stream: int) -> None:
        """`Tensor.record_stream`: the memory is not free before this stream is done with it."""
        if span is not None and span.block is not None and stream != stream_of(span.block.stream):
            self.waiting.record(span.index, stream)

    def read_back(self) -> None:
        """Let the host wait for the current stream."""
        clock = self.waiting.launch_clock
        if clock is not None:
            clock.wait(clock.done(self.stream))
        if self.waiting:
            self.waiting.synchronized(self.stream)

    def moment(self, stream: int) -> tuple[int, float]:
        """Return the current time in allocator calls, and when a stream will have finished its launched work."""
        clock = self.waiting.launch_clock
        return self.clock, 0.0 if clock is None else clock.done(stream)

    def take(self, nbytes: int, kind: int | None = None) -> Allocation:
        """Allocate a block without a tensor, for a temporary or a workspace; `give_back` frees it."""
        with self._lock:
            block = self._block(nbytes)
            span = Allocation(self.clock, len(self.spans), block, self.kind if kind is None else kind, self.origin())
            self.spans.append(span)
            return span

    def _block(self, nbytes: int) -> Block:
        if self.before_request is not None:
            self.before_request()
        if self.waiting:
            self.waiting.release()
        allocator = self.allocator
        try:
            block = allocator.malloc(nbytes, self.stream)
        except OutOfMemory as error:
            if self.waiting and not allocator.private.underway:  # the host waits for the GPU before it gives up
                self.waiting.synchronized()
                return self._block(nbytes)
            self.out_of_memory = self._message(error)
            raise torch.OutOfMemoryError(self.out_of_memory) from None
        self.clock = clock = self.clock + 1
        self.requests.ask(nbytes, block.stream)
        if allocator.allocated > self._peak:
            self._peak = allocator.allocated
            self.peak_clock = clock
        if allocator.reserved != self._reserved:
            self.note_reserved()
            if self.waiting.launch_clock is not None:
                self.waiting.launch_clock.host += SEGMENT
        return block

    def empty_cache(self, pool: PoolId = NO_POOL) -> None:
        """Return cached memory to the card, all or that of one private pool."""
        with self._lock:
            self.waiting.synchronized()
            self.allocator.empty_cache(pool)
            if self.requests and pool == NO_POOL:
                self.requests.empty_cache()
            self.note_reserved()

    def try_out(self, sizes: Sequence[int], room: int, larger: int = 0) -> int:
        """Allocate the largest of these sizes that fits, empty the cache, and return the size.

        This is how `cudnn.benchmark` tries plans (aten/src/ATen/native/cudnn/Conv_v8.cpp, generate_and_filter_plans):
        it skips workspaces larger than the card's free memory and the largest cached block, and halves a size that the
        allocator refuses. `larger` is another possible value of the largest size. A job does not need this memory:
        peaks with it go to `tried`.
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
                self.requests.note_trial()
                if larger > size:
                    self.requests.note_possible_size(larger, len(self.requests) - 1)
                self.give_back(span)
                break
            self.empty_cache()
            now = allocator.peak_allocated, allocator.peak_reserved
            self.tried = max(self.tried[0], now[0]), max(self.tried[1], now[1])
            allocator.peak_allocated, allocator.peak_reserved = peaks
            return size

    def note_reserved(self) -> None:
        self._reserved = self.allocator.reserved
        self.reserved_at.append((self.clock, self._reserved))
        if self._reserved > self._peak_reserved:
            self._peak_reserved = self._reserved
            self.peak_reserved_clock = self.clock

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Return a context in which no other thread allocates or frees memory."""
        held = self._lock.acquire(timeout=LONGEST_REQUEST)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def take_in_turn(self, *sizes: int, kind: int | None = None) -> None:
        """Allocate each size and free it before the next."""
        for nbytes in sizes:
            self.give_back(self.take(nbytes, kind))

    @contextlib.contextmanager
    def holding(self, *sizes: int) -> Iterator[None]:
        """Return a context in which blocks of these sizes are allocated; the last one is freed first."""
        taken = [self.take(size) for size in sizes]
        yield
        for span in reversed(taken):
            self.give_back(span)

    def give_back(self, taken: AnyAllocation) -> None:
        """Free a block that `take` returned, or one that no tensor will free."""
        with self._lock:
            self._free(taken)

    def span_of(self, tensor: torch.Tensor) -> AnyAllocation | None:
        """Return the allocation of a tensor; `None` if it is not on this GPU, or was made by `torch.func`."""
        try:
            return getattr(storage_of(tensor), "ullage", None)
        except NotImplementedError:
            return None

    def adopt(self, storage: Any, span: Allocation) -> None:
        """Let a storage own an allocation that has no owner."""
        with self._lock:
            watch = TensorAllocation(storage, self._storage_died)
            for name in Allocation.__slots__:
                setattr(watch, name, getattr(span, name))
            watch.value = watch.marks = None
            self.spans[span.index] = storage.ullage = watch

    def address_of(self, tensor: torch.Tensor) -> int:
        return address_of(storage_of(tensor))

    def written(self, tensor: torch.Tensor) -> None:
        """Forget the values of a tensor after an unknown write."""
        watch = getattr(storage_of(tensor), "ullage", None)
        if watch is not None:
            watch.value = watch.marks = None

    def mark(self, tensor: torch.Tensor, kind: int) -> None:
        span = self.span_of(tensor)
        if span is not None:
            span.kind = kind

    def note_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.keeps_history:
            whole, copy = self.span_of(source), self.span_of(target)
            if whole is not None and copy is not None and whole is not copy:
                self.copied_from[copy.index] = whole.index

    def mark_copies(self, since: int) -> None:
        """Mark copies of parameters that have lived since a moment as copies of weights, such as moving averages."""
        for index, source in list(self.copied_from.items()):
            copy = self.spans[index]
            if copy.block is None:
                del self.copied_from[index]
            elif copy.begin <= since and copy.kind == ACTIVATIONS and self.spans[source].kind in (PARAMETERS, COPIES):
                copy.kind = COPIES

    def repeat(self, requests: RequestLog, times: int, quiet: int, go_on: bool = False) -> int:
        """Repeat the requests of one iteration on the allocator alone, up to `times`, or until `quiet` in a row did not
        raise the reserved memory; return how often. Afterwards tensors free nothing, or, with `go_on`, replaced
        tensors own the blocks of the last repetition."""
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
                # Released memory counts as allocated here until the GPU is done with it.
                if self.waiting.launch_clock is not None:
                    self.allocator.peak_allocated = allocated
            if go_on:  # tensors whose blocks a repetition freed get those of their counterparts in the last repetition
                shift = len(blocks) - len(self.spans)
                for span in self.spans:
                    if span.block is not None and blocks[span.index] is None:
                        span.block = block = blocks[span.index + shift]
                        span.size = block.size
                if self.allocator.reserved != self._reserved:
                    self.note_reserved()
        return done

    def _repeat_until_quiet(self, requests: RequestLog, blocks: list[Block | None], times: int, quiet: int) -> int:
        unchanged, first = 0, self.clock - len(requests) + 1

        def note_peak(place: int) -> None:
            self.peak_reserved_clock = first + place

        for done in range(times):
            before = self.allocator.peak_reserved
            requests.play(self.allocator, blocks, note_peak)
            unchanged = unchanged + 1 if self.allocator.peak_reserved == before else 0
            if unchanged == quiet:
                return done + 1
        return times

    def restore_pool(self, state: PoolState) -> dict[int, AnyAllocation]:
        """Restore a state of a private pool; return the allocations in use by address. A tensor whose block is not in
        the state loses its memory, and a block without a tensor gets an allocation of its own."""
        with self._lock:
            restored = restore(self.allocator, state)
            in_use = {block.address: block for block in restored.in_use}
            freed = set(restored.freed)
            held: dict[int, AnyAllocation] = {}
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
                    self.requests.ask(block.size, block.stream)
                    held[address] = span = Allocation(self.clock, len(self.spans), block, self.kind, self.origin())
                    self.spans.append(span)
            return held

    def _storage_died(self, watch: TensorAllocation) -> None:
        if not self.closed and watch.block is not None:
            with self._lock:
                self._free(watch)

    def _free(self, span: AnyAllocation) -> None:
        assert span.block is not None
        streams = self.waiting.recorded(span.index)
        if streams:
            block, span.block = span.block, None
            self.clock = span.end = self.clock + 1
            self.waiting.add(block, span.index, self.clock, streams)
        else:
            self.allocator.free(span.block)
            self._note_free(span)
            if self.waiting.launch_clock is not None:
                self.waiting.launch_clock.host += FREE

    def _note_free(self, span: AnyAllocation) -> None:
        span.block = None
        self.clock = span.end = self.clock + 1
        self.requests.free(span.index)

    def _message(self, error: OutOfMemory) -> str:
        if self.allocator.driver is not None:
            return error.message(process=self.allocator.driver.report())
        in_use = format_size(self.context + self.allocator.reserved)
        return error.message(process=f"Including non-PyTorch memory, this process has {in_use} memory in use. ")


class _DiscardingList(list[Any]):
    """A list that stores nothing: a job of a million steps must not store all its allocations."""

    def append(self, item: Any) -> None:
        return
