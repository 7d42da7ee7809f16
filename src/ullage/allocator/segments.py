"""Segments: the memory that the allocator holds, and the driver that it comes from."""

from collections.abc import Callable
from typing import Final, Protocol

from ullage.allocator.blocks import AddressSpace, Block, Pool
from ullage.allocator.config import AllocatorConfig
from ullage.allocator.statistics import Counters


class Driver(Protocol):
    """The driver of a GPU that other processes use too: cudaMalloc, cudaFree and cudaMemGetInfo."""

    def take(self, size: int) -> bool:
        """Take bytes; return false if there are fewer."""

    def give(self, size: int) -> None:
        """Give bytes back."""

    def free(self) -> int:
        """Return the bytes that could be taken now."""

    def report(self) -> str:
        """Describe the processes on the GPU, in the words of PyTorch's message."""


class Segments(Counters):
    """The segments of one device: their limit in bytes, their addresses, and their statistics."""

    def __init__(
        self,
        small: Pool,
        large: Pool,
        capacity: int,
        total_memory: int,
        config: AllocatorConfig,
        segment_address: Callable[[int], int] | None,
        driver: Driver | None,
    ) -> None:
        super().__init__(small, large)
        self.capacity = capacity  # shrinks when something else on the card takes memory
        self.total_memory: Final = total_memory
        self.config: Final = config
        self.on_event: Callable[[int, int, int], None] | None = None
        self.heads: dict[int, Block] = {}  # by segment id, the block at the lowest address
        self.next_segment_id = 1
        self.addresses = AddressSpace()
        self.segment_address = segment_address
        self.driver = driver

    def can_take(self, size: int) -> bool:
        """Take memory for a segment, or for more pages of one, from the driver; return false if there is not enough."""
        if self.reserved + size > self.capacity:
            return False
        return self.driver is None or self.driver.take(size)

    def give_back(self, size: int) -> None:
        if self.driver is not None:
            self.driver.give(size)

    def free_on_card(self) -> int:
        own = max(0, self.capacity - self.reserved)
        return own if self.driver is None else min(own, self.driver.free())

    def new_segment(self, size: int, stream: int, pool: Pool, state: int) -> Block:
        place = self.segment_address
        address = self.addresses.place(size) if place is None else place(size)
        head = Block(address, size, stream, self.next_segment_id, pool, state)
        self.heads[head.segment_id] = head
        self.next_segment_id += 1
        return head

    def drop_segment(self, head: Block) -> None:
        """Forget a segment and let its addresses be used again."""
        del self.heads[head.segment_id]
        if self.segment_address is None:
            self.addresses.release(head.address, head.size)
