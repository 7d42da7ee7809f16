"""The least time and energy in which GPUs could do a trace, whatever the policy, by the model of sharing under MPS.

    python benchmarks/dissertation/least_time.py examples/carma/philly_heavy-60-tasks.sh

A linear program: for how long each set of jobs that fits into a GPU is on one, so that all work gets done in the least
time on GPUs in all. It knows the true memory and speeds, all jobs are there at the beginning and start at once, and may
be stopped, moved and divided at will. So no policy can be faster, and none will be quite as fast. Below it is what the
policy `ullage` does, as it is and if it kept no GPU for a job that finds no room, which may then wait for ever.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from rad_rm import GPUS, rad_rm
from ullage.hardware import gpu
from ullage.manager.placement import Rules
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.interference import Interference
from ullage.manager.simulation.reading import read_trace
from ullage.manager.simulation.result import Figures
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.trace import JobTrace
from ullage.performance.result import resting_w, waiting_w

NAME, COUNT = "A100-40GB", 4


def sets_that_fit(memory: list[int], counts: list[int], most: int) -> list[tuple[int, ...]]:
    """All sets of at most so many jobs, by the numbers of their kinds, that fit into a GPU."""
    fitting: list[tuple[int, ...]] = []

    def grow(there: tuple[int, ...], left: int) -> None:
        for kind in range(there[-1] if there else 0, len(memory)):
            if memory[kind] <= left and there.count(kind) < counts[kind]:
                fitting.append((*there, kind))
                if len(there) + 1 < most:
                    grow(fitting[-1], left - memory[kind])

    grow((), gpu(NAME).usable)
    return fitting


def least_gpu_s(trace: JobTrace, most: int, min_speed: float) -> float:
    """The least GPU-seconds in which all of the work can be done."""
    interference = Interference(trace.kinds, "mps")
    work, counts = np.zeros(len(trace.kinds)), [0] * len(trace.kinds)
    for job in trace.jobs:
        kind = interference.numbers[id(job.kind)]
        work[kind] += job.work_s * job.gpus
        counts[kind] += job.gpus
    speeds = {}
    for there in sets_that_fit([kind.memory for kind in trace.kinds], counts, most):
        shares = interference.true(NAME, there)
        if round(min(shares), 2) >= min_speed:
            speeds[there] = shares
    entries = [
        (kind, column, share)
        for column, (there, shares) in enumerate(speeds.items())
        for kind, share in zip(there, shares, strict=True)
    ]
    rows, columns, values = zip(*entries, strict=True)
    done = csr_matrix((values, (rows, columns)), shape=(len(work), len(speeds)))
    optimum = linprog(np.ones(len(speeds)), A_ub=-done, b_ub=-work, bounds=(0, None), method="highs")
    return float(optimum.fun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--most", type=int, default=5, help="jobs on a GPU")
    parser.add_argument("--seeds", type=int, default=20, help="how often ullage's runs are drawn (default: 20)")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    alone = simulate(trace, rad_rm("exclusive", "oracle")).figures
    work = sum(job.work_s * job.gpus for job in trace.jobs)
    base = (alone.energy_j or 0.0) - work * waiting_w(NAME) - (COUNT * alone.total_s - work) * resting_w(NAME)
    print(f"one job a GPU: {alone.total_s / 60:.0f} min, {(alone.energy_j or 0.0) / 1e6:.1f} MJ")
    for min_speed in (0.8, 0.5, 0.0):
        needed = least_gpu_s(trace, options.most, min_speed)
        _tell(f"speed at least {min_speed:.0%}", needed / COUNT, base + needed * waiting_w(NAME), alone)
    for name, patience in (("ullage", Rules.patience), ("ullage, no room kept", math.inf)):
        scenario = Scenario(gpus=GPUS).but(patience=patience)
        figures = [simulate(trace, scenario.but(seed=seed)).figures for seed in range(options.seeds)]
        means = (fmean(each.total_s for each in figures), fmean(each.energy_j or 0.0 for each in figures))
        _tell(name, *means, alone)


def _tell(name: str, total: float, energy: float, alone: Figures) -> None:
    change = f"{100 * (total / alone.total_s - 1):+.1f}%", f"{100 * (energy / (alone.energy_j or 1.0) - 1):+.1f}%"
    print(f"{name}: {total / 60:.0f} min ({change[0]}), {energy / 1e6:.1f} MJ ({change[1]})")


if __name__ == "__main__":
    main()
