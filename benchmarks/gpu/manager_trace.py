"""Traces of real training jobs through the manager, under several policies: makespan, waiting, energy, crashes.

    python benchmarks/gpu/manager_trace.py --trace small-heavy --runs magm,magm/monitoring.window=10s,ullage
    python benchmarks/gpu/manager_trace.py --trace overbooked --runs magm       # recovery has to help
    python benchmarks/gpu/manager_trace.py --list                               # the traces
    python benchmarks/gpu/manager_trace.py --print benchmarks/data/h200_trace.jsonl  # figures of earlier runs
    python benchmarks/gpu/manager_trace.py --trace small-light --jobs 4 --steps 0.02 --virtual 1xA100-40GB

Jobs are of the kinds that RAD-RM was evaluated on (image classifiers on CIFAR and ImageNet sizes, language models),
shortened to seconds. They load data, validate and save as real ones do (`trace_job.py`), and arrive at random
moments, the same for every run. `POLICY/monitoring.window=10s` changes a setting, and `POLICY+mps` shares by MPS.
Each run has a daemon of its own. Energy is the GPU's own counter over the makespan.

A record has each job with its attempts, in seconds after the first arrival: when it came, might start, was placed,
began and ended, its promise and what it used, and the times that the job itself printed. `works` is what was predicted
of the jobs on a GPU, and `estimates` the bound of each kind.
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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ullage.errors import NoDaemon, UllageError
from ullage.manager.client import Client

HERE = Path(__file__).resolve().parent
JOB = HERE / "trace_job.py"
STATE = "manager/state.db"  # in a home
CIFAR = ("--side", "32")


@dataclass(frozen=True)
class Kind:
    """A kind of job; `steps` take about ten seconds on an H200 alone."""

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
    Kind("mobilenet", "torchvision:mobilenet_v2", 64, 200, ("--wait", "0.02"), 3),
    Kind("efficientnet", "torchvision:efficientnet_b0", 64, 150, (), 2),
    Kind("inception", "torchvision:inception_v3", 32, 120, (), 1),
    Kind("vgg16", "torchvision:vgg16", 64, 70, (), 1),
    Kind("densenet", "torchvision:densenet121", 32, 110, (), 1),
    Kind("xception", "timm:legacy_xception", 32, 80, ("--wait", "0.05"), 1),
    Kind("bert_base", "hf:BertForMaskedLM", 16, 60, (), 2),
    Kind("gpt2", "hf:GPT2LMHeadModel", 8, 60, ("--length", "512", "--amp"), 2),
    Kind("bert_large_batch", "hf:BertForMaskedLM", 64, 25, (), 1),
)
LARGE = (  # 19 to 35 GiB each: a few at once fill the card
    Kind("resnet50_256", "torchvision:resnet50", 256, 60),
    Kind("vgg16_256", "torchvision:vgg16", 256, 35),
    Kind("densenet_128", "torchvision:densenet121", 128, 60),
    Kind("mobilenet_256", "torchvision:mobilenet_v2", 256, 90),
    Kind("efficientnet_256", "torchvision:efficientnet_b0", 256, 60),
    Kind("bert_128", "hf:BertForMaskedLM", 128, 18),
    Kind("gpt2_32", "hf:GPT2LMHeadModel", 32, 30, ("--length", "512")),
)


@dataclass(frozen=True)
class Trace:
    """Jobs of some kinds, `gap` seconds apart on average, with a share of each kind's `steps`. `estimated`: their
    estimates were made before. `overbooks`: no estimator and no conditions."""

    kinds: tuple[Kind, ...]
    jobs: int
    gap: float
    steps: float
    seed: int
    estimated: bool = False
    overbooks: bool = False


TRACES = {
    "trial": Trace(KINDS, 12, 1.0, 0.7, 11, estimated=True),  # the one on which variants of a policy are compared
    "small-heavy": Trace(KINDS, 12, 0.5, 0.5, 21),
    "small-light": Trace(KINDS, 8, 5.0, 0.5, 22),
    "small-known": Trace(KINDS, 14, 1.0, 0.5, 23, estimated=True),
    "long-heavy": Trace(KINDS, 7, 1.0, 2.0, 24),
    "long-known": Trace(KINDS, 7, 4.0, 2.0, 25, estimated=True),
    "large-heavy": Trace(LARGE, 8, 1.0, 0.7, 26),
    "large-known": Trace(LARGE, 8, 2.0, 0.7, 27, estimated=True),
    "overbooked": Trace(LARGE, 10, 0.4, 0.4, 28, overbooks=True),
}
ESTIMATING = {"at_once": "8", "per_user": "8", "timeout": '"2m"'}
OVERBOOKING = {"smact_limit": '"off"', "unknown": '"floor"', "free_floor": '"1GiB"'}


def warm_up(client: Client, patience: float) -> None:
    """Make one estimate without running a job, as in a daemon that has been in use."""
    [number] = client.submit(words(KINDS[0], 0.01), hold=True)
    client.wait_for_estimate(number, timeout=patience)
    client.cancel(number)


def arrivals(trace: Trace) -> list[tuple[float, Kind]]:
    """Arrival times in seconds and kinds; the same for the same seed."""
    draw = random.Random(trace.seed)
    bag = [kind for kind in trace.kinds for _ in range(kind.weight)]
    moment, jobs = 0.0, []
    for _ in range(trace.jobs):
        jobs.append((moment, draw.choice(bag)))
        moment += draw.expovariate(1 / trace.gap)
    return jobs


def joules() -> float | None:
    """Return what the GPU has drawn since its driver was loaded; `None` without a GPU that tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1000
    except Exception:  # no package, no driver, no GPU
        return None


def settings(run: str, trace: Trace, virtual: str | None) -> str:
    """Return the settings of a run: `POLICY/placing.gain=0.1` changes one."""
    tables = {"monitoring": {}, "placing": {}, "estimating": dict(ESTIMATING)}
    if trace.overbooks:
        tables["placing"] |= OVERBOOKING
    elif virtual:
        tables["placing"]["smact_limit"] = '"off"'
    for change in run.partition("+")[0].split("/")[1:]:
        place, _, value = change.partition("=")
        table, _, name = place.partition(".")
        tables[table][name] = value if value.replace(".", "").isdigit() else f'"{value}"'
    return "\n".join(
        line for table, values in tables.items() for line in (f"[{table}]", *(f"{k} = {v}" for k, v in values.items()))
    )


def serve(home: Path, run: str, trace: Trace, virtual: str | None) -> subprocess.Popen[bytes]:
    """Start a daemon with the run's policy and way of sharing, and wait until it answers."""
    place, _, sharing = run.partition("+")
    policy = place.partition("/")[0]
    site = home / "site.toml"
    site.write_text(settings(run, trace, virtual))
    command = [sys.executable, "-m", "ullage", "serve", "--policy", policy, "--settings", str(site)]
    command += ["--sharing", "mps"] if sharing == "mps" else []
    command += ["--virtual", virtual] if virtual else []
    command += ["--estimator", "none"] if trace.overbooks or policy == "exclusive" else []
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
    steps = max(2, round(kind.steps * share / 2))  # in each of two epochs
    more = ["--steps", str(steps), "--validate", str(steps // 5), "--save", *kind.more]
    return [sys.executable, str(JOB), kind.model, "--batch-size", str(kind.batch), *more]


def play(client: Client, jobs: list[tuple[float, Kind]], share: float, exclusive: bool) -> list[int]:
    begin, numbers = time.monotonic(), []
    for moment, kind in jobs:
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        numbers += client.submit(words(kind, share), name=kind.name, exclusive=exclusive)
    return numbers


def tell(job: dict[str, Any], client: Client) -> None:
    """Print why a job failed."""
    causes = [f"{attempt['cause']} ({attempt.get('detail')})" for attempt in job["attempts"]]
    print(f"  job {job['id']} {job['name']}: {job['state']}: {'; '.join(causes)}", file=sys.stderr)
    print(client.logs(job["id"], "stderr")[-1000:], file=sys.stderr)


def estimate(trace: Trace, options: argparse.Namespace, home: Path) -> dict[str, float]:
    """Estimate the jobs of a trace without running them; return the time of each. The home keeps the answers."""
    daemon = serve(home, "ullage", trace, options.virtual)
    began, seconds = time.monotonic(), {}
    try:
        with Client(home) as client:
            kinds = dict.fromkeys(kind for _, kind in arrivals(trace))
            numbers = {kind: client.submit(words(kind, trace.steps), name=kind.name, hold=True)[0] for kind in kinds}
            for kind, number in numbers.items():
                client.wait_for_estimate(number, timeout=options.patience)
                seconds[kind.name] = time.monotonic() - began
            client.cancel(*numbers.values())
    finally:
        daemon.terminate()
        daemon.wait(60)
    return seconds


def detail(jobs_done: list[dict[str, Any]], client: Client, begin: float) -> list[dict[str, Any]]:
    """Each job, its attempts and what it told itself; times are seconds after `begin`."""
    index = {each["id"]: each["index"] for each in client.call("gpus")}
    might = {event["job"]: event["time"] for event in client.events() if event["kind"] == "queued"}
    names = ("placed", "started", "ended")
    told_names = ("began", "imported", "first_step", "last_step")
    stretches = ("evaluated", "saved")
    jobs = []
    for job in jobs_done:
        attempts = [
            {name: None if each[name] is None else each[name] - begin for name in names}
            | {name: each[name] for name in ("elapsed", "promise", "used", "cause", "exclusive", "energy")}
            | {"gpus": [index[slot] for slot in each["slots"]]}
            for each in job["attempts"]
        ]
        row: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            row = json.loads(client.logs(job["id"]).splitlines()[-1])
            row |= {name: row[name] - begin for name in told_names if name in row}
            row |= {name: [[each - begin for each in pair] for pair in row[name]] for name in stretches}
        jobs.append(
            {
                "name": job["name"],
                "state": job["state"],
                "submitted": job["submitted"] - begin,
                "queued": might[job["id"]] - begin if job["id"] in might else None,
                "waited": job["waited"],
                "ran": job["ran"],
                "attempts": attempts,
                "told": row,
            }
        )
    return jobs


def in_database(home: Path) -> dict[str, Any]:
    """What the database of a daemon that has ended has: the work of each name of a job, and each bound."""
    with contextlib.closing(sqlite3.connect(f"file:{home / STATE}?mode=ro", uri=True)) as database:
        works = {
            name: {"predicted": json.loads(predicted)}
            for name, predicted in database.execute(
                "SELECT j.name, w.predicted FROM jobs j JOIN works w ON w.id = j.work GROUP BY j.name"
            )
        }
        estimates = [
            {"name": name, "upper": upper}
            for name, upper in database.execute(
                "SELECT name, promise FROM jobs WHERE estimate_note LIKE 'estimated%' GROUP BY name"
            )
        ]
    return {"works": works, "estimates": estimates}


def one_run(name: str, trace: Trace, run: str, options: argparse.Namespace, estimated: Path | None) -> dict[str, Any]:
    """Play the trace and return its record. `estimated` is a home that has the estimates from the start."""
    jobs = arrivals(trace)
    with tempfile.TemporaryDirectory(prefix="ullage-trace-") as folder:
        if estimated is not None:
            Path(folder, STATE).parent.mkdir()
            shutil.copy(estimated / STATE, Path(folder, STATE))
        daemon = serve(Path(folder), run, trace, options.virtual)
        try:
            with Client(folder) as client:
                if not trace.estimated:
                    warm_up(client, options.patience)
                before, begin, moment = joules(), time.monotonic(), time.time()
                numbers = play(client, jobs, trace.steps, exclusive=run.startswith("exclusive"))
                ended = [client.wait(number, timeout=options.patience) for number in numbers]
                makespan, after = time.monotonic() - begin, joules()
                for job in ended:
                    if job["state"] != "done":
                        tell(job, client)
                each = detail(ended, client, moment)
        finally:
            with contextlib.suppress(UllageError), Client(folder) as client:  # jobs outlive their daemon
                client.cancel(*[job["id"] for job in client.queue()])
            daemon.terminate()
            daemon.wait(60)
        known = in_database(Path(folder))
    causes = Counter(attempt["cause"] for job in ended for attempt in job["attempts"])
    return {
        "trace": name,
        "run": run,
        "jobs": len(jobs),
        "done": sum(job["state"] == "done" for job in ended),
        "makespan_s": makespan,
        "waited_s": statistics.mean(job["waited"] for job in ended),
        "ran_s": statistics.mean(job["ran"] for job in ended),
        "completion_s": statistics.mean(job["waited"] + job["ran"] for job in ended),
        "energy_kj": None if before is None or after is None else (after - before) / 1000,
        "out_of_memory": causes["out of GPU memory"],
        "attempts": sum(causes.values()),
        "causes": dict(causes),
        "seed": trace.seed,
        "mean_gap": trace.gap,
        "steps": trace.steps,
        "estimated": trace.estimated,
        "arrivals": [round(moment, 3) for moment, _ in jobs],
        "each": each,
        **known,
    }


def line(run: dict[str, Any], first: dict[str, Any]) -> str:
    """Return the figures of a run next to those of the first one."""
    less = f"{1 - run['makespan_s'] / first['makespan_s']:.0%} less"
    energy = "energy unknown"
    if run["energy_kj"] and first["energy_kj"]:
        energy = f"{run['energy_kj']:.1f} kJ ({1 - run['energy_kj'] / first['energy_kj']:.0%} less)"
    return (
        f"{run['run']}: {run['done']} of {run['jobs']} done in {run['makespan_s']:.1f} s ({less}), waited "
        f"{run['waited_s']:.1f} s, ran {run['ran_s']:.1f} s, in all {run['completion_s']:.1f} s, {energy}, "
        f"{run['out_of_memory']} out of memory, {run['attempts']} attempts"
    )


def print_runs(paths: list[Path]) -> None:
    """The figures of kept runs by trace, and on average those of `ullage` against each other policy."""
    records = [json.loads(text) for path in paths for text in path.read_text().splitlines()]
    same: dict[tuple[str | None, int | None], list[dict[str, Any]]] = {}
    for record in records:
        named = "trace" in record
        same.setdefault((record["trace"], record["seed"]) if named else (None, None), []).append(record)
    for (trace, seed), runs in same.items():
        if trace is not None:
            print(f"{trace}, seed {seed}:")
        for run in runs:
            print(line(run, runs[0]))
        if trace is not None:
            print_speeds(runs)
    if None not in {trace for trace, _ in same}:
        print_compared(list(same.values()))


def print_speeds(runs: list[dict[str, Any]]) -> None:
    """The speeds that jobs kept in runs with a `min_speed`, where an `exclusive` run tells their speeds alone."""
    from simulated_reality import job_phases

    steps = {run["run"]: [each.step for each in job_phases(run["each"])] for run in runs}
    for name in steps if "exclusive" in steps else ():
        if "min_speed" in name:
            shares = sorted(alone / beside for alone, beside in zip(steps["exclusive"], steps[name], strict=True))
            print(f"{name}: of their speed alone, jobs kept {', '.join(f'{share:.0%}' for share in shares)}")


def print_compared(traces: list[list[dict[str, Any]]]) -> None:
    """Print how much shorter `ullage` is than policies with the same way of sharing. Repeated runs count once."""
    less: dict[str, list[tuple[float, float]]] = {}
    for runs in traces:
        means = {
            name: tuple(
                statistics.mean(run[key] for run in runs if run["run"] == name)
                for key in ("makespan_s", "completion_s")
            )
            for name in dict.fromkeys(run["run"] for run in runs)
        }
        for name, figures in means.items():
            policy, plus, sharing = name.partition("+")
            ours = means.get(f"ullage{plus}{sharing}")
            if ours is not None and not policy.startswith("ullage"):
                less.setdefault(policy, []).append((1 - ours[0] / figures[0], 1 - ours[1] / figures[1]))
    for policy, pairs in less.items():
        makespans, completions = zip(*pairs, strict=True)
        print(
            f"ullage against {policy}, {len(pairs)} traces: makespan {statistics.mean(makespans):.1%} less (worst "
            f"{min(makespans):.1%}), completion {statistics.mean(completions):.1%} less (worst {min(completions):.1%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="small-heavy", help="names of traces, separated by commas")
    parser.add_argument("--runs", default="exclusive,magm,magm/monitoring.window=10s,ullage")
    parser.add_argument("--list", action="store_true", help="print the traces")
    parser.add_argument("--jobs", type=int, help="another number of jobs than the trace has")
    parser.add_argument("--steps", type=float, help="another share of each kind's steps")
    parser.add_argument("--seed", type=int, help="another seed")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds that a job may take in all")
    parser.add_argument("--virtual", help="virtual GPUs instead of real ones, such as 1xA100-40GB")
    parser.add_argument("--out", type=Path, help="append the figures as JSON lines")
    parser.add_argument("--print", type=Path, nargs="+", help="print the figures of such files")
    options = parser.parse_args()
    if options.list:
        for name, trace in TRACES.items():
            print(f"{name}: {', '.join(f'{each.name} {getattr(trace, each.name)}' for each in fields(trace)[1:])}")
        return
    if missing := [path for path in options.print or () if not path.is_file()]:
        parser.error(f"--print must name files that --out wrote, but {missing[0]} does not exist")
    if options.print:
        print_runs(options.print)
        return
    names = options.trace.split(",")
    if unknown := [name for name in names if name not in TRACES]:
        parser.error(f"--trace must name one of {', '.join(TRACES)}, got {unknown[0]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    changes = {name: getattr(options, name) for name in ("jobs", "steps", "seed")}
    changes = {name: value for name, value in changes.items() if value is not None}
    for name in names:
        play_trace(name, replace(TRACES[name], **changes), options)


def play_trace(name: str, trace: Trace, options: argparse.Namespace) -> None:
    first: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="ullage-estimates-") as folder:
        print(f"{name}, seed {trace.seed}:", flush=True)
        if trace.estimated:
            print(f"estimates: {estimate(trace, options, Path(folder))}", flush=True)
        for run in options.runs.split(","):
            record = one_run(name, trace, run, options, Path(folder) if trace.estimated else None)
            first = first or record
            print(line(record, first), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
