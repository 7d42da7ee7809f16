"""`generate_trace` draws artificial jobs by a seed, with the arrival pattern of a shared cluster."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Mix, drawn
from ullage.manager.simulation.trace import JobTrace, TraceJob

DAY_S = 86400.0
PEAK_S = 15 * 3600.0  # seconds after midnight, when a trace begins, of the highest rate
BURST_GAP_S = 10.0  # mean seconds between the jobs of a burst
_GRID_S = 600.0  # step of the computed daily pattern, in seconds
_LONGEST = 100.0  # largest factor on the usual work
TAILS = ("lognormal", "pareto")


def generate_trace(
    jobs: int,
    seed: int = 0,
    *,
    gpus: int = 4,
    load: float = 0.8,
    mix: Mix = "mixed",
    burst: float = 1.0,
    daily: float = 0.0,
    users: int = 10,
    zipf: float = 1.0,
    tail: str = "lognormal",
    spread: float = 1.0,
    gpu_counts: Mapping[int, float] | None = None,
) -> JobTrace:
    """Draw a trace of known workloads.

    Args:
        jobs: The number of jobs.
        seed: The same seed and arguments give the same trace.
        gpus: The size of the cluster that `load` refers to.
        load: The share of the cluster that the jobs would need if each had its GPUs to itself; above 1 the queue grows.
        mix: "mixed" (65% light, 27% medium, 8% large), "heavy" (83% medium, 17% large), or shares by sizes or by
            the names of known workloads.
        burst: Jobs that a user submits at once, on average, all of one workload, seconds apart; 1 is a Poisson process.
        daily: How much the rate of arrivals varies over a day: 0 not at all, 1 down to zero at night. It is highest at
            15:00; a trace begins at midnight.
        users: The number of users.
        zipf: The inequality of users: the k-th submits in proportion to 1 / k**zipf.
        tail: The distribution of a job's work relative to its workload's usual work: "lognormal" or "pareto" (mean 1).
        spread: For "lognormal", the standard deviation of the logarithm; with 0, all jobs work the usual time. For
            "pareto", the index, above 1. The factor is at most 100.
        gpu_counts: The shares of jobs that need 1, 2, ... GPUs. Default: the GPUs of their workloads.

    >>> trace = generate_trace(1000, seed=1, gpus=8, load=0.5)
    >>> need = sum(job.work_s * job.gpus for job in trace.jobs) / (8 * trace.jobs[-1].arrival)
    >>> len(trace.jobs), round(need, 1)
    (1000, 0.5)
    """
    _check(jobs, gpus=gpus, load=load, burst=burst, daily=daily, users=users, zipf=zipf, tail=tail, spread=spread)
    random = np.random.default_rng(seed)
    bursts = _burst_of_each(jobs, burst, random)
    count = int(bursts[-1]) + 1
    workloads, picks = drawn(mix, count, random)
    pick = picks[bursts]
    usual, needed = _usual(workloads, jobs, pick, random)
    if gpu_counts is not None:
        shares = np.array(list(gpu_counts.values()), dtype=float)
        needed = random.choice(np.array(list(gpu_counts), dtype=int), size=jobs, p=shares / shares.sum())
    work = usual * _factors(jobs, tail, spread, random)
    duration = float((work * needed).sum()) / (gpus * load)
    begins = _daily_times(np.sort(random.random(count)) * duration, duration, daily)
    arrivals = begins[bursts] + _within_bursts(bursts, random)
    weights = np.arange(1, users + 1, dtype=float) ** -zipf
    ranks = random.choice(users, size=count, p=weights / weights.sum())[bursts]
    order = np.argsort(arrivals, kind="stable")
    names = [f"user{number:0{len(str(users))}d}" for number in range(1, users + 1)]
    kinds = [known.kind for known in workloads]
    columns = (arrivals - arrivals.min(), pick, work, needed, ranks)
    made = [
        TraceJob(number, arrival, kinds[kind], work_s, wanted, names[user])
        for number, (arrival, kind, work_s, wanted, user) in enumerate(
            zip(*(column[order].tolist() for column in columns), strict=True), 1
        )
    ]
    words = f"{jobs} drawn jobs, seed {seed}: {100 * load:g}% of {gpus} GPUs"
    return JobTrace(words, made, [_tail_words(tail, spread)])


def _burst_of_each(jobs: int, burst: float, random: np.random.Generator) -> Any:
    """Return the index of each job's burst; burst sizes are geometric."""
    if burst == 1:
        return np.arange(jobs)
    sizes = random.geometric(1 / burst, size=jobs)
    return np.repeat(np.arange(jobs), sizes)[:jobs]


def _usual(workloads: Any, jobs: int, pick: Any, random: np.random.Generator) -> tuple[Any, Any]:
    epochs = [np.array(known.epochs, dtype=float) * known.epoch_s for known in workloads]
    chosen = random.random(jobs)
    work = np.empty(jobs)
    for number, choices in enumerate(epochs):
        here = pick == number
        work[here] = choices[(chosen[here] * len(choices)).astype(int)]
    return work, np.array([known.gpus for known in workloads])[pick]


def _factors(jobs: int, tail: str, spread: float, random: np.random.Generator) -> Any:
    if tail == "lognormal":
        factors = random.lognormal(-(spread**2) / 2, spread, size=jobs)
    else:
        factors = (random.pareto(spread, size=jobs) + 1) * (spread - 1) / spread
    return np.minimum(factors, _LONGEST)


def _daily_times(moments: Any, duration: float, daily: float) -> Any:
    """Move evenly drawn moments so that their rate swings over the day."""
    if daily == 0 or duration == 0:
        return moments
    grid = np.linspace(0.0, duration, max(2, math.ceil(duration / _GRID_S) + 1))
    rate = 1 + daily * np.cos(2 * np.pi * (grid - PEAK_S) / DAY_S)
    expected = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
    return np.interp(moments / duration * expected[-1], expected, grid)


def _within_bursts(bursts: Any, random: np.random.Generator) -> Any:
    gaps = random.exponential(BURST_GAP_S, size=len(bursts))
    first = np.concatenate([[True], bursts[1:] != bursts[:-1]])
    gaps[first] = 0.0
    passed = np.cumsum(gaps)
    return passed - passed[first][bursts]


def _tail_words(tail: str, spread: float) -> str:
    law = (
        f"log-normal, standard deviation {spread:g} of the logarithm" if tail == "lognormal" else f"Pareto, {spread:g}"
    )
    return f"the work is the measured time of the workload times a factor of mean 1 ({law})"


def _check(jobs: int, **given: Any) -> None:
    tail, spread = given["tail"], given["spread"]
    needs = {
        "jobs": (jobs, jobs >= 1, "1 or more"),
        "gpus": (given["gpus"], given["gpus"] >= 1, "1 or more"),
        "load": (given["load"], given["load"] > 0, "above 0"),
        "burst": (given["burst"], given["burst"] >= 1, "1 or more"),
        "daily": (given["daily"], 0 <= given["daily"] <= 1, "from 0 to 1"),
        "users": (given["users"], given["users"] >= 1, "1 or more"),
        "zipf": (given["zipf"], given["zipf"] >= 0, "0 or more"),
        "tail": (tail, tail in TAILS, " or ".join(TAILS)),
        "spread": (spread, spread > 1 if tail == "pareto" else spread >= 0, "0 or more, above 1 for pareto"),
    }
    for name, (value, holds, needed) in needs.items():
        if not holds or value == math.inf:
            raise InvalidValue(f"{name} must be {needed}, got {value!r}")
