"""Expandable segments: pages mapped as needed, given back where they are free."""

from __future__ import annotations

import pytest

from ullage.allocator import AllocatorConfig, CachingAllocator, OutOfMemory

MIB = 2**20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def new(capacity: int = 1000) -> CachingAllocator:
    return CachingAllocator(capacity * MIB, EXPANDABLE)


def test_reserved_memory_grows_by_pages() -> None:
    gpu = new()
    first = gpu.malloc(15 * MIB)
    assert gpu.reserved == 20 * MIB
    second = gpu.malloc(15 * MIB)
    assert gpu.reserved == 40 * MIB
    assert second.address == first.address + 15 * MIB
    gpu.malloc(1)
    assert gpu.reserved == 42 * MIB
    assert gpu.memory_stats()["segment.all.current"] == 0


def test_rests_of_512_bytes_are_split_off_in_the_large_pool() -> None:
    gpu = new()
    assert gpu.malloc(20 * MIB - 512).size == 20 * MIB - 512
    assert gpu.memory_stats()["inactive_split.all.current"] == 0


def test_freed_memory_grows_into_a_larger_block() -> None:
    gpu = new()
    gpu.free(gpu.malloc(30 * MIB))
    assert gpu.reserved == 40 * MIB
    gpu.malloc(70 * MIB)
    assert gpu.reserved == 80 * MIB


def test_a_block_that_can_grow_is_spared() -> None:
    gpu = new()
    hole, wall = gpu.malloc(39 * MIB), gpu.malloc(11 * MIB)
    gpu.free(hole)
    # 10 MiB free at the end can grow and count as huge; the 39 MiB hole cannot and is taken.
    assert gpu.malloc(5 * MIB).address < wall.address


def test_each_stream_has_its_own_range() -> None:
    gpu = new()
    first, second = gpu.malloc(5 * MIB, stream=0), gpu.malloc(5 * MIB, stream=1)
    assert gpu.reserved == 40 * MIB
    assert first.segment_id != second.segment_id


def test_emptying_the_cache_unmaps_whole_pages_only() -> None:
    gpu = new()
    first, middle, last = gpu.malloc(50 * MIB), gpu.malloc(5 * MIB), gpu.malloc(45 * MIB)
    gpu.free(first)
    gpu.free(last)
    gpu.empty_cache()
    # 0 to 40 and 60 to 100 MiB are wholly free; the page from 40 to 60 is partly in use.
    assert gpu.reserved == 20 * MIB
    (segment,) = gpu.snapshot()
    assert [block["size"] // MIB for block in segment["blocks"]] == [10, 5, 5]
    assert segment["is_expandable"]
    gpu.free(middle)
    gpu.empty_cache()
    assert gpu.reserved == 0
    assert gpu.snapshot() == []


def test_unmapped_gaps_are_filled_from_the_lowest_address() -> None:
    gpu = new()
    first, _wall = gpu.malloc(40 * MIB), gpu.malloc(20 * MIB)
    start = first.address
    gpu.free(first)
    gpu.empty_cache()
    assert gpu.reserved == 20 * MIB
    assert gpu.malloc(15 * MIB).address == start
    assert gpu.reserved == 40 * MIB


def test_on_failure_free_pages_are_unmapped_for_another_stream() -> None:
    gpu = new(100)
    gpu.free(gpu.malloc(80 * MIB))
    gpu.malloc(60 * MIB, stream=1)
    assert gpu.reserved == 60 * MIB
    assert gpu.num_alloc_retries == 1


def test_fragments_that_cannot_serve_with_segments_can_here() -> None:
    plain, growing = CachingAllocator(100 * MIB), new(100)
    for gpu in (plain, growing):
        blocks = [gpu.malloc(20 * MIB) for _ in range(5)]
        for block in blocks[1::2]:
            gpu.free(block)
    with pytest.raises(OutOfMemory):
        plain.malloc(41 * MIB)
    assert growing.malloc(40 * MIB).size == 40 * MIB


def test_out_of_memory() -> None:
    gpu = new(100)
    gpu.malloc(70 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(31 * MIB)
    assert caught.value.segment_size == 32 * MIB
    assert gpu.allocated == 70 * MIB


def test_the_page_size_follows_large_segment_size() -> None:
    config = AllocatorConfig.parse("expandable_segments:True,large_segment_size_mb:40")
    gpu = CachingAllocator(1000 * MIB, config)
    gpu.malloc(2 * MIB)
    assert gpu.reserved == 40 * MIB
