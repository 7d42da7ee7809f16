"""What recurrent networks ask of the allocator on a real GPU, for calls drawn at random.

    python benchmarks/recurrent_calls.py --count 600 --seed 1 --out recurrent_h200.jsonl.gz

A line a call: the call (`tests/virtual/recurrent.py`), and what its step asked for: sizes, and for a free -1 minus the
number of the request. It needs a GPU and PyTorch, nothing else of this project. Calls are written whatever they are.

    python benchmarks/recurrent_calls.py --compare recurrent_h200.jsonl.gz

compares such a file with the virtual GPU and prints how many calls are exact. That needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.virtual.recurrent import Call, draw, run  # noqa: E402


@contextmanager
def recorded() -> Iterator[list[int]]:
    """What PyTorch's allocator is asked for on the real GPU."""
    events: list[int] = []
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
    try:
        yield events
    finally:
        alive: dict[int, int] = {}
        for event in torch.cuda.memory._snapshot()["device_traces"][0]:
            if event["action"] == "alloc":
                alive[event["addr"]] = sum(size >= 0 for size in events)
                events.append(event["size"])
            elif event["action"] == "free_requested" and event["addr"] in alive:
                events.append(-1 - alive.pop(event["addr"]))
        torch.cuda.memory._record_memory_history(None)


def measure(count: int, seed: int, out: Path) -> None:
    """Write a line for each call that was drawn."""
    failed = 0
    with gzip.open(out, "wt") as file:
        for call in draw(count, seed):
            try:
                events = run(call, recorded)
            except RuntimeError as error:  # cuDNN does not take every call
                failed += 1
                print(call, str(error).splitlines()[0], file=sys.stderr)
                continue
            file.write(json.dumps([list(call), events]) + "\n")
    print(f"{count - failed} calls measured on {torch.cuda.get_device_name()}, {failed} not taken: {out}")


def compare(file: Path) -> None:
    """Print how many calls are exact on the virtual GPU, and how far off the others are."""
    from tests.virtual.recording import recorded_events

    import ullage

    exact, shapes, off = 0, 0, []
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for values, real in rows:
        with ullage.virtual_gpu("H200") as gpu:
            gpu.libraries.need = lambda library: None
            found = run(Call(*values), functools.partial(recorded_events, gpu))
        exact += found == real
        if found != real and [size < 0 for size in found] == [size < 0 for size in real]:
            pairs = [(got, true) for got, true in zip(found, real, strict=True) if got != true]
            off.append(max(abs(got - true) / max(true, 1) for got, true in pairs))
        elif found != real:
            shapes += 1
            print("other requests:", values)
    print(f"{exact} of {len(rows)} calls exact, {shapes} with other requests")
    if off:
        off.sort()
        print(f"the other {len(off)}: a size is off by {off[len(off) // 2]:.2%} (median), {off[-1]:.2%} (most)")


def main() -> None:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("recurrent_h200.jsonl.gz"))
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    if given.compare:
        compare(given.compare)
    else:
        measure(given.count, given.seed, given.out)


if __name__ == "__main__":
    main()
