"""How long one decision takes: 10,000 waiting jobs over 64 GPUs, for every policy.

    python benchmarks/speed/placement_speed.py [jobs] [gpus]

Three clusters: an empty one, one full of running jobs with a little room left on each GPU, and an empty one where the
activity is not looked at, so that as many jobs are placed as fit into memory. Every job has a need of its own, some
ask for several GPUs, some to be alone, some have time limits; they have waited for up to an hour, so that some reserve
slots. Reading why a job waits is not part of it, and is measured at the end. Seven rounds are made and the median is
printed, of the processor's time and of the clock's: on a machine that does other things too the first says more.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from ullage.placement import Activity, Job, Ledger, PassOutcome, Rules, Running, Slot, decide, policies  # noqa: E402
from ullage.units import GIB, MIB  # noqa: E402

ROUNDS = 7
NOW = 10_000.0
GOAL = 0.050


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


def main() -> None:
    """Measure and print a table."""
    jobs_count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    gpus = int(sys.argv[2]) if len(sys.argv) > 2 else 64
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


if __name__ == "__main__":
    main()
