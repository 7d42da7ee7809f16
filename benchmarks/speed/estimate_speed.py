"""How long an estimate takes: cold, as a command is typed, and warm, in a process that has done others before.

    python benchmarks/speed/estimate_speed.py [--every N] [--repeat N] [--against CHECKOUT] [--json FILE]

Cold: processor seconds (user and system, with all children) and seconds on the clock of whole commands; the best of
`--repeat`, since other programs can only add to them. Warm: processor seconds of each of the measured runs that are
shipped (every Nth), by the number of operators that it calls. Each run is estimated once, as a new model would be;
imports are no part of it. With `--against` the same is done with an older checkout, in turns, and the four figures of
each run must be the same.

Last comes how much longer an estimate takes because it tells how long a step takes and how busy it keeps the GPU.
Everything that is done for this is timed inside of one estimate: of a model the second one of a process, of a script
the first one, since a script has a process of its own.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parents[2]
RUNS = HERE / "benchmarks" / "data" / "h200_runs.jsonl.gz"
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
COLD = {
    "torchvision:resnet50": ["estimate", "torchvision:resnet50"],
    "a small script": ["estimate", "small.py"],
    "a missing file": ["estimate", "missing.py"],
    "a misspelt name": ["estimate", "torchvision:resnet5O"],
    "a bad option": ["estimate", "torchvision:resnet50", "--gpux", "H200"],
}
MODELS = ("torchvision:resnet50", "timm:vit_small_patch16_224")
SIZES = (1_000, 3_000, 10_000)  # operators


def environment(checkout: Path) -> dict[str, str]:
    """As a user's: Python may keep what it has compiled."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}


def timed(words: list[str], checkout: Path, folder: str) -> tuple[float, float]:
    """Processor seconds and seconds on the clock of one command."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "ullage", *words], env=environment(checkout), cwd=folder, capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def cold(checkouts: list[Path], repeat: int) -> dict[str, list[tuple[float, float]]]:
    """By command, the least of both kinds of seconds in each checkout."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.py").write_text(SCRIPT)
        for what, words in COLD.items():
            for checkout in checkouts:
                timed(words, checkout, folder)
            rounds = [[timed(words, checkout, folder) for checkout in checkouts] for _ in range(repeat)]
            best = [[min(both) for both in zip(*of_one, strict=True)] for of_one in zip(*rounds, strict=True)]
            found[what] = [(processor, clock) for processor, clock in best]
    return found


class Warm:
    """A process of one checkout that estimates one run after the other."""

    def __init__(self, checkout: Path, count: bool) -> None:
        words = [sys.executable, __file__, "--serve", "count" if count else "time"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, env=environment(checkout), stdin=pipe, stdout=pipe, text=True)

    def ask(self, row: dict[str, Any]) -> dict[str, Any]:
        """Processor seconds, figures and, where they are counted, operators of one run."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def serve(counts: bool) -> None:
    """The inside of such a process."""
    from ullage.research.measure.accuracy import compare
    from ullage.virtual import dispatch

    calls = [0]
    call = dispatch.VirtualMode.__torch_dispatch__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        return call(self, *args, **options)

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        row = json.loads(line)
        begin = time.process_time()
        found = compare(row)
        answer = {"seconds": time.process_time() - begin, "failed": found.failed}
        answer["figures"] = [found.allocated, found.reserved, found.process, found.upper]
        if counts:
            calls[0], dispatch.VirtualMode.__torch_dispatch__ = 0, counted
            compare(row)
            dispatch.VirtualMode.__torch_dispatch__ = call
            answer["operators"] = calls[0]
        print(json.dumps(answer), file=answers, flush=True)


def warm(checkouts: list[Path], every: int) -> list[dict[str, Any]]:
    """For each run: its model, operators, and by checkout seconds and figures."""
    from ullage.workloads import read_rows

    rows = list(read_rows(RUNS))
    first = list({row["model"].split(":")[0]: row for row in reversed(rows)}.values())
    workers = [Warm(checkout, count=not number) for number, checkout in enumerate(checkouts)]
    for row in first:  # what they import
        for worker in workers:
            worker.ask(row)
    found = []
    for row in track(rows[::every], "estimating", console=Console(stderr=True)):
        answers = [worker.ask(row) for worker in workers]
        found.append({
            "id": row["id"], "model": row["model"], "operators": answers[0]["operators"],
            "seconds": [answer["seconds"] for answer in answers], "figures": [answer["figures"] for answer in answers],
        })  # fmt: skip
    for worker in workers:
        worker.close()
    return found


def serve_share(what: str) -> None:
    """The inside of a process that makes one estimate: its processor seconds, and those that utilization took."""
    import ullage
    from ullage.estimation.result import Estimate
    from ullage.estimation.scripts import child, request
    from ullage.hardware import gpu
    from ullage.performance.step import StepCalls
    from ullage.virtual.tracking.calls import OperatorCalls

    taken = 0.0

    def timing(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal taken
            begin = time.process_time()
            try:
                return function(*args, **options)
            finally:
                taken += time.process_time() - begin

        return call

    OperatorCalls.step = timing(OperatorCalls.step)  # type: ignore[method-assign]
    Estimate.with_utilization = timing(Estimate.with_utilization)  # type: ignore[method-assign]
    child.packed = timing(child.packed)  # type: ignore[attr-defined]
    if what == "script":
        begin = 0.0  # of the process
        answers: list[dict[str, Any]] = []
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(SCRIPT)
            file.flush()
            asked = request.ScriptRequest(
                path=file.name, args=[], module=False, gpu=gpu("H200"), steps=3, timeout=300.0, limited=True
            )
            child.ScriptRun(asked, answers.append, answers.append, lambda seconds: None).run()
        calls = timing(request.unpacked)(answers[-1]["calls"])
        found = Estimate.from_dict(answers[-1]["estimate"]).with_utilization(StepCalls(**calls), asked.gpu)
    else:
        ullage.estimate(what, batch_size=32, gpu="H200")
        begin, taken = time.process_time(), 0.0
        found = ullage.estimate(what, batch_size=32, gpu="H200")
    assert found.utilization is not None
    print(json.dumps([time.process_time() - begin, taken]))


def shares(repeat: int) -> dict[str, float]:
    """By what is estimated, how many times as long an estimate takes with utilization as without; the median."""
    found = {}
    for what in (*MODELS, "script"):
        rounds = []
        for _ in range(repeat):
            words = [sys.executable, __file__, "--serve", what]
            done = subprocess.run(words, env=environment(HERE), capture_output=True, text=True, check=True)
            whole, taken = json.loads(done.stdout.splitlines()[-1])
            rounds.append(whole / (whole - taken))
        found[what] = statistics.median(rounds)
    return found


def print_tables(commands: dict[str, list[tuple[float, float]]], runs: list[dict[str, Any]], names: list[str]) -> None:
    """What was measured."""
    shown = Table("command", *(f"{kind}, {name}" for name in names for kind in ("processor", "clock")))
    for what, seconds in commands.items():
        shown.add_row(what, *(f"{value:.2f} s" for both in seconds for value in both))
    console = Console(width=120)
    console.print(shown)
    figures = ("median", "µs an operator")
    shown = Table("operators", "runs", *(f"{figure}, {name}" for figure in figures for name in names))
    bounds = [0, *SIZES, 1 << 60]
    groups = {
        f"{low:,} to {high:,}" if high < 1 << 60 else f"above {low:,}": [
            run for run in runs if low <= run["operators"] < high
        ]
        for low, high in zip(bounds, bounds[1:], strict=False)
    }
    for group, members in (groups | {"all": runs}).items():
        if members:
            numbers = range(len(names))
            medians = [statistics.median(run["seconds"][number] for run in members) for number in numbers]
            each = [
                statistics.median(run["seconds"][number] / max(run["operators"], 1) for run in members)
                for number in numbers
            ]
            cells = [f"{value:.2f} s" for value in medians] + [f"{value * 1e6:.0f}" for value in each]
            shown.add_row(group, str(len(members)), *cells)
    console.print(shown)
    if len(names) > 1:
        other = [run["id"] for run in runs if run["figures"][0] != run["figures"][1]]
        print(f"the four figures are the same for {len(runs) - len(other)} of {len(runs)} runs", *other)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=5, metavar="N", help="every Nth of the shipped runs")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="each command so often")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="an older checkout to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve in ("count", "time"):
        serve(options.serve == "count")
        return
    if options.serve:
        serve_share(options.serve)
        return
    checkouts = [HERE] + ([options.against.resolve()] if options.against else [])
    names = ["this"] + (["older"] if options.against else [])
    commands = cold(checkouts, options.repeat) if options.repeat else {}
    runs = warm(checkouts, options.every) if options.every else []
    print_tables(commands, runs, names)
    utilization = shares(options.repeat) if options.repeat else {}
    for what, share in utilization.items():
        print(f"{what}: {share:.3f} times as long as without utilization")
    if options.json:
        options.json.write_text(json.dumps({"cold": commands, "warm": runs, "utilization": utilization}, indent=1))


if __name__ == "__main__":
    main()
