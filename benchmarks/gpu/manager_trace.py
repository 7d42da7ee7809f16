"""A trace of real training jobs through the manager, under several policies: makespan, waiting, energy, crashes.

    python benchmarks/gpu/manager_trace.py [--runs exclusive,magm,ullage,magm+mps,ullage+mps] [--jobs 44] [--mean-gap 2]
    python benchmarks/gpu/manager_trace.py --overbook --runs magm    # large jobs, no estimator, no conditions: recovery
    python benchmarks/gpu/manager_trace.py --estimates-first --kinds resnet50,gpt2  # begins with all estimates
    python benchmarks/gpu/manager_trace.py --kept benchmarks/data/h200_trace.jsonl  # what earlier runs gave
    python benchmarks/gpu/manager_trace.py --virtual 1xA100-40GB --steps 0.02 --jobs 6 --runs exclusive,ullage

Jobs are of the kinds that RAD-RM was evaluated on (image classifiers on CIFAR and ImageNet sizes, language models, a
segmentation network), shortened to seconds; they arrive at random moments, the same for every run. A daemon of its own
is started for each run. Energy is the GPU's own counter over the makespan.

A record has each job with its attempts, in seconds after the first arrival: when it came, might start, was placed,
began and ended, its promise and what it used, and what the job itself told of its steps. `works` is what was predicted
of the jobs on a GPU, and `estimates` how long each estimate took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import NoDaemon, UllageError
from ullage.manager.client import Client

HERE = Path(__file__).resolve().parent
JOB = HERE / "trace_job.py"
STATE = "manager/state.db"  # in a home
CIFAR = ("--input-shape", "3,32,32")


@dataclass(frozen=True)
class Kind:
    """A kind of job; `steps` is what takes about ten seconds on an H200 alone."""

    name: str
    model: str
    batch: int
    steps: int
    more: tuple[str, ...] = ()
    weight: int = 1


KINDS = (
    Kind("resnet18_cifar", "torchvision:resnet18", 128, 900, CIFAR, 4),
    Kind("resnet34_cifar", "torchvision:resnet34", 128, 600, CIFAR, 3),
    Kind("mobilenet_cifar", "torchvision:mobilenet_v2", 128, 500, CIFAR, 3),
    Kind("efficientnet_cifar", "torchvision:efficientnet_b0", 128, 350, CIFAR, 3),
    Kind("resnet50", "torchvision:resnet50", 64, 110, (), 3),
    Kind("mobilenet", "torchvision:mobilenet_v2", 64, 200, (), 3),
    Kind("efficientnet", "torchvision:efficientnet_b0", 64, 150, (), 2),
    Kind("inception", "torchvision:inception_v3", 32, 120, (), 1),
    Kind("vgg16", "torchvision:vgg16", 64, 70, (), 1),
    Kind("densenet", "torchvision:densenet121", 32, 110, (), 1),
    Kind("xception", "timm:legacy_xception", 32, 80, (), 1),
    Kind("bert_base", "hf:BertForMaskedLM", 16, 60, ("--sequence-length", "256"), 2),
    Kind("gpt2", "hf:GPT2LMHeadModel", 8, 60, ("--sequence-length", "512", "--precision", "amp_bf16"), 2),
    Kind("bert_large_batch", "hf:BertForMaskedLM", 64, 25, ("--sequence-length", "256"), 1),
)
LARGE = (  # 19 to 35 GiB each: a few at once fill the card
    Kind("resnet50_256", "torchvision:resnet50", 256, 60),
    Kind("vgg16_256", "torchvision:vgg16", 256, 35),
    Kind("densenet_128", "torchvision:densenet121", 128, 60),
    Kind("mobilenet_256", "torchvision:mobilenet_v2", 256, 90),
    Kind("efficientnet_256", "torchvision:efficientnet_b0", 256, 60),
    Kind("bert_128", "hf:BertForMaskedLM", 128, 18, ("--sequence-length", "256")),
    Kind("gpt2_32", "hf:GPT2LMHeadModel", 32, 30, ("--sequence-length", "512")),
)
SETTINGS = """
[monitoring]
window = "10s"  # jobs are seconds long here, not hours

[placing]
fresh_busy = 0.2
smact_limit = {limit}
unknown = "{unknown}"
{floor}

[estimating]
at_once = 8
per_user = 8
timeout = "2m"
"""


def trace(kinds: Sequence[Kind], count: int, gap: float, seed: int) -> list[tuple[float, Kind]]:
    """Arrival times in seconds and kinds; the same for the same seed."""
    draw = random.Random(seed)
    bag = [kind for kind in kinds for _ in range(kind.weight)]
    moment, found = 0.0, []
    for _ in range(count):
        found.append((moment, draw.choice(bag)))
        moment += draw.expovariate(1 / gap)
    return found


class Energy:
    """The GPU's counter of joules; `None` where there is none."""

    def __init__(self) -> None:
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no package, no driver, no GPU
            return

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        return None if self._handle is None else self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000


def serve(home: Path, run: str, virtual: str | None, overbook: bool) -> subprocess.Popen[bytes]:
    """A daemon that answers, with the run's policy and way of sharing."""
    policy, _, sharing = run.partition("+")
    settings = home / "site.toml"
    settings.write_text(
        SETTINGS.format(
            limit='"off"' if overbook or virtual else 0.8,
            unknown="floor" if overbook else "exclusive",
            floor='free_floor = "1GiB"' if overbook else "",
        )
    )
    command = [sys.executable, "-m", "ullage", "serve", "--policy", policy, "--settings", str(settings)]
    command += ["--sharing", "mps"] if sharing == "mps" else []
    command += ["--virtual", virtual] if virtual else []
    command += ["--estimator", "none"] if overbook or policy == "exclusive" else []
    log = (home / "daemon.log").open("wb")
    daemon = subprocess.Popen(command, env={**os.environ, "ULLAGE_HOME": str(home)}, stderr=log, stdout=log)
    while True:
        try:
            with Client(home) as client:
                client.queue()
            return daemon
        except NoDaemon:
            if daemon.poll() is not None:
                raise SystemExit(f"the daemon did not start: {(home / 'daemon.log').read_text()[-500:]}") from None
            time.sleep(0.05)


def words(kind: Kind, share: float) -> list[str]:
    steps = max(1, round(kind.steps * share))
    return [sys.executable, str(JOB), kind.model, "--batch-size", str(kind.batch), "--steps", str(steps), *kind.more]


def play(client: Client, jobs: list[tuple[float, Kind]], share: float, exclusive: bool) -> list[int]:
    begin, numbers = time.monotonic(), []
    for moment, kind in jobs:
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        numbers += client.submit(words(kind, share), name=kind.name, exclusive=exclusive)
    return numbers


def tell(job: dict[str, Any], client: Client) -> None:
    """Why a job did not end well."""
    causes = [f"{attempt['cause']} ({attempt.get('detail')})" for attempt in job["attempts"]]
    print(f"  job {job['id']} {job['name']}: {job['state']}: {'; '.join(causes)}", file=sys.stderr)
    print(client.logs(job["id"], "stderr")[-1000:], file=sys.stderr)


def estimate(kinds: Sequence[Kind], options: argparse.Namespace, home: Path) -> dict[str, float]:
    """Have jobs of these kinds estimated and nothing run; how long each took. The home's database keeps the answers."""
    daemon = serve(home, "ullage", options.virtual, overbook=False)
    began, seconds = time.monotonic(), {}
    try:
        with Client(home) as client:
            numbers = [client.submit(words(kind, options.steps), name=kind.name, hold=True)[0] for kind in kinds]
            for kind, number in zip(kinds, numbers, strict=True):
                client.wait_for_estimate(number, timeout=options.patience)
                seconds[kind.name] = time.monotonic() - began
            client.cancel(*numbers)
    finally:
        daemon.terminate()
        daemon.wait(60)
    return seconds


def detail(found: list[dict[str, Any]], client: Client, begin: float) -> list[dict[str, Any]]:
    """Each job, its attempts and what it told itself; times are seconds after `begin`."""
    index = {each["id"]: each["index"] for each in client.call("gpus")}
    might = {event["job"]: event["time"] for event in client.events() if event["kind"] == "queued"}
    names = ("placed", "started", "ended")
    told_names = ("began", "imported", "first_step", "last_step")
    jobs = []
    for job in found:
        attempts = [
            {name: None if each[name] is None else each[name] - begin for name in names}
            | {name: each[name] for name in ("elapsed", "promise", "used", "cause", "exclusive", "energy")}
            | {"gpus": [index[slot] for slot in each["slots"]]}
            for each in job["attempts"]
        ]
        told: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            told = json.loads(client.logs(job["id"]).splitlines()[-1])
            told |= {name: told[name] - begin for name in told_names if name in told}
        jobs.append(
            {
                "name": job["name"],
                "state": job["state"],
                "submitted": job["submitted"] - begin,
                "queued": might[job["id"]] - begin if job["id"] in might else None,
                "waited": job["waited"],
                "ran": job["ran"],
                "attempts": attempts,
                "told": told,
            }
        )
    return jobs


def in_database(home: Path) -> dict[str, Any]:
    """What the database of a daemon that has ended has: the work of each name of a job, and seconds for estimates."""
    with contextlib.closing(sqlite3.connect(f"file:{home / STATE}?mode=ro", uri=True)) as database:
        works = {
            name: {"predicted": json.loads(predicted)}
            for name, predicted in database.execute(
                "SELECT j.name, w.predicted FROM jobs j JOIN works w ON w.id = j.work GROUP BY j.name"
            )
        }
        estimates = [
            {"name": name, "upper": upper, "seconds": seconds}
            for name, upper, seconds in database.execute(
                "SELECT j.name, e.upper, e.seconds FROM estimates e JOIN jobs j ON j.estimate_key = e.key GROUP BY e.id"
            )
        ]
    return {"works": works, "estimates": estimates}


def one_run(
    run: str, options: argparse.Namespace, jobs: list[tuple[float, Kind]], estimated: Path | None
) -> dict[str, Any]:
    """Play the trace; what became of it. `estimated` is a home whose estimates are there from the start."""
    energy = Energy()
    with tempfile.TemporaryDirectory(prefix="ullage-trace-") as folder:
        if estimated is not None:
            Path(folder, STATE).parent.mkdir()
            shutil.copy(estimated / STATE, Path(folder, STATE))
        daemon = serve(Path(folder), run, options.virtual, options.overbook)
        try:
            with Client(folder) as client:
                before, begin, moment = energy.joules(), time.monotonic(), time.time()
                numbers = play(client, jobs, options.steps, exclusive=run.startswith("exclusive"))
                found = [client.wait(number, timeout=options.patience) for number in numbers]
                makespan, after = time.monotonic() - begin, energy.joules()
                for job in found:
                    if job["state"] != "done":
                        tell(job, client)
                each = detail(found, client, moment)
        finally:
            with contextlib.suppress(UllageError), Client(folder) as client:  # jobs outlive their daemon
                client.cancel(*[job["id"] for job in client.queue()])
            daemon.terminate()
            daemon.wait(60)
        known = in_database(Path(folder))
    causes = Counter(attempt["cause"] for job in found for attempt in job["attempts"])
    return {
        "run": run,
        "jobs": len(jobs),
        "done": sum(job["state"] == "done" for job in found),
        "makespan_s": makespan,
        "waited_s": statistics.mean(job["waited"] for job in found),
        "ran_s": statistics.mean(job["ran"] for job in found),
        "completion_s": statistics.mean(job["waited"] + job["ran"] for job in found),
        "energy_kj": None if before is None or after is None else (after - before) / 1000,
        "out_of_memory": causes["out of GPU memory"],
        "attempts": sum(causes.values()),
        "causes": dict(causes),
        "seed": options.seed,
        "mean_gap": options.mean_gap,
        "steps": options.steps,
        "arrivals": [round(moment, 3) for moment, _ in jobs],
        "each": each,
        **known,
    }


def line(found: dict[str, Any], first: dict[str, Any]) -> str:
    """The figures of a run beside those of the first one."""
    less = f"{1 - found['makespan_s'] / first['makespan_s']:.0%} less"
    energy = "energy unknown"
    if found["energy_kj"] and first["energy_kj"]:
        energy = f"{found['energy_kj']:.1f} kJ ({1 - found['energy_kj'] / first['energy_kj']:.0%} less)"
    return (
        f"{found['run']}: {found['done']} of {found['jobs']} done in {found['makespan_s']:.1f} s ({less}), waited "
        f"{found['waited_s']:.1f} s, ran {found['ran_s']:.1f} s, in all {found['completion_s']:.1f} s, {energy}, "
        f"{found['out_of_memory']} out of memory, {found['attempts']} attempts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="exclusive,magm,ullage,magm+mps,ullage+mps")
    parser.add_argument("--jobs", type=int, default=44)
    parser.add_argument("--kinds", help="only these kinds of jobs, by name")
    parser.add_argument("--estimates-first", action="store_true", help="make all estimates before the runs")
    parser.add_argument("--mean-gap", type=float, default=2.0, help="seconds between arrivals")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=float, default=1.0, help="share of each kind's steps")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds that a job may take in all")
    parser.add_argument("--virtual", help="virtual GPUs instead of real ones, such as 1xA100-40GB")
    parser.add_argument("--overbook", action="store_true", help="no estimator, no conditions: recovery has to help")
    parser.add_argument("--out", type=Path, help="append the figures as JSON lines")
    parser.add_argument("--kept", type=Path, help="print the figures of such a file")
    options = parser.parse_args()
    if options.kept is not None and not options.kept.is_file():
        parser.error(f"needed a file of figures that --out wrote; there is no {options.kept}")
    if options.kept is not None:
        kept = [json.loads(text) for text in options.kept.read_text().splitlines()]
        for found in kept:
            print(line(found, kept[0]))
        return
    wanted = options.kinds.split(",") if options.kinds else None
    kinds = [kind for kind in (LARGE if options.overbook else KINDS) if wanted is None or kind.name in wanted]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    jobs = trace(kinds, options.jobs, options.mean_gap, options.seed)
    first: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="ullage-estimates-") as folder:
        if options.estimates_first:
            print(f"estimates: {estimate(kinds, options, Path(folder))}", flush=True)
        for run in options.runs.split(","):
            found = one_run(run, options, jobs, Path(folder) if options.estimates_first else None)
            first = first or found
            print(line(found, first), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
