"""What recurrent networks ask of the allocator on a real GPU, for calls drawn at random.

    python benchmarks/accuracy/recurrent_calls.py --count 600 --seed 1 --out recurrent_h200.jsonl.gz

A line a call: the call (`tests/virtual/recurrent.py`), and what its step asked for: sizes, and for a free -1 minus the
number of the request. It needs a GPU and PyTorch, nothing else of this project. Calls are written whatever they are.

    python benchmarks/accuracy/recurrent_calls.py --compare recurrent_h200.jsonl.gz

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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.virtual.recurrent import Call, draw, peak_of, run  # noqa: E402


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

    exact, same_order, off = 0, 0, []
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for values, real in rows:
        with ullage.virtual_gpu("H200") as gpu:
            gpu.libraries.need = lambda library: None
            found = run(Call(*values), functools.partial(recorded_events, gpu))
        exact += found == real
        same_order += [size < 0 for size in found] == [size < 0 for size in real]
        off.append(peak_of(found) / peak_of(real) - 1)
    print(f"of {len(rows)} calls: exact in every size {exact}, in the order of requests and frees {same_order}")
    within = ", ".join(f"within {limit:.0%} {sum(abs(share) <= limit for share in off)}" for limit in (0.01, 0.05, 0.1))
    print(f"peak of the step: exact {off.count(0)}, {within}; between {min(off):+.1%} and {max(off):+.1%}")


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
