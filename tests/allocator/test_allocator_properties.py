"""What holds for any sequence of calls under any settings."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.allocator import AllocatorConfig, Block, CachingAllocator, OutOfMemory

MIB = 2**20

configs = st.builds(
    AllocatorConfig,
    max_split_size=st.sampled_from([2**64 - 1, 20 * MIB, 21 * MIB, 40 * MIB]),
    roundup_power2_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (1, 2, 4, 8) * 4]),
    expandable_segments=st.booleans(),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
    max_non_split_rounding=st.sampled_from([20 * MIB, 30 * MIB]),
    memory_fraction=st.sampled_from([1.0, 0.9, 0.5]),
    large_segment_size=st.sampled_from([20 * MIB, 12 * MIB]),
)
sizes = st.one_of(
    st.integers(0, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(MIB, 120 * MIB)
)
# A call: (size, stream) to allocate, a number to free the block with that index, None to empty the cache.
calls = st.lists(
    st.one_of(st.tuples(sizes, st.integers(0, 1)), st.integers(0, 1000), st.integers(0, 1000), st.none()),
    max_size=60,
)
capacities = st.sampled_from([2, 64, 250, 4000])


def check(gpu: CachingAllocator, live: list[Block]) -> None:
    """Sums agree, nothing overlaps, nothing is negative, neighbours that could merge have merged."""
    segments = gpu.snapshot()
    in_use = [block for block in live if block.size]
    assert gpu.allocated == sum(block.size for block in in_use)
    assert gpu.requested == sum(block.requested for block in in_use)
    assert gpu.count == len(in_use)
    assert gpu.reserved == sum(segment["total_size"] for segment in segments) <= gpu.capacity
    assert gpu.allowed is None or gpu.reserved <= gpu.allowed + gpu.config.large_segment_size
    end = 0
    seen = []
    for segment in segments:
        assert segment["address"] >= end
        end = segment["address"]
        before = ""
        for block in segment["blocks"]:
            assert block["address"] == end
            assert block["size"] > 0 and block["size"] % 512 == 0
            assert not before == block["state"] == "inactive"
            before = block["state"]
            end += block["size"]
            if before == "active_allocated":
                seen.append((block["address"], block["size"]))
    assert sorted(seen) == sorted((block.address, block.size) for block in in_use)
    check_statistics(gpu)


def check_statistics(gpu: CachingAllocator) -> None:
    stats = gpu.memory_stats()
    assert all(value >= 0 for key, value in stats.items() if key != "max_split_size")
    for key, value in stats.items():
        if key.endswith(".current"):
            assert value <= stats[key.replace(".current", ".peak")]
            assert value == stats[key.replace(".current", ".allocated")] - stats[key.replace(".current", ".freed")]
        if ".all." in key and not key.endswith(".peak"):
            parts = (stats[key.replace(".all.", f".{pool}.")] for pool in ("small_pool", "large_pool"))
            assert value == sum(parts)
    split = [
        block["size"]
        for segment in gpu.snapshot()
        for block in segment["blocks"]
        if block["state"] == "inactive" and len(segment["blocks"]) > 1
    ]
    expected = (0, 0) if gpu.config.expandable_segments else (len(split), sum(split))
    assert (stats["inactive_split.all.current"], stats["inactive_split_bytes.all.current"]) == expected
    for pool in gpu.pools:
        for free_list in pool.by_stream.values():
            assert free_list.keys == sorted(free_list.keys) == [block.key for block in free_list.blocks]


Call = tuple[int, int] | int | None


def make(gpu: CachingAllocator, calls: list[Call], *, checked: bool = True) -> list[Block]:
    live: list[Block] = []
    for call in calls:
        if call is None:
            gpu.empty_cache()
        elif isinstance(call, int):
            if live:
                gpu.free(live.pop(call % len(live)))
        else:
            try:
                live.append(gpu.malloc(*call))
            except OutOfMemory as error:
                assert error.requested == call[0]
        if checked:
            check(gpu, live)
    return live


@settings(max_examples=300, deadline=None)
@given(configs, capacities, calls)
def test_sums_agree_and_nothing_overlaps(config: AllocatorConfig, capacity: int, calls: list[Call]) -> None:
    gpu = CachingAllocator(capacity * MIB, config)
    live = make(gpu, calls)
    for block in live:
        gpu.free(block)
    check(gpu, [])
    gpu.empty_cache()
    assert gpu.reserved == gpu.allocated == gpu.requested == 0
    assert gpu.snapshot() == []
    assert not any(free_list.blocks for pool in gpu.pools for free_list in pool.by_stream.values())


@settings(max_examples=50, deadline=None)
@given(configs, capacities, calls)
def test_equal_calls_give_equal_results(config: AllocatorConfig, capacity: int, calls: list[Call]) -> None:
    first, second = (CachingAllocator(capacity * MIB, config) for _ in range(2))
    make(first, calls, checked=False)
    make(second, calls, checked=False)
    assert first.snapshot() == second.snapshot()
    assert first.memory_stats() == second.memory_stats()


@settings(max_examples=50, deadline=None)
@given(calls)
def test_more_memory_never_changes_what_fits(calls: list[Call]) -> None:
    roomy, roomier = CachingAllocator(1 << 36), CachingAllocator(1 << 40)
    make(roomy, calls, checked=False)
    make(roomier, calls, checked=False)
    assert roomy.snapshot() == roomier.snapshot()


def test_a_long_random_run_keeps_its_invariants() -> None:
    draw = random.Random(0)
    for expandable in (False, True):
        gpu = CachingAllocator(3000 * MIB, AllocatorConfig(expandable_segments=expandable))
        live: list[Block] = []
        for step in range(4000):
            if live and draw.random() < 0.5:
                gpu.free(live.pop(draw.randrange(len(live))))
            else:
                try:
                    live.append(gpu.malloc(int(2 ** draw.uniform(0, 27)), draw.randrange(2)))
                except OutOfMemory:
                    gpu.free(live.pop())
            if step % 200 == 0:
                check(gpu, live)
