"""How many requests and frees a second the allocator model serves, on one core.

    python benchmarks/speed/allocator_speed.py [number of histories]

Takes recorded histories from `$ULLAGE_REFERENCE/groundtruth/events` if the variable is set (default: every eighth of
them), otherwise a made-up one. Each malloc and each free counts as one. Three rounds are made and the median is
printed, with the slowest and the fastest beside it.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from ullage.allocator import Block, CachingAllocator, History  # noqa: E402

REFERENCE = os.environ.get("ULLAGE_REFERENCE")
ROUNDS = 3

# A call is (size, slot): malloc(size) into the slot, or, with size 0, free what is in it.
Calls = list[tuple[int, int]]


def recorded(path: Path) -> Calls:
    """The requests and frees of a history."""
    calls: Calls = []
    slots: dict[int, int] = {}
    for event in History.load(path).events():
        if event.name == "alloc":
            slots[event.addr] = len(calls)
            calls.append((event.size, len(calls)))
        elif event.name == "free_completed":
            calls.append((0, slots.pop(event.addr)))
    return calls


def synthetic(length: int = 100_000) -> Calls:
    """Requests like those of a training loop: forward, backward in reverse, small temporaries between."""
    draw = random.Random(0)
    calls: Calls = []
    while len(calls) < length:
        layers = [(draw.choice((4096, 300_000, 3_000_000, 20_000_000)), index) for index in range(200)]
        kept = []
        for size, _ in layers:
            slot = len(calls)
            calls += [(size, slot), (draw.randint(1, 900_000), slot + 1), (0, slot + 1)]
            kept.append(slot)
        calls += [(0, slot) for slot in reversed(kept)]
    return calls


def seconds(calls: Calls) -> float:
    """The time that an allocator without limit takes for the calls."""
    allocator = CachingAllocator(1 << 42)
    blocks: dict[int, Block] = {}
    malloc, free = allocator.malloc, allocator.free
    start = time.perf_counter()
    for size, slot in calls:
        if size:
            blocks[slot] = malloc(size)
        else:
            free(blocks[slot])
    return time.perf_counter() - start


def main() -> None:
    """Measure and print one line."""
    paths = sorted(Path(REFERENCE, "groundtruth", "events").glob("*.npz")) if REFERENCE else []
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else len(paths) // 8
    if paths:
        step = max(len(paths) // max(wanted, 1), 1)
        histories = [recorded(path) for path in paths[::step]]
        source = f"{len(histories)} recorded histories"
    else:
        histories = [synthetic()]
        source = "a synthetic history"
    count = sum(map(len, histories))
    rates = sorted(count / sum(map(seconds, histories)) for _ in range(ROUNDS))
    print("| source | requests and frees | a second (median) | slowest | fastest |")
    print(f"| {source} | {count:,} | {statistics.median(rates):,.0f} | {rates[0]:,.0f} | {rates[-1]:,.0f} |")


if __name__ == "__main__":
    main()
