"""How long an estimate takes, of one GPU and of many ranks, and how fast the allocator's model is.

    python benchmarks/speed/estimates.py commands [--every N] [--repeat N] [--against CHECKOUT]
    python benchmarks/speed/estimates.py ranks [--repeat N] [--large]
    python benchmarks/speed/estimates.py billions
    python benchmarks/speed/estimates.py allocator [--histories N]

`commands` measures estimates cold, as a command is typed, and warm, in a process that has done others before. Cold:
processor seconds (user and system, with all children) and seconds on the clock of whole commands; the best of
`--repeat`, since other programs can only add to them. Warm: processor seconds of each of the measured runs that are
shipped (every Nth), by the number of operators that it calls. Each run is estimated once, as a new model would be;
imports are no part of it. With `--against` the same is done with an older checkout, in turns, and the four figures of
each run must be the same. Last comes how much longer an estimate takes because it tells how long a step takes and how
busy it keeps the GPU. Everything that is done for this is timed inside of one estimate: of a model the second one of a
process, of a script the first one, since a script has a process of its own.

`ranks` compares an estimate as one rank of many with one alone, in processor seconds, in one process, one after the
other in turns; the best of `--repeat`. One estimate of each comes before, and does not count: it imports. `--large`
follows a Llama of 70 billion parameters with FSDP2 on 64 GPUs in a process of its own, and tells its processor seconds
and the most memory that it held.

`billions` estimates a function that builds a model of 4.4 billion parameters on the CPU and moves it to the GPU.

`allocator` counts requests and frees a second, on one core. It takes recorded histories from
`$ULLAGE_REFERENCE/groundtruth/events` if the variable is set (every eighth of them), otherwise a made-up one. Three
rounds are made and the median is printed, with the slowest and the fastest beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
LAYERS, RANKS = 12, (1, 64)
SETTINGS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SMALL = dict(zip(SETTINGS, (1024, 4096, LAYERS, 16, 8, 32000), strict=True))
LARGE = dict(zip(SETTINGS, (8192, 28672, 80, 64, 8, 128256), strict=True))
REFERENCE = os.environ.get("ULLAGE_REFERENCE")
ROUNDS = 3

# A call is (size, slot): malloc(size) into the slot, or, with size 0, free what is in it.
Calls = list[tuple[int, int]]


def environment(checkout: Path) -> dict[str, str]:
    """As a user's: Python may keep what it has compiled."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return variables | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}


def timed(words: list[str], checkout: Path, folder: str) -> tuple[float, float]:
    """Processor seconds and seconds on the clock of one command."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "ullage", *words], env=environment(checkout), cwd=folder, capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def cold(checkouts: list[Path], repeat: int) -> dict[str, list[tuple[float, float]]]:
    """By command, the least of both kinds of seconds in each checkout."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.py").write_text(SCRIPT)
        for what, words in COLD.items():
            for checkout in checkouts:
                timed(words, checkout, folder)
            rounds = [[timed(words, checkout, folder) for checkout in checkouts] for _ in range(repeat)]
            best = [[min(both) for both in zip(*of_one, strict=True)] for of_one in zip(*rounds, strict=True)]
            seconds[what] = [(processor, clock) for processor, clock in best]
    return seconds


class Warm:
    """A process of one checkout that estimates one run after the other."""

    def __init__(self, checkout: Path, count: bool) -> None:
        words = [sys.executable, __file__, "serve", "count" if count else "time"]
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
        self._process.communicate()


def serve(counts: bool) -> None:
    """The inside of such a process."""
    from ullage.measuring.accuracy import compare
    from ullage.virtual.call import dispatch

    calls = [0]
    call = dispatch.VirtualMode.__torch_dispatch__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        return call(self, *args, **options)

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        row = json.loads(line)
        begin = time.process_time()
        compared = compare(row)
        answer = {"seconds": time.process_time() - begin, "failed": compared.failed}
        answer["figures"] = [compared.allocated, compared.reserved, compared.process, compared.upper]
        if counts:
            calls[0], dispatch.VirtualMode.__torch_dispatch__ = 0, counted
            compare(row)
            dispatch.VirtualMode.__torch_dispatch__ = call
            answer["operators"] = calls[0]
        print(json.dumps(answer), file=answers, flush=True)


def warm(checkouts: list[Path], every: int) -> list[dict[str, Any]]:
    """For each run: its model, operators, and by checkout seconds and figures."""
    from ullage.jobs import read_rows

    rows = list(read_rows(RUNS))
    first = list({row["model"].split(":")[0]: row for row in reversed(rows)}.values())
    workers = [Warm(checkout, count=not number) for number, checkout in enumerate(checkouts)]
    for row in first:  # what they import
        for worker in workers:
            worker.ask(row)
    runs = []
    for row in track(rows[::every], "estimating", console=Console(stderr=True)):
        answers = [worker.ask(row) for worker in workers]
        measured = {name: [answer[name] for answer in answers] for name in ("seconds", "figures")}
        runs.append({"id": row["id"], "model": row["model"], "operators": answers[0]["operators"], **measured})
    for worker in workers:
        worker.close()
    return runs


def serve_share(what: str) -> None:
    """The inside of a process that makes one estimate: its processor seconds, and those that utilization took."""
    import ullage
    from ullage.estimation.result import Estimate
    from ullage.estimation.scripts import child, request
    from ullage.hardware import gpu
    from ullage.performance.step import StepCalls
    from ullage.virtual.watching.step_calls import OperatorCalls

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
            script = request.ScriptRequest(
                path=file.name, args=[], module=False, gpu=gpu("H200"), steps=3, timeout=300.0, limited=True
            )
            child.ScriptRun(script, answers.append, answers.append, lambda seconds: None).run()
        calls = timing(request.unpacked)(answers[-1]["calls"])
        estimate = Estimate.from_dict(answers[-1]["estimate"]).with_utilization(StepCalls(**calls), script.gpu)
    else:
        ullage.estimate(what, batch_size=32, gpu="H200")
        begin, taken = time.process_time(), 0.0
        estimate = ullage.estimate(what, batch_size=32, gpu="H200")
    assert estimate.utilization is not None
    print(json.dumps([time.process_time() - begin, taken]))


def shares(repeat: int) -> dict[str, float]:
    """By what is estimated, how many times as long an estimate takes with utilization as without; the median."""
    ratios = {}
    for what in (*MODELS, "script"):
        rounds = []
        for _ in range(repeat):
            words = [sys.executable, __file__, "serve", what]
            done = subprocess.run(words, env=environment(HERE), capture_output=True, text=True, check=True)
            whole, taken = json.loads(done.stdout.splitlines()[-1])
            rounds.append(whole / (whole - taken))
        ratios[what] = statistics.median(rounds)
    return ratios


def print_tables(commands: dict[str, list[tuple[float, float]]], runs: list[dict[str, Any]], names: list[str]) -> None:
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


def measure_commands(options: argparse.Namespace) -> None:
    checkouts = [HERE] + ([options.against.resolve()] if options.against else [])
    names = ["this"] + (["older"] if options.against else [])
    commands = cold(checkouts, options.repeat) if options.repeat else {}
    runs = warm(checkouts, options.every) if options.every else []
    print_tables(commands, runs, names)
    for what, share in (shares(options.repeat) if options.repeat else {}).items():
        print(f"{what}: {share:.3f} times as long as without utilization")


def rank_seconds(parallel: str, ranks: int) -> float:
    import ullage

    begin = time.process_time()
    ullage.estimate(
        ullage.Model("hf:LlamaForCausalLM", settings=SMALL, batch_size=2, sequence_length=512),
        gpu="H100",
        ranks=ullage.Ranks(ranks, nodes=max(1, ranks // 8), parallel=parallel),
    )
    return time.process_time() - begin


def measure_ranks(repeat: int) -> None:
    """Print the best times, and how many times as long 64 ranks take."""
    print("| spread | 1 rank, s | 64 ranks, s | times |")
    print("| --- | --- | --- | --- |")
    for parallel in ("ddp", "fsdp2"):
        for ranks in RANKS:
            rank_seconds(parallel, ranks)
        seconds = [[rank_seconds(parallel, ranks) for ranks in RANKS] for _ in range(repeat)]
        one, many = (min(column) for column in zip(*seconds, strict=True))
        print(f"| {parallel} | {one:.2f} | {many:.2f} | {many / one:.2f} |", flush=True)


def large() -> None:
    words = [word for key, value in LARGE.items() for word in ("--set", f"{key}={value}")]
    words += ["-b", "1", "--sequence-length", "4096", "-p", "bf16", "--checkpointing", "--gpu", "H100"]
    words += ["--world-size", "64", "--nodes", "8", "--parallel", "fsdp2"]
    command = [sys.executable, "-m", "ullage", "estimate", "hf:LlamaForCausalLM", *words]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(next(line for line in done.stdout.splitlines() if "H100" in line))
    clock = time.perf_counter() - begin
    print(f"{used.ru_utime + used.ru_stime:.0f} processor seconds, {clock:.0f} on the clock")
    print(f"at most {used.ru_maxrss / 1024**2:.2f} GiB of memory")


def train_billions() -> None:
    """Fine-tune a decoder of Qwen3-4B's shape with AdamW in bf16."""
    import torch
    import transformers

    sizes = dict(zip(SETTINGS, (2560, 9728, 36, 32, 8, 151936), strict=True))
    config = transformers.Qwen3Config(**sizes, head_dim=128, tie_word_embeddings=False, use_cache=False)
    model = transformers.Qwen3ForCausalLM(config)
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, config.vocab_size, (1, 1024))
    for _ in range(5):
        batch = tokens.to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f} billion parameters")


def measure_billions() -> None:
    """Print the estimate, and the time and memory that it took."""
    import ullage

    begin = time.perf_counter()
    answer = ullage.estimate(train_billions, gpu="H200")
    seconds = time.perf_counter() - begin
    print(answer)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nQwen3-4B's shape: {seconds:.1f} s, {peak:.2f} GiB of resident memory (goals: 20 s, 2 GiB)")


def recorded(path: Path) -> Calls:
    from ullage.allocator import History
    from ullage.allocator.blocks import ALLOC, FREE_COMPLETED

    calls: Calls = []
    slots: dict[int, int] = {}
    for action, address, size in zip(*History.load(path), strict=True):
        if action == ALLOC:
            slots[address] = len(calls)
            calls.append((size, len(calls)))
        elif action == FREE_COMPLETED:
            calls.append((0, slots.pop(address)))
    return calls


def synthetic(length: int = 100_000) -> Calls:
    """Requests like those of a training loop: forward, backward in reverse, small temporaries between."""
    draw = random.Random(0)
    calls: Calls = []
    while len(calls) < length:
        layers = [(draw.choice((4096, 300_000, 3_000_000, 20_000_000)), index) for index in range(200)]
        slots = []
        for size, _ in layers:
            slot = len(calls)
            calls += [(size, slot), (draw.randint(1, 900_000), slot + 1), (0, slot + 1)]
            slots.append(slot)
        calls += [(0, slot) for slot in reversed(slots)]
    return calls


def allocator_seconds(calls: Calls) -> float:
    """The time that an allocator without limit takes for the calls."""
    from ullage.allocator import Block, CachingAllocator

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


def measure_allocator(wanted: int | None) -> None:
    paths = sorted(Path(REFERENCE, "groundtruth", "events").glob("*.npz")) if REFERENCE else []
    wanted = wanted or len(paths) // 8
    if paths:
        step = max(len(paths) // max(wanted, 1), 1)
        histories = [recorded(path) for path in paths[::step]]
        source = f"{len(histories)} recorded histories"
    else:
        histories = [synthetic()]
        source = "a synthetic history"
    count = sum(map(len, histories))
    rates = sorted(count / sum(map(allocator_seconds, histories)) for _ in range(ROUNDS))
    print("| source | requests and frees | a second (median) | slowest | fastest |")
    print(f"| {source} | {count:,} | {statistics.median(rates):,.0f} | {rates[0]:,.0f} | {rates[-1]:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="{commands,ranks,billions,allocator}")
    part = parts.add_parser("commands", help="commands from a cold start, and estimates in a warm process")
    part.add_argument("--every", type=int, default=5, metavar="N", help="every Nth of the shipped runs")
    part.add_argument("--repeat", type=int, default=3, metavar="N", help="each command so often")
    part.add_argument("--against", type=Path, metavar="CHECKOUT", help="an older checkout to compare with")
    part = parts.add_parser("ranks", help="one rank of many beside one alone")
    part.add_argument("--repeat", type=int, default=3)
    part.add_argument("--large", action="store_true", help="a Llama of 70 billion parameters instead")
    parts.add_parser("billions", help="a model of 4.4 billion parameters")
    part = parts.add_parser("allocator", help="requests and frees a second")
    part.add_argument("--histories", type=int, metavar="N", help="so many of the recorded ones")
    parts.add_parser("serve").add_argument("what")  # what `commands` starts
    options = parser.parse_args()
    if options.part == "serve" and options.what in ("count", "time"):
        serve(options.what == "count")
    elif options.part == "serve":
        serve_share(options.what)
    elif options.part == "commands":
        measure_commands(options)
    elif options.part == "ranks" and options.large:
        large()
    elif options.part == "ranks":
        measure_ranks(options.repeat)
    elif options.part == "billions":
        measure_billions()
    else:
        measure_allocator(options.histories)


if __name__ == "__main__":
    main()
