"""Where segments come from when the allocator does not have the card to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .caching import CachingAllocator


class Driver(Protocol):
    """What a card that others use too is asked for; cudaMalloc, cudaFree and cudaMemGetInfo."""

    def take(self, size: int) -> bool:
        """Take bytes; false if there are fewer."""

    def give(self, size: int) -> None:
        """Give bytes back."""

    def free(self) -> int:
        """Bytes that could be taken now."""


def can_take(allocator: CachingAllocator, size: int) -> bool:
    """Whether a segment, or more pages of one, can be had; if so it is taken from the driver.

    >>> from ullage.allocator import CachingAllocator
    >>> can_take(CachingAllocator(2**30), 2**30), can_take(CachingAllocator(2**30), 2**31)
    (True, False)
    """
    if allocator.reserved + size > allocator.capacity:
        return False
    return allocator.driver is None or allocator.driver.take(size)


def give_back(allocator: CachingAllocator, size: int) -> None:
    """A segment, or pages of one, are no longer needed.

    >>> from ullage.allocator import CachingAllocator
    >>> give_back(CachingAllocator(2**30), 2**21)
    """
    if allocator.driver is not None:
        allocator.driver.give(size)


def free_on_card(allocator: CachingAllocator) -> int:
    """What the driver still has.

    >>> from ullage.allocator import CachingAllocator
    >>> free_on_card(CachingAllocator(2**30))
    1073741824
    """
    own = max(0, allocator.capacity - allocator.reserved)
    return own if allocator.driver is None else min(own, allocator.driver.free())
