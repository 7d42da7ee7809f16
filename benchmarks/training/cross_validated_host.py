"""Cross-validates what the host takes for training steps, over whole families of models that are not kept for testing.

    python benchmarks/training/cross_validated_host.py --resume steps.jsonl.gz

Each eleventh of the families is left out once. The time on the GPU is given, as it was measured, so that steps are off
by what the host is off; so are the speeds of the machines, by the runs of the other families. Prints
errors of the steps of runs that wait for their host, and of all. `steps.jsonl.gz` is the file of `ullage train
utilization --resume`. Takes some minutes.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from pathlib import Path

import numpy as np

from cross_validated_steps import DATA, PROFILES, RATES, learned_runs, show
from ullage.performance.alone import times_of, together
from ullage.performance.rates import Rates, load
from ullage_lab.train.steps import runs
from ullage_lab.train.steps.host import host_and_step
from ullage_lab.train.steps.judging import host_factors, host_speed

FOLDS = 11
WAITING = 0.6  # where the GPU works less of a step, the run counts as waiting


def on_machines(rates: Rates, learn: list[runs.FollowedRun]) -> dict[str, Rates]:
    """The rates with the host of each machine."""
    by_machine = {}
    for machine in {run.machine for run in learn}:
        several = host_factors(rates, [run for run in learn if run.machine == machine])
        if several:
            by_machine[machine] = rates.with_host(*host_speed(several))
    return by_machine


def cross_validated(every: list[runs.FollowedRun], alone: dict[str, float]) -> dict[str, list[float]]:
    """Errors of steps as logarithms, by kind."""
    families = sorted({run.family for run in every})
    random.Random(0).shuffle(families)
    errors: dict[str, list[float]] = defaultdict(list)
    for fold in range(FOLDS):
        out = set(families[fold::FOLDS])
        learn = [run for run in every if run.family not in out]
        rates = host_and_step(load(), learn, alone)
        there = on_machines(rates, learn)
        for run in every:
            if run.family in out:
                host = there.get(run.machine, rates)
                step = run.work.copied / host.copied + together(host, run.work, times_of(host, run.work), run.gpu_s)
                for name in ("all", *(("waiting", f"waiting, {run.kind}") if run.gpu_s < WAITING * run.step_s else ())):
                    errors[name].append(float(np.log(step / run.step_s)))
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", type=Path, required=True)
    options = parser.parse_args()
    learned, _ = learned_runs(options.resume)
    on_host = runs.calls_on_host([DATA / f"{name}_h200.jsonl.xz" for name in RATES], PROFILES)
    show("steps", cross_validated([run for run in learned if run.host_s], on_host))
