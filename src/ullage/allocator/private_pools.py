"""Private pools: memory that only a CUDA graph, or the code inside `torch.cuda.use_mem_pool`, may use.

A private pool has free blocks of its own for each stream. So a stream of a private pool has a *lane*: the pool's number
above the stream's. The lane of a stream outside private pools is the stream's number.
"""

from collections.abc import Callable
from typing import Final

PoolId = tuple[int, int]  # PyTorch's MempoolId_t
NO_POOL: Final[PoolId] = (0, 0)
STREAM_BITS: Final = 32


def stream_of(lane: int) -> int:
    return lane & ((1 << STREAM_BITS) - 1)


class PrivatePools:
    """The private pools of one device: who uses them, and which requests go to them now."""

    def __init__(self) -> None:
        self.underway: Final[list[tuple[PoolId, Callable[[int], bool]]]] = []  # PyTorch's captures_underway
        self._numbers: dict[PoolId, int] = {}
        self._users: dict[PoolId, int] = {}

    def use(self, pool: PoolId) -> None:
        """Count one more user of a pool (PyTorch's create_or_incref_pool)."""
        self._numbers.setdefault(pool, len(self._numbers) + 1)
        self._users[pool] = self._users.get(pool, 0) + 1

    def users(self, pool: PoolId) -> int:
        return self._users.get(pool, 0)

    def begin(self, pool: PoolId, wants: Callable[[int], bool]) -> None:
        """Send the requests of the streams that `wants` accepts to a pool (PyTorch's beginAllocateToPool)."""
        if any(busy == pool for busy, _ in self.underway):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.use(pool)
        self.underway.append((pool, wants))

    def end(self, pool: PoolId) -> None:
        """Send no more requests to a pool, which keeps its memory."""
        for index, (busy, _) in enumerate(self.underway):
            if busy == pool:
                del self.underway[index]
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release(self, pool: PoolId) -> None:
        """Count one user fewer. `empty_cache` releases the cached memory of a pool without users."""
        if not self._users.get(pool):
            raise RuntimeError(f"nothing uses the memory pool {pool}")
        self._users[pool] -= 1

    def lane(self, stream: int) -> int:
        """Return the lane that serves requests on a stream; a lane is returned unchanged."""
        if stream >> STREAM_BITS:
            return stream
        for pool, wants in self.underway:
            if wants(stream):
                return self._numbers[pool] << STREAM_BITS | stream
        return stream

    def pool_of(self, lane: int) -> PoolId:
        number = lane >> STREAM_BITS
        return next((pool for pool, other in self._numbers.items() if other == number), NO_POOL)

    def may_be_emptied(self, lane: int, only: PoolId = NO_POOL) -> bool:
        """Return whether cached memory of a lane may go back to the driver; with `only`, only that of this pool."""
        pool = self.pool_of(lane)
        if pool == NO_POOL:
            return only == NO_POOL and not self.underway
        return only in (NO_POOL, pool) and not self._users[pool]
