"""How fast placement and the simulator are.

    python benchmarks/speed/simulator.py decisions [--jobs 10000] [--gpus 64]
    python benchmarks/speed/simulator.py trace                   # 100,000 jobs on 2,500 GPUs; goal: under 60 s
    python benchmarks/speed/simulator.py trace --jobs 1000000 --gpus 10000      # goals: under 15 minutes and 4 GiB
    python benchmarks/speed/simulator.py trace --grow            # 6,250 to 100,000 jobs on 500 GPUs: the exponent

`decisions` takes one decision about 10,000 waiting jobs over 64 GPUs, for every policy. Three clusters: an empty one,
one full of running jobs with a little room left on each GPU, and an empty one where the activity is not looked at, so
that as many jobs are placed as fit into memory. Every job has a need of its own, some ask for several GPUs, some to be
alone, some have time limits; they have waited for up to an hour, so that some reserve slots. Reading why a job waits
is not part of it, and is measured at the end. Seven rounds are made and the median is printed, of the processor's time
and of the clock's.

`trace` simulates a trace of the size of Microsoft Philly's, or of a million jobs. Jobs are drawn by
`ullage.manager.simulation.generator`: known workloads, users, a daily pattern, heavy-tailed work, 1 to 8 GPUs a job.
They need `--load` of the cluster if each has its GPUs to itself. One core is used. On a busy machine, trust the
processor time more than the wall time.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import statistics
import time

from ullage.manager.placement import Activity, Job, Ledger, PassOutcome, Rules, Running, Slot, decide, policies
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.scenario import Scenario
from ullage.units import GIB, MIB

ROUNDS = 7
NOW = 10_000.0
GOAL = 0.050
GPU_COUNTS = {1: 0.80, 2: 0.08, 4: 0.07, 8: 0.05}


def queue(count: int, draw: random.Random) -> list[Job]:
    """Jobs of eight users, each with a need of its own."""
    jobs = []
    for number in range(count):
        promise = draw.randint(1 * GIB // MIB, 60 * GIB // MIB) * MIB + number
        jobs.append(
            Job(
                number,
                user=f"user{draw.randrange(8)}",
                submitted=NOW - draw.uniform(0, 3600),
                gpus=draw.choice((1, 1, 1, 1, 1, 1, 2, 4)),
                promise=promise if draw.random() < 0.9 else None,
                true=promise,
                exclusive=draw.random() < 0.02,
                priority=draw.choice((0, 0, 0, 1)),
                time_limit=draw.choice((None, 600.0, 7200.0)),
                busy=draw.choice((None, 0.2, 0.6)),
            )
        )
    return jobs


def cluster(count: int, full: bool, draw: random.Random) -> tuple[list[Slot], Ledger, list[Running]]:
    """GPUs of 80 GiB, idle, or each with three jobs and up to 20 GiB left."""
    slots = [
        Slot(f"GPU-{index}", index, "A100-80GB", 80 * GIB, 63 * GIB if full else 0, Activity(smact=0.5, age=1.0))
        for index in range(count)
    ]
    ledger, running = Ledger(), []
    for slot in slots if full else []:
        for number in range(3):
            job = Job(1_000_000 + slot.index * 10 + number, "user0", 0.0, promise=draw.randint(20, 25) * GIB)
            ledger.adopt(job.id, {slot.id: job.promise or 0})
            ledger.observe(job.id, slot.id, 20 * GIB)
            running.append(Running(job, (slot.id,), 1000.0))
    return slots, ledger, running


def decisions(jobs_count: int, gpus: int) -> None:
    print(f"{jobs_count:,} waiting jobs over {gpus} GPUs; goal: under {GOAL * 1e3:.0f} ms a decision\n")
    print("| policy | cluster | placed | processor ms | clock ms |")
    print("| --- | --- | --- | --- | --- |")
    worst, outcome = 0.0, PassOutcome((), ())
    for name in policies():
        for title, full, rules in (
            ("empty", False, Rules(unknown="floor")),
            ("full", True, Rules(unknown="floor")),
            ("empty, activity not looked at", False, Rules(unknown="floor", smact_limit=None)),
        ):
            draw = random.Random(0)
            jobs = queue(jobs_count, draw)
            slots, ledger, running = cluster(gpus, full, draw)
            spent, clock = [], []
            for _ in range(ROUNDS):
                start, start_clock = time.process_time(), time.perf_counter()
                outcome = decide(name, jobs, running, slots, ledger, rules, NOW)
                spent.append(time.process_time() - start)
                clock.append(time.perf_counter() - start_clock)
            median, median_clock = statistics.median(spent), statistics.median(clock)
            worst = max(worst, median)
            print(f"| {name} | {title} | {len(outcome.placed)} | {median * 1e3:.1f} | {median_clock * 1e3:.1f} |")
    print(f"\nslowest median: {worst * 1e3:.1f} ms of processor time ({'within' if worst < GOAL else 'over'} the goal)")
    start = time.process_time()
    texts = [each.reason for each in outcome.waiting[:200]]
    print(f"reading a reason: {(time.process_time() - start) / len(texts) * 1e6:.0f} µs, such as: {texts[0]}")


def measure(jobs: int, gpus: int, options: argparse.Namespace) -> float:
    """Simulate once, print a line, and give the seconds of the processor."""
    trace = generate_trace(
        jobs, seed=options.seed, gpus=gpus, load=options.load, daily=0.5, users=200, gpu_counts=GPU_COUNTS
    )
    scenario = Scenario(
        gpus=f"{gpus}xA100-40GB", policy=options.policy, estimator=options.estimator, min_speed=options.min_speed
    )
    clock, processor = time.perf_counter(), time.process_time()
    result = simulate(trace, scenario)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = result.figures
    print(
        f"{jobs:,} jobs on {gpus:,} GPUs, load {options.load:g}, {options.policy}: {processor:.1f} s of the processor "
        f"({clock:.1f} s by the clock), {1e6 * processor / jobs:.0f} µs a job, {memory:.2f} GiB; "
        f"{figures.done:,} done, {result.passes:,} passes, mean wait {figures.waiting_s or 0:.0f} s, "
        f"{figures.ooms} out of memory",
        flush=True,
    )
    return processor


def grow(options: argparse.Namespace) -> None:
    """Print how the cost grows with the number of jobs."""
    counts = [6_250, 12_500, 25_000, 50_000, 100_000]
    times = [measure(count, 500, options) for count in counts]
    x, y = [math.log(count) for count in counts], [math.log(seconds) for seconds in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    reference = [math.log(count * math.log(count)) for count in counts]
    steepest = (reference[-1] - reference[0]) / (x[-1] - x[0])
    print(f"the cost grows with the number of jobs to the power of {slope:.2f} (n log n: {steepest:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("decisions", help="one decision of every policy")
    part.add_argument("--jobs", type=int, default=10_000)
    part.add_argument("--gpus", type=int, default=64)
    part = parts.add_parser("trace", help="a large trace")
    part.add_argument("--jobs", type=int, default=100_000)
    part.add_argument("--gpus", type=int, default=2_500)
    part.add_argument("--load", type=float, default=0.8, help="of the cluster, if every job had its GPUs to itself")
    part.add_argument("--policy", default="ullage")
    part.add_argument("--estimator", default="ullage")
    part.add_argument("--min-speed", type=float)
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("--grow", action="store_true", help="how the cost grows with the number of jobs")
    options = parser.parse_args()
    if options.what == "decisions":
        decisions(options.jobs, options.gpus)
    elif options.grow:
        grow(options)
    else:
        measure(options.jobs, options.gpus, options)


if __name__ == "__main__":
    main()
