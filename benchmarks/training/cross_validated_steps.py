"""Cross-validates the GPU time of training steps, over whole families of models that are not kept for testing.

    python benchmarks/training/cross_validated_steps.py --resume steps.jsonl.gz [--rates FILE]... [--leaves N]

Each quarter of the families is left out once. Timed calls that a run of theirs makes are left out with it: whoever fits
has seen neither the family nor its calls. Prints the errors of runs by kind, and those of the calls that were left out.
`steps.jsonl.gz` is the file of `ullage lab train utilization --resume`. Takes some minutes.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ullage.performance.rates import SHARES, Rates
from ullage.performance.step import StepCalls
from ullage_lab.train.protocol import read_rows
from ullage_lab.train.steps import fitting, runs
from ullage_lab.train.trees import from_lists

DATA = Path(__file__).parents[1] / "data"
PROFILES = DATA / "steps_h200.jsonl.xz"
RUNS = ("utilization", "generated", "host")
RATES = ("rates", "more_rates", "many_rates", "later_rates", "shared_rates")
FOLDS = 4


@dataclass(frozen=True)
class Scores:
    """Errors as logarithms, by the kind of what was told."""

    of_runs: dict[str, list[float]]
    of_calls: dict[str, list[float]]


def learned_runs(cache: Path) -> tuple[list[runs.FollowedRun], dict[str, StepCalls]]:
    """The runs that the rates are fitted to, and their steps and those of profiled runs."""
    rows = [row for name in RUNS for row in read_rows(DATA / f"{name}_h200.parquet")]
    read = [run for run in runs.read_alone(rows) if not run.is_test]
    steps = runs.follow([*runs.configurations(rows, read), *runs.profiled_runs(PROFILES)], cache)
    return runs.with_work(read, steps), steps


def key(work: object) -> str:
    """The same for calls that the model cannot tell apart."""
    return repr(work)


def grown(calls: Sequence[runs.MeasuredCall], learn: Sequence[runs.FollowedRun], trees: int) -> Rates:
    """Rates that know times alone."""
    operators, usual = fitting._usual_factors(calls)
    empty = from_lists([[{"value": 0.0}]])
    rates = Rates(
        time=empty,
        shares=dict.fromkeys(SHARES, empty),
        starts={},
        operators=operators,
        usual=usual,
        gap_s=fitting.GAP,
        gaps=fitting.GAPS,
        host={},
        copied=7e9,
        stretch=1.0,
        idle_w=0.0,
        power={},
        shape=fitting.shape_names([call.work for call in calls]),
    )
    return replace(rates, time=fitting._times(rates, calls, learn, fitting._Sums.of(learn), trees))


def cross_validated(calls: Sequence[runs.MeasuredCall], every: Sequence[runs.FollowedRun], trees: int) -> Scores:
    """The errors of all runs and of the calls that they make, each told by a fit without its family."""
    families = sorted({run.family for run in every})
    random.Random(0).shuffle(families)
    scores = Scores(defaultdict(list), defaultdict(list))
    for fold in range(FOLDS):
        out = set(families[fold::FOLDS])
        test = [run for run in every if run.family in out]
        made = {key(work) for run in test for work in run.work.works}
        left = [call for call in calls if key(call.work) in made]
        rates = grown(
            [call for call in calls if key(call.work) not in made],
            [run for run in every if run.family not in out],
            trees,
        )
        for run in test:
            times = rates.times(run.work.works, rates.vectors(run.work.works))
            error = float(np.log((run.work.counts * (times + rates.gaps_of(run.work.works))).sum() / run.gpu_s))
            scores.of_runs[run.kind].append(error)
            scores.of_runs["all"].append(error)
        works = [call.work for call in left]
        for call, predicted in zip(left, rates.times(works, rates.vectors(works)), strict=True):
            scores.of_calls[_kind(call)].append(float(np.log(predicted / call.seconds)))
    return scores


def _kind(call: runs.MeasuredCall) -> str:
    depthwise = call.work.kind.startswith("convolution") and call.work.shape["depthwise"]
    return f"{call.work.kind}, depthwise" if depthwise else call.work.kind


def show(what: str, errors: Mapping[str, Sequence[float]]) -> None:
    """The median error and the 90th percentile of each kind."""
    for name, several in sorted(errors.items()):
        off = np.abs(np.expm1(several))
        middle, high = np.quantile(off, (0.5, 0.9))
        print(f"{what:6} {name:34} {len(several):6} {middle:7.1%} {high:7.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", type=Path, required=True)
    parser.add_argument("--rates", type=Path, action="append")
    parser.add_argument("--leaves", type=int)
    parser.add_argument("--trees", type=int, default=fitting.TREES)
    options = parser.parse_args()
    if options.leaves:
        fitting._LEAVES["times"] = options.leaves
    files = options.rates or [DATA / f"{name}_h200.jsonl.xz" for name in RATES]
    learned, followed = learned_runs(options.resume)
    profiled = runs.calls_in_steps(PROFILES, followed)
    errors = cross_validated(runs.read_calls(files) + profiled, learned, options.trees)
    show("runs", errors.of_runs)
    show("calls", errors.of_calls)
