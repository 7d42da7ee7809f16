"""What operators ask of the allocator on a real GPU: the samples of PyTorch's own lists, and calls drawn at random.

    python benchmarks/accuracy/operators.py measure --samples 4 --drawn 600 --seed 1 --out lists_h200.jsonl.gz
    python benchmarks/accuracy/operators.py measure-recurrent --count 600 --seed 1 --out recurrent_h200.jsonl.gz

need a GPU and PyTorch, nothing else of this project. A line a call: the call (`tests/virtual/pytorch_lists.py`,
`tests/virtual/recurrent.py`), and its outcome: outputs and gradients, and what its forward and backward pass asked for;
of a recurrent network what its step asked for. That is sizes, and for a free -1 minus the number of the request.
`--part 2/8` takes every eighth call from the second on.

    python benchmarks/accuracy/operators.py compare lists_h200.jsonl.gz
    python benchmarks/accuracy/operators.py compare-recurrent recurrent_h200.jsonl.gz

compare such files with the virtual GPU and print how many calls are exact. That needs no GPU.

    python benchmarks/accuracy/operators.py exceptions

prints, as tables, what the tests of the lists leave out, and where the CPU differs from a GPU, with the reasons.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gzip
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.virtual import recurrent  # noqa: E402
from tests.virtual.drawn_calls import Drawn, draw, run_drawn  # noqa: E402
from tests.virtual.pytorch_lists import DIFFERENT, LEFT_OUT, Entry, entries, run, samples  # noqa: E402

STICKY = ("CUDA error", "device-side assert", "illegal memory")  # after these, a process can use the GPU no more


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Record the requests to PyTorch's allocator on the real GPU."""
    events: list[int] = []
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
    try:
        yield events
    finally:
        alive: dict[int, int] = {}
        taken = 0
        for event in torch.cuda.memory._snapshot()["device_traces"][0]:
            if event["action"] == "alloc":
                alive[event["addr"]] = taken
                taken += 1
                events.append(event["size"])
            elif event["action"] == "free_requested" and event["addr"] in alive:
                events.append(-1 - alive.pop(event["addr"]))
        torch.cuda.memory._record_memory_history(None)


def calls(most: int, drawn: int, seed: int, part: tuple[int, int], family: str) -> Iterator[tuple[list[Any], Any]]:
    """Yield every call of a part, and a function that runs it with a recorder."""
    first, parts = part
    for call in draw(drawn, seed, family)[first - 1 :: parts]:
        yield ["drawn", *call], lambda recorder, call=call: run_drawn(call, "cuda", recorder)
    for entry in entries()[first - 1 :: parts] if most else ():
        try:
            chosen = samples(entry, most)
        except Exception as error:
            yield [*entry, -1], RuntimeError(f"no samples: {error!r}"[:200])
            continue
        for place, sample in chosen:
            yield ([*entry, place], lambda recorder, entry=entry, sample=sample: run(entry, sample, "cuda", recorder))


def measure(most: int, drawn: int, seed: int, part: tuple[int, int], family: str, out: Path, skip: int) -> None:
    """Write a line for each call; begin again after one that leaves the GPU unusable."""
    warm_up()
    with gzip.open(out, "at") as file:
        for number, (label, run_with) in enumerate(calls(most, drawn, seed, part, family)):
            if number < skip:
                continue
            try:
                if isinstance(run_with, Exception):
                    raise run_with
                run_with(recorded)  # a first time to load kernels and fill caches
                result: Any = run_with(recorded)
            except Exception as error:
                text = str(error)
                result = f"{type(error).__name__}: {text[:160]}"
                if any(word in text for word in STICKY):
                    file.write(json.dumps([label, result]) + "\n")
                    file.close()
                    os.execv(sys.executable, [sys.executable, *_without_skip(), "--skip", str(number + 1)])
            file.write(json.dumps([label, result]) + "\n")
            if number % 50 == 0:
                file.flush()
    print(f"part {part}: done", flush=True)


def _without_skip() -> list[str]:
    words = list(sys.argv)
    if "--skip" in words:
        place = words.index("--skip")
        del words[place : place + 2]
    return words


def warm_up() -> None:
    """Let libraries allocate their workspaces, which happens once, in the forward and the backward thread."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        weight = torch.rand(64, 64, device="cuda").to(dtype).requires_grad_()
        x = torch.rand(32, 64, device="cuda").to(dtype)
        bias = torch.rand(64, device="cuda").to(dtype).requires_grad_()
        torch.addmm(bias, x, weight).sum().abs().backward()
        torch.nn.functional.linear(x, weight, bias).sum().abs().backward()
    matrix = torch.rand(8, 8, device="cuda").requires_grad_()
    torch.linalg.inv(matrix).sum().backward()


def compare(file: Path, show: int) -> None:
    """Print how many calls are exact on the virtual GPU, and the worst of the others."""
    from tests.virtual.recording import recorded_events

    import ullage

    cache: dict[Any, dict[int, Any]] = {}
    counts = collections.Counter()  # type: ignore[var-annotated]
    worst = []
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for label, real in rows:
        if isinstance(real, str):
            counts["not run on the GPU"] += 1
            continue
        try:
            entry = None if label[0] == "drawn" else Entry(*label[:3])
            if entry is not None and entry not in cache:
                cache.clear()
                cache[entry] = dict(samples(entry, 4))
            with ullage.virtual_gpu("H200") as gpu:
                gpu.libraries.need = lambda library: None
                recorder = functools.partial(recorded_events, gpu)
                if entry is None:
                    result = run_drawn(Drawn(*label[1:]), "cuda", recorder)
                else:
                    result = run(entry, cache[entry][label[3]], "cuda", recorder)
        except Exception as error:
            counts["fails"] += 1
            worst.append((1 << 60, label, f"{type(error).__name__}: {str(error)[:150]}"))
            continue
        counts["calls"] += 1
        outputs, gradients, forward, backward = real
        layouts = [outputs, gradients] == [result.outputs, result.gradients]
        counts["layouts"] += layouts
        exact = forward == result.forward and backward == result.backward
        counts["exact"] += exact
        passes = (result.forward, forward), (result.backward, backward)
        off = [recurrent.peak_of(mine) - recurrent.peak_of(theirs) for mine, theirs in passes]
        counts["peaks"] += off == [0, 0]
        counts["low"] += min(off) < 0
        if not layouts or not exact:
            names = ("forward", "backward", "outputs", "gradients")
            mine = (getattr(result, name) for name in names)
            both = zip(names, (forward, backward, outputs, gradients), mine, strict=True)
            text = f"peaks off {off} layouts equal {layouts}"
            text += "".join(
                f"\n    {name}: real {str(real)[:300]}\n    {name}: here {str(here)[:300]}"
                for name, real, here in both
                if real != here
            )
            worst.append((max(map(abs, off)), label, text))
    print(dict(counts))
    worst.sort(key=lambda row: -row[0])
    for size, label, text in worst[:show]:
        print(size, label)
        print("   ", text)


def print_exceptions() -> None:
    for title, reasons in (("left out", LEFT_OUT), ("different from the CPU", DIFFERENT)):
        print(f"| {title} | why |\n| --- | --- |")
        for name, why in reasons.items():
            print(f"| `{name}` | {why} |")
        print()


def is_rare(call: recurrent.Call) -> bool:
    """Check for kinds of which a few thousand calls have too few."""
    projected = call.projected > 0 and (call.packed or call.both)
    return call.batch <= 4 or projected or (call.kind == "LSTM" and call.both and call.hidden <= 192)


def measure_recurrent(count: int, seed: int, rare: bool, out: Path) -> None:
    """Write a line for each drawn call, or for each of a rare kind."""
    failed, calls = 0, [call for call in recurrent.draw(count, seed) if not rare or is_rare(call)]
    with gzip.open(out, "wt") as file:
        for call in calls:
            try:
                events = recurrent.run(call, recorded)
            except RuntimeError as error:  # cuDNN does not support every call
                failed += 1
                print(call, str(error).splitlines()[0], file=sys.stderr)
                continue
            file.write(json.dumps([list(call), events]) + "\n")
    print(f"{len(calls) - failed} calls measured on {torch.cuda.get_device_name()}, {failed} not taken: {out}")


def compare_recurrent(file: Path) -> None:
    """Print how many calls are exact on the virtual GPU, and how far off the others are."""
    from tests.virtual.recording import recorded_events

    import ullage

    exact, same_order, off = 0, 0, []
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for values, real in rows:
        with ullage.virtual_gpu("H200") as gpu:
            gpu.libraries.need = lambda library: None
            events = recurrent.run(recurrent.Call(*values), functools.partial(recorded_events, gpu))
        exact += events == real
        same_order += [size < 0 for size in events] == [size < 0 for size in real]
        off.append(recurrent.peak_of(events) / recurrent.peak_of(real) - 1)
    print(f"of {len(rows)} calls: exact in every size {exact}, in the order of requests and frees {same_order}")
    within = ", ".join(f"within {limit:.0%} {sum(abs(share) <= limit for share in off)}" for limit in (0.01, 0.05, 0.1))
    print(f"peak of the step: exact {off.count(0)}, {within}; between {min(off):+.1%} and {max(off):+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--samples", type=int, default=4)
    measuring.add_argument("--drawn", type=int, default=600)
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--part", default="1/1")
    measuring.add_argument("--family", default="", help="only calls of this family are drawn: fft, linalg, ...")
    measuring.add_argument("--skip", type=int, default=0)
    measuring.add_argument("--out", type=Path, default=Path("lists_h200.jsonl.gz"))
    commands.add_parser("exceptions")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--show", type=int, default=20)
    measuring = commands.add_parser("measure-recurrent")
    measuring.add_argument("--count", type=int, default=600)
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--rare", action="store_true", help="keep only calls of rare kinds")
    measuring.add_argument("--out", type=Path, default=Path("recurrent_h200.jsonl.gz"))
    commands.add_parser("compare-recurrent").add_argument("file", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.command == "measure":
        first, parts = map(int, given.part.split("/"))
        measure(given.samples, given.drawn, given.seed, (first, parts), given.family, given.out, given.skip)
    elif given.command == "measure-recurrent":
        measure_recurrent(given.count, given.seed, given.rare, given.out)
    elif given.command == "compare-recurrent":
        compare_recurrent(given.file)
    elif given.command == "exceptions":
        print_exceptions()
    else:
        compare(given.file, given.show)


if __name__ == "__main__":
    main()
