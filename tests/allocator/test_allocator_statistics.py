"""memory_stats() and snapshot() against a plain count of what happened."""

from __future__ import annotations

from ullage.allocator import CachingAllocator

MIB = 2**20
METRICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


def test_the_keys_are_those_of_torch() -> None:
    expected = {
        f"{metric}.{pool}.{kind}"
        for metric in METRICS
        for pool in ("all", "small_pool", "large_pool")
        for kind in ("current", "peak", "allocated", "freed")
    }
    expected |= {
        f"oversize_{what}.{kind}"
        for what in ("allocations", "segments")
        for kind in ("current", "peak", "allocated", "freed")
    }
    expected |= {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "max_split_size"}
    expected |= {"num_device_alloc", "num_device_free", "num_oom_rejections"}
    stats = CachingAllocator(MIB).memory_stats()
    assert set(stats) == expected
    assert list(stats) == sorted(stats)
    assert stats.pop("max_split_size") == -1
    assert not any(stats.values())


def test_a_small_story_counted_by_hand() -> None:
    gpu = CachingAllocator(1024 * MIB)
    first, second = gpu.malloc(100), gpu.malloc(3 * MIB)
    gpu.free(first)
    stats = gpu.memory_stats()

    def of(name: str) -> tuple[int, ...]:
        return tuple(stats[f"{name}.{kind}"] for kind in ("current", "peak", "allocated", "freed"))

    assert of("allocation.all") == (1, 2, 2, 1)
    assert of("allocation.small_pool") == (0, 1, 1, 1)
    assert of("allocated_bytes.all") == (3 * MIB, 3 * MIB + 512, 3 * MIB + 512, 512)
    assert of("requested_bytes.all") == (3 * MIB, 3 * MIB + 100, 3 * MIB + 100, 100)
    assert of("segment.all") == (2, 2, 2, 0)
    assert of("reserved_bytes.large_pool") == (20 * MIB, 20 * MIB, 20 * MIB, 0)
    # The small segment is whole again: only the rest of the large one is an inactive split.
    assert of("inactive_split.all") == (1, 2, 2, 1)
    rest = 2 * MIB - 512
    assert of("inactive_split_bytes.all") == (17 * MIB, 17 * MIB + rest, 17 * MIB + rest, rest)
    gpu.free(second)


def test_resets() -> None:
    gpu = CachingAllocator(1024 * MIB)
    block = gpu.malloc(30 * MIB)
    gpu.malloc(10 * MIB)
    gpu.free(block)
    gpu.reset_peak_stats()
    gpu.reset_accumulated_stats()
    stats = gpu.memory_stats()
    assert gpu.peak_allocated == stats["allocated_bytes.all.peak"] == 10 * MIB
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 0
    assert stats["num_device_alloc"] == 0
    gpu.malloc(5 * MIB)
    stats = gpu.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == 5 * MIB
    assert stats["allocated_bytes.large_pool.peak"] == 15 * MIB


def test_a_snapshot_lists_blocks_by_address() -> None:
    addresses = iter((64 * MIB, 32 * MIB))
    gpu = CachingAllocator(1024 * MIB, segment_address=lambda size: next(addresses))
    first = gpu.malloc(3 * MIB)
    gpu.malloc(700)
    gpu.free(first)
    small, large = gpu.snapshot()
    assert (small["segment_type"], large["segment_type"]) == ("small", "large")
    assert small["requested_size"] == 700
    assert small["active_size"] == small["allocated_size"] == 1024
    assert small["blocks"][0] == {
        "address": small["address"],
        "size": 1024,
        "requested_size": 700,
        "state": "active_allocated",
    }
    assert large["allocated_size"] == 0
    assert [block["state"] for block in large["blocks"]] == ["inactive"]
