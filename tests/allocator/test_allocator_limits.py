"""When memory runs out: retries, fractions, unsplittable blocks, garbage collection, the error."""

from __future__ import annotations

import pytest

from ullage.allocator import AllocatorConfig, CachingAllocator, OutOfMemory

MIB = 2**20


def sizes_of_segments(gpu: CachingAllocator) -> list[int]:
    return sorted(segment["total_size"] // MIB for segment in gpu.snapshot())


def test_a_failure_gives_cached_segments_back_and_tries_again() -> None:
    gpu = CachingAllocator(100 * MIB)
    gpu.free(gpu.malloc(60 * MIB))
    gpu.malloc(80 * MIB)
    assert gpu.reserved == 80 * MIB
    stats = gpu.memory_stats()
    assert stats["num_alloc_retries"] == 1
    assert stats["num_ooms"] == 0
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)


def test_a_segment_partly_in_use_is_not_given_back() -> None:
    gpu = CachingAllocator(100 * MIB)
    first, _second = gpu.malloc(50 * MIB), gpu.malloc(50 * MIB)
    gpu.free(first)
    kept = gpu.malloc(20 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(40 * MIB)
    error = caught.value
    assert (error.requested, error.segment_size) == (40 * MIB, 40 * MIB)
    assert (error.reserved, error.allocated, error.device_free) == (100 * MIB, 70 * MIB, 0)
    assert gpu.memory_stats()["num_ooms"] == 1
    gpu.free(kept)
    assert gpu.malloc(50 * MIB).size == 50 * MIB


def test_the_message_is_pytorchs() -> None:
    gpu = CachingAllocator(50 * MIB, total_memory=100 * MIB)
    gpu.malloc(30 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(21 * MIB)
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 100.00 MiB of which "
        "20.00 MiB is free. Of the allocated memory 30.00 MiB is allocated by PyTorch, and 0 bytes is "
        "reserved by PyTorch but unallocated."
    )


def test_a_fraction_limits_what_is_reserved() -> None:
    gpu = CachingAllocator(90 * MIB, AllocatorConfig.parse("per_process_memory_fraction:0.5"), total_memory=100 * MIB)
    gpu.malloc(50 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        gpu.malloc(1)
    assert caught.value.allowed == 50 * MIB
    assert "50.00 MiB allowed; " in str(caught.value)
    gpu.set_memory_fraction(1.0)
    assert gpu.malloc(1).size == 512
    with pytest.raises(ValueError, match="from 0 to 1, got 1.1"):
        gpu.set_memory_fraction(1.1)


def test_blocks_above_max_split_size_stay_whole() -> None:
    gpu = CachingAllocator(1000 * MIB, AllocatorConfig.parse("max_split_size_mb:64"))
    gpu.free(gpu.malloc(100 * MIB))
    assert gpu.malloc(30 * MIB).size == 30 * MIB
    assert sizes_of_segments(gpu) == [30, 100]
    assert gpu.malloc(81 * MIB).size == 100 * MIB
    stats = gpu.memory_stats()
    assert stats["oversize_allocations.current"] == 1
    assert stats["oversize_allocations.allocated"] == 2
    assert stats["oversize_segments.peak"] == 1
    assert stats["max_split_size"] == 64 * MIB


def test_the_rounding_of_whole_blocks_is_limited() -> None:
    text = "max_split_size_mb:64,max_non_split_rounding_mb:30"
    for config, reused in (("max_split_size_mb:64", False), (text, True)):
        gpu = CachingAllocator(1000 * MIB, AllocatorConfig.parse(config))
        gpu.free(gpu.malloc(100 * MIB))
        gpu.malloc(75 * MIB)
        assert (gpu.segments == 1) is reused


def test_max_split_size_gives_back_only_as_much_as_needed() -> None:
    gpu = CachingAllocator(400 * MIB, AllocatorConfig.parse("max_split_size_mb:64"))
    blocks = [gpu.malloc(size * MIB) for size in (70, 100, 200)]
    for block in blocks:
        gpu.free(block)
    # 64 MiB or more would serve a 60 MiB request: the smallest such block goes.
    gpu.malloc(60 * MIB)
    assert sizes_of_segments(gpu) == [60, 100, 200]
    assert gpu.memory_stats()["num_alloc_retries"] == 0
    # No single block holds 250 MiB: the largest go until the sum is enough.
    gpu.malloc(250 * MIB)
    assert sizes_of_segments(gpu) == [60, 250]


def test_garbage_collection_takes_the_oldest_first() -> None:
    config = AllocatorConfig.parse("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8")
    gpu = CachingAllocator(1000 * MIB, config)  # collects above 400 MiB
    old, young = gpu.malloc(100 * MIB), gpu.malloc(320 * MIB)
    gpu.free(old)
    for _ in range(5):
        gpu.free(gpu.malloc(15 * MIB, stream=1))
    gpu.free(young)
    gpu.malloc(330 * MIB)
    assert sizes_of_segments(gpu) == [16, 320, 330]
    assert gpu.memory_stats()["num_alloc_retries"] == 0


def test_garbage_collection_needs_a_fraction() -> None:
    gpu = CachingAllocator(1000 * MIB, AllocatorConfig.parse("garbage_collection_threshold:0.1"))
    gpu.free(gpu.malloc(500 * MIB))
    gpu.malloc(501 * MIB - 2 * MIB, stream=1)
    assert gpu.memory_stats()["num_device_free"] == 0
