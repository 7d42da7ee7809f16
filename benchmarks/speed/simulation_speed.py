"""How fast the simulator is: a trace of the size of Microsoft Philly's, a million jobs, and how the cost grows.

    python benchmarks/speed/simulation_speed.py                        # 100,000 jobs on 2,500 GPUs; goal: under 60 s
    python benchmarks/speed/simulation_speed.py --jobs 1000000 --gpus 10000        # goals: under 15 minutes and 4 GiB
    python benchmarks/speed/simulation_speed.py --grow                 # 6,250 to 100,000 jobs on 500 GPUs: the exponent

Jobs are drawn by `ullage.simulation.generator`: known workloads, users, a daily pattern, heavy-tailed work, 1 to 8 GPUs
a job. They need `--load` of the cluster if each has its GPUs to itself. One core is used. On a machine that does other
things too the processor's time says more than the clock's.
"""

from __future__ import annotations

import argparse
import math
import resource
import time

from ullage.simulation.engine import simulate
from ullage.simulation.generator import generate_trace
from ullage.simulation.scenario import Scenario

GPU_COUNTS = {1: 0.80, 2: 0.08, 4: 0.07, 8: 0.05}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--gpus", type=int, default=2_500)
    parser.add_argument("--load", type=float, default=0.8, help="of the cluster, if every job had its GPUs to itself")
    parser.add_argument("--policy", default="ullage")
    parser.add_argument("--estimator", default="ullage")
    parser.add_argument("--min-speed", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grow", action="store_true", help="how the cost grows with the number of jobs")
    options = parser.parse_args()
    if not options.grow:
        measure(options.jobs, options.gpus, options)
        return
    counts = [6_250, 12_500, 25_000, 50_000, 100_000]
    times = [measure(count, 500, options) for count in counts]
    x, y = [math.log(count) for count in counts], [math.log(seconds) for seconds in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    reference = [math.log(count * math.log(count)) for count in counts]
    steepest = (reference[-1] - reference[0]) / (x[-1] - x[0])
    print(f"the cost grows with the number of jobs to the power of {slope:.2f} (n log n: {steepest:.2f})")


if __name__ == "__main__":
    main()
