"""The experiments of the dissertation's chapter 3 on this machine's GPU: what counters show, and what tools cost.

    python benchmarks/dissertation/monitoring_costs.py sweep --out FILE       # Figure 3.1; needs nvcc
    python benchmarks/dissertation/monitoring_costs.py tools --out FILE       # Table 3.2 and Figures 3.2 to 3.4
    python benchmarks/dissertation/monitoring_costs.py tables [FILE] [--write]

`sweep` runs a kernel that squares numbers, with more and more blocks and threads, and reads GRACT, SMACT and SMOCC.
`tools` trains a small and a large network without and with each tool that this machine has: top, nvidia-smi, GPM,
DCGM, Ullage's monitor, Nsight Systems and PyTorch's profiler. `tables` prints the tables of
benchmarks/results/monitoring.md next to the published ones.
"""

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import collocation
from ullage.units import format_bytes
from ullage_lab.measure.activity import activity_between

HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "data" / "monitoring_h200.jsonl"
PAGE = HERE.parents[1] / "results" / "monitoring.md"
Row = dict[str, Any]

BLOCKS = (1, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
THREADS = (1, 8, 32, 128, 256, 512, 1024)
KERNEL = """
__global__ void square(float *numbers) {
    long place = (long) blockIdx.x * blockDim.x + threadIdx.x;
    numbers[place] = numbers[place] * numbers[place];
}
extern "C" int run(float *numbers, int blocks, int threads, int launches) {
    for (int launch = 0; launch < launches; launch++) square<<<blocks, threads>>>(numbers);
    return (int) cudaDeviceSynchronize();
}
"""


def append(out: Path, row: Row) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def counters(activity: Any) -> Row:
    return {name: getattr(activity, name) for name in ("gract", "smact", "smocc", "drama", "power_w")}


def sweep(options: argparse.Namespace) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "square.cu"), Path(folder, "square.so")
        source.write_text(KERNEL)
        subprocess.run(
            ["nvcc", "-O2", "-arch=native", "-shared", "-Xcompiler", "-fPIC", source, "-o", library], check=True
        )
        run = ctypes.CDLL(str(library)).run
    numbers = torch.ones(BLOCKS[-1] * THREADS[-1], device="cuda")
    place = ctypes.c_void_p(numbers.data_ptr())
    torch.cuda.synchronize()
    for blocks in BLOCKS:
        for threads in THREADS:
            run(place, blocks, threads, 500)
            launches = 0
            with activity_between() as activity:
                ends = time.monotonic() + options.seconds
                while time.monotonic() < ends:
                    if code := run(place, blocks, threads, 500):
                        raise SystemExit(f"the kernel failed with CUDA's error {code}")
                    launches += 500
            append(options.out, {"sweep": [blocks, threads], "launches": launches, **counters(activity)})


# Trainings with and without a tool


def train(options: argparse.Namespace) -> None:
    """One training in a process of its own; prints its figures as the last line."""
    import torch

    steps = light_steps(torch) if options.job == "light" else heavy_steps(torch)
    for _ in range(options.warm):
        next(steps)
    torch.cuda.synchronize()
    profiler = torch.profiler.profile() if options.trace else None
    if profiler:
        profiler.__enter__()
    with activity_between() as activity:
        began, own = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            next(steps)
        torch.cuda.synchronize()
        seconds, own = time.perf_counter() - began, time.process_time() - own
    if profiler:
        profiler.__exit__(None, None, None)
        profiler.export_chrome_trace(str(options.trace))
    after = time.perf_counter() - began - seconds
    print(json.dumps({"seconds": seconds, "cores": own / seconds, "after_s": after, **counters(activity)}), flush=True)


def light_steps(torch: Any) -> Iterator[None]:
    """The example of PyTorch for MNIST: a small CNN, 64 pictures a step from a loader with one process."""
    from torch import nn
    from torch.nn import functional
    from torchvision import transforms

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

        def forward(self, x: Any) -> Any:
            x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
            x = torch.flatten(self.dropout1(functional.max_pool2d(x, 2)), 1)
            return functional.log_softmax(self.fc2(self.dropout2(functional.relu(self.fc1(x)))), dim=1)

    class Digits(torch.utils.data.Dataset):  # type: ignore[misc]
        """60,000 random pictures of MNIST's size, treated as torchvision's MNIST treats its own."""

        def __init__(self) -> None:
            self.pictures = torch.randint(0, 256, (60_000, 28, 28), dtype=torch.uint8)
            self.transform = transforms.Compose(
                [transforms.ToPILImage(), transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
            )

        def __len__(self) -> int:
            return len(self.pictures)

        def __getitem__(self, number: int) -> Any:
            return self.transform(self.pictures[number]), number % 10

    loader = torch.utils.data.DataLoader(Digits(), batch_size=64, num_workers=1, pin_memory=True, shuffle=True)
    model = Net().cuda()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    number = 0
    while True:
        for data, target in loader:
            data, target = data.cuda(), target.cuda()
            optimizer.zero_grad()
            loss = functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            number += 1
            if number % 10 == 0:
                loss.item()
            yield


def heavy_steps(torch: Any) -> Iterator[None]:
    """A ResNet-50 with 128 pictures of ImageNet's size that stay on the GPU."""
    import torchvision

    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures, labels = torch.randn(128, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (128,), device="cuda")
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
        yield


OWN_MONITOR = """
import json, sys, time
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.sampling import Monitor
with Monitor(NvmlSource(), interval=1.0, window=90.0) as monitor:
    device = NvmlSource().devices()[0].id
    while True:
        time.sleep(1.0)
        window = monitor.window(device)
        names = ("gract", "smact", "smocc", "drama", "power_w")
        print(json.dumps({name: window.mean(name) for name in names}), flush=True)
"""
QUERY = "name,pstate,timestamp,utilization.gpu,utilization.memory,memory.total,memory.used"
FIELDS = "1001,1002,1003,1005,155,156,1009,1010"  # DCGM's numbers of GRACT, SMACT, SMOCC, DRAMA, power, energy and PCIe


def nsys() -> str | None:
    beside_ncu = Path("/opt/nvidia").glob("nsight-*/*/host/target-linux-x64/nsys")
    return shutil.which("nsys") or next(map(str, beside_ncu), None)


def tools() -> dict[str, list[str] | None]:
    """Return the command of each monitor; `None` is a profiler around the training."""
    known = {
        "top": ["top", "-b", "-d", "1"],
        "nvidia-smi": ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv", "-l", "1"],
        "GPM (nvidia-smi dmon)": ["nvidia-smi", "dmon", "--gpm-metrics", "1,2,3,10,20,21", "-d", "1"],
        "DCGM": ["dcgmi", "dmon", "-e", FIELDS, "-d", "1000"],
        "Ullage's monitor": [sys.executable, "-c", OWN_MONITOR],
    }
    present: dict[str, list[str] | None] = {name: line for name, line in known.items() if shutil.which(line[0])}
    return present | ({"Nsight Systems": None} if nsys() else {}) | {"PyTorch's profiler": None}


@contextmanager
def watched(line: Sequence[str] | None, log: Path) -> Iterator[Row]:
    """Run a monitor meanwhile; add its processor time and memory."""
    figures: Row = {}
    if line is None:
        yield figures
        return
    with log.open("w") as file:
        process = psutil.Popen(list(line), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        began = time.monotonic()
        try:
            yield figures
            if process.poll() is not None:
                figures["failed"] = log.read_text()[-200:]
                return
            used = process.cpu_times()
            figures["tool_cores"] = (used.user + used.system) / (time.monotonic() - began)
            figures["tool_memory"] = process.memory_info().rss
        finally:
            process.kill()
            process.wait()


def one_run(job: str, tool: str, line: Sequence[str] | None, steps: int, folder: Path) -> Row:
    command = [
        sys.executable,
        str(HERE),
        "train",
        job,
        "--steps",
        str(steps),
        "--warm",
        "100" if job == "light" else "10",
    ]
    trace = folder / "trace"
    if tool == "PyTorch's profiler":
        command += ["--trace", str(trace)]
    if tool == "Nsight Systems":
        command = [str(nsys()), "profile", "--output", str(trace), "--force-overwrite", "true", *command]
    began = time.monotonic()
    with watched(line, trace) as figures:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        most = 0
        while process.poll() is None:
            with suppress(psutil.Error):  # a process has ended meanwhile
                most = max(most, sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))
            time.sleep(0.5)
    text = process.stdout.read() if process.stdout else ""
    size = sum(file.stat().st_size for file in folder.iterdir())
    result = next((line for line in text.splitlines() if line.startswith('{"seconds"')), None)
    row = {"job": job, "tool": tool, "steps": steps, "size": size, "memory": most, "whole_s": time.monotonic() - began}
    return row | figures | (json.loads(result) if result else {"failed": text[-300:]})


def compare_tools(options: argparse.Namespace) -> None:
    lines = {name: line for name, line in {"no tool": None, **tools()}.items() if name not in options.without}
    for job, steps, rounds in (("light", options.light, options.rounds), ("heavy", options.heavy, 1)):
        for number in range(rounds):
            for tool in list(lines) if number % 2 == 0 else reversed(lines):
                with tempfile.TemporaryDirectory() as folder:
                    append(options.out, one_run(job, tool, lines[tool], steps, Path(folder)))


# Tables

# Means of the authors' readings on an A100 (summary_files_mean.csv of their repository, PMDLT): GRACT, SMACT, SMOCC.
A100 = {
    (1, 1): (0.683, 0.002, 0.000),
    (1, 128): (0.660, 0.001, 0.000),
    (1, 1024): (0.674, 0.002, 0.001),
    (128, 1): (0.771, 0.177, 0.003),
    (128, 128): (0.776, 0.206, 0.014),
    (128, 1024): (0.826, 0.211, 0.113),
    (1024, 1): (0.797, 0.184, 0.015),
    (1024, 128): (0.867, 0.145, 0.047),
    (1024, 1024): (0.940, 0.524, 0.365),
    (8192, 1): (0.951, 0.190, 0.012),
    (8192, 128): (0.965, 0.254, 0.038),
    (8192, 1024): (0.994, 0.929, 0.687),
    (131072, 1): (0.995, 0.291, 0.014),
    (131072, 128): (0.995, 0.786, 0.390),
    (131072, 1024): (0.996, 0.991, 0.779),
}
# Table 3.2: seconds of an epoch of the small network and the size of its data; minutes of an epoch of the large one.
PUBLISHED = {
    "no tool": ("9.61 s", "37.06 min"),
    "top": ("9.66 s, ~20 KB", "37.11 min"),
    "nvidia-smi": ("9.61 s, ~20 KB", "37.04 min"),
    "DCGM": ("9.68 s, ~85 KB", "37.19 min"),
    "Nsight Systems": ("9.88 s, ~40 MB", "39.13 min"),
    "PyTorch's profiler": ("13.65 s, ~1.4 GB", "not run"),
}


def sweep_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if theirs := A100.get(tuple(row.get("sweep", ()))):
            own = [f"{row[name]:.1%}" for name in ("gract", "smact", "smocc")]
            lines.append([*map(str, row["sweep"]), *own, *(f"{value:.1%}" for value in theirs)])
    head = ["blocks", "threads", "GRACT", "SMACT", "SMOCC", "A100: GRACT", "A100: SMACT", "A100: SMOCC"]
    return collocation.table(head, lines)


def tools_table(rows: Sequence[Row], job: str) -> str:
    lines = []
    for tool in dict.fromkeys(row["tool"] for row in rows if row.get("job") == job):
        runs = [row for row in rows if row.get("job") == job and row["tool"] == tool]
        one = runs[0]
        lines.append(
            [
                tool,
                " and ".join(f"{1e3 * row['seconds'] / row['steps']:.2f}" for row in runs),
                f"{one['after_s']:.1f}",
                format_bytes(one["size"]) if one["size"] else "-",
                f"{one['tool_cores']:.1%}" if "tool_cores" in one else "-",
                format_bytes(one["memory"]),
                " / ".join(f"{one[name]:.1%}" for name in ("smact", "smocc", "drama")),
                PUBLISHED.get(tool, ("-", "-"))[job == "heavy"],
            ]
        )
    head = ["tool", "step, ms", "after, s", "data", "tool, of a core", "training's memory", "SMACT / SMOCC / DRAMA"]
    return collocation.table([*head, "published"], lines)


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    return {"sweep": sweep_table(rows), "light": tools_table(rows, "light"), "heavy": tools_table(rows, "heavy")}


def tables(options: argparse.Namespace) -> None:
    collocation.show(tables_of([json.loads(line) for line in options.file.open()]), PAGE, options.write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    add = partial(commands.add_parser, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    one = add("sweep")
    one.set_defaults(run=sweep)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--seconds", type=float, default=0.7)
    two = add("tools")
    two.set_defaults(run=compare_tools)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--light", type=int, default=600, help="steps of the small network")
    two.add_argument("--heavy", type=int, default=60, help="steps of the large network")
    two.add_argument("--rounds", type=int, default=2, help="runs of the small network with each tool")
    two.add_argument("--without", action="append", default=[], help="a tool to leave out")
    four = add("tables")
    four.set_defaults(run=tables)
    four.add_argument("file", type=Path, nargs="?", default=DATA)
    four.add_argument("--write", action="store_true")
    three = add("train")
    three.set_defaults(run=train)
    three.add_argument("job", choices=("light", "heavy"))
    three.add_argument("--steps", type=int, required=True)
    three.add_argument("--warm", type=int, default=10)
    three.add_argument("--trace", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
