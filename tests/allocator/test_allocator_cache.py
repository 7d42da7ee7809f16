"""Rounding, pools, best fit, splitting, merging, streams, addresses."""

from __future__ import annotations

import pytest

from ullage.allocator import AllocatorConfig, CachingAllocator
from ullage.allocator.blocks import AddressSpace, block_size, segment_size

MIB = 2**20
CARD = 1024 * MIB
NONE = (0,) * 16


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_blocks_are_multiples_of_512(size: int, block: int) -> None:
    assert block_size(size, NONE) == block
    assert CachingAllocator(CARD).malloc(size).size == block


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (1200, 1536),  # too small for divisions: a multiple of 512
        (2049, 2560),
        (2048 + 1024, 3072),
        (9 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (16 * MIB, 16 * MIB),
        (1000 * MIB, 1024 * MIB),
    ],
)
def test_four_divisions_between_powers_of_two(size: int, block: int) -> None:
    assert block_size(size, (4,) * 16) == block


def test_divisions_act_on_requests() -> None:
    gpu = CachingAllocator(CARD, AllocatorConfig.parse("roundup_power2_divisions:[16:1,>:2]"))
    assert gpu.malloc(18 * MIB).size == 18 * MIB
    assert gpu.malloc(34 * MIB).size == 48 * MIB


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_segments(block: int, segment: int) -> None:
    assert segment_size(block, 20 * MIB) == segment
    gpu = CachingAllocator(CARD)
    gpu.malloc(block)
    assert gpu.reserved == segment


def test_large_segment_size_is_an_option() -> None:
    gpu = CachingAllocator(CARD, AllocatorConfig.parse("large_segment_size_mb:40"))
    gpu.malloc(2 * MIB)
    assert gpu.reserved == 40 * MIB


def test_the_pools_do_not_share() -> None:
    gpu = CachingAllocator(CARD)
    gpu.malloc(2 * MIB)
    gpu.malloc(512)
    assert {segment["segment_type"] for segment in gpu.snapshot()} == {"small", "large"}
    assert gpu.reserved == 22 * MIB


def test_small_rests_stay_in_the_block() -> None:
    gpu = CachingAllocator(CARD)
    large = gpu.malloc(20 * MIB)
    gpu.free(large)
    assert gpu.malloc(19 * MIB).size == 20 * MIB  # 1 MiB is not more than 1 MiB
    gpu = CachingAllocator(CARD)
    gpu.free(gpu.malloc(20 * MIB))
    assert gpu.malloc(19 * MIB - 512).size == 19 * MIB - 512


def test_neighbours_merge_in_any_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        gpu = CachingAllocator(CARD)
        blocks = [gpu.malloc(5 * MIB) for _ in range(3)]
        assert len({block.segment_id for block in blocks}) == 1
        for index in order:
            gpu.free(blocks[index])
        (segment,) = gpu.snapshot()
        assert [block["size"] for block in segment["blocks"]] == [20 * MIB]


def test_streams_are_kept_apart() -> None:
    gpu = CachingAllocator(CARD)
    gpu.free(gpu.malloc(30 * MIB, stream=1))
    assert gpu.malloc(30 * MIB, stream=2).stream == 2
    assert gpu.reserved == 60 * MIB
    gpu.malloc(30 * MIB, stream=1)
    assert gpu.reserved == 60 * MIB


def test_nothing_is_no_allocation() -> None:
    gpu = CachingAllocator(CARD)
    block = gpu.malloc(0)
    assert (block.address, block.size) == (0, 0)
    gpu.free(block)
    gpu.free(block)
    assert gpu.count == gpu.reserved == 0
    with pytest.raises(ValueError, match="got -1"):
        gpu.malloc(-1)


def test_a_second_free_is_refused() -> None:
    gpu = CachingAllocator(CARD)
    block = gpu.malloc(512)
    gpu.free(block)
    with pytest.raises(ValueError, match="block must be in use, got"):
        gpu.free(block)


def test_events_are_reported_in_order() -> None:
    events: list[tuple[int, int, int]] = []
    gpu = CachingAllocator(CARD, segment_address=lambda size: 4096)
    gpu.on_event = lambda *event: events.append(event)
    gpu.free(gpu.malloc(100))
    gpu.empty_cache()
    segment = (4096, 2 * MIB)
    assert events == [(3, *segment), (0, 4096, 100), (1, 4096, 100), (2, 4096, 100), (4, *segment)]


def test_capacity_may_not_exceed_the_card() -> None:
    with pytest.raises(ValueError, match="capacity must be 0 to 10"):
        CachingAllocator(11, total_memory=10)


def test_addresses_descend_in_32_mib_pieces_and_fill_the_newest() -> None:
    space = AddressSpace(top=1024 * MIB)
    placed = [space.place(size * MIB) // MIB for size in (20, 14, 12, 12, 2, 40)]
    assert placed == [992, 960, 974, 1012, 986, 896]


def test_released_addresses_are_used_again() -> None:
    space = AddressSpace(top=128 * MIB)
    first, second = space.place(20 * MIB), space.place(40 * MIB)
    third = space.place(2 * MIB)
    space.release(second, 40 * MIB)
    space.release(third, 2 * MIB)
    assert space.place(64 * MIB) == second
    space.release(first, 20 * MIB)
    with pytest.raises(ValueError, match="more addresses"):
        space.place(128 * MIB)
