"""Errors of the model of a job alone on families outside the fit, next to those of a constant guess.

The guess is the median of the runs for fitting; for classes, the class that most of these have.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ullage.errors import InvalidValue
from ullage.performance.alone import both_sides, host_time, times_of, utilization_of_work
from ullage.performance.rates import EVEN_S, SHARES, Rates, measured_gpu
from ullage.performance.result import Utilization
from ullage_lab.estimators.gpuutilnet import BINS, classes_of
from ullage_lab.train.steps.runs import FollowedRun, ReadRun
from ullage_lab.train.table7 import PAPER

Predictions = Mapping[str, Utilization]
# The median error and the 90th percentile of NeuSight's step times, over 26 training runs of Transformers.
NEUSIGHT = (0.046, 0.164)
AnyRun = TypeVar("AnyRun", bound=ReadRun)
_WAITING, _LEAST_HOST = 0.75, 5
# How far a run is from what its machine is said to take, and how far machines differ in their power.
_OFF, _POWERS = 0.12, 0.05
_WORDS = {"smact": "SMACT", "smocc": "SMOCC", "drama": "DRAMA", "tensor": "tensor cores"}


@dataclass(frozen=True, kw_only=True)
class UtilizationLine:
    """One figure on a number of runs, with the same figure for a constant guess.

    `unit` is "%" for errors and accuracies, "points" for shares in percent. `recall` is the share of the runs in the
    high class that were told to be there, `None` where none is.
    """

    figure: str
    runs: str
    count: int
    value: float
    constant: float
    unit: str = "%"
    published: float | None = None
    high: int | None = None
    recall: float | None = None


def predicted(rates: Rates, runs: Sequence[FollowedRun]) -> dict[str, Utilization]:
    return {run.id: utilization_of_work(run.work, measured_gpu(), rates) for run in runs}


def of_one_host(runs: Sequence[AnyRun], rates: Rates) -> list[AnyRun]:
    """Return runs of the machine whose host the rates know, or of the one with most: hosts differ more than GPUs."""
    machines = Counter(run.machine for run in runs)
    known = rates.card.get("machine")
    chosen = known if known in machines or not machines else machines.most_common(1)[0][0]
    return [run for run in runs if run.machine == chosen]


def on_host(rates: Rates, runs: Sequence[FollowedRun]) -> Rates:
    """Return the rates for the machine of these runs, none of which is for testing: its host is faster or slower.

    Where the GPU waits for the host, a step says how long the host takes (`host_speed`); compiled ones are left out. On
    the machine that the rates know, they stay as they are.
    """
    if runs and runs[0].machine == rates.card.get("machine"):
        return rates
    if any(run.is_test for run in runs):
        raise InvalidValue("runs must be of families, for the fit to learn how fast a host is")
    factors = host_factors(rates, [run for run in runs if not run.compiled])
    if len(factors) < _LEAST_HOST:
        raise InvalidValue(
            f"at least {_LEAST_HOST} runs must wait for their host, to learn its speed, got {len(factors)}"
        )
    return rates.with_host(*host_speed(factors))


def host_speed(factors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return how many times longer a host takes for a step of EVEN_S, and the power by which this grows with the step.

    By pairs of what the host should take and the factor that it took longer. Powers are small, so few runs, or runs of
    one length, leave it near zero. Runs that are far off count less.
    """
    length, factor = np.log(np.array(factors)).T
    length = length - np.log(EVEN_S)
    both = np.column_stack([np.ones(len(length)), length])
    weight, held = np.ones(len(length)), np.diag([0.0, (_OFF / _POWERS) ** 2])
    coefficients = np.zeros(2)
    for _ in range(20):
        coefficients = np.linalg.solve(both.T @ (both * weight[:, None]) + held, both.T @ (weight * factor))
        weight = 1 / np.maximum(np.abs(factor - both @ coefficients) / _OFF, 1)
    return float(np.exp(coefficients[0])), float(coefficients[1])


def host_factors(rates: Rates, runs: Sequence[FollowedRun]) -> list[tuple[float, float]]:
    """Return the predicted host time and the factor of the measured one, for each run whose GPU waits for its host."""
    factors = []
    for run in runs:
        rest, host_s = run.step_s - run.work.copied / rates.copied, host_time(rates, run.work)
        if host_s and run.gpu_s < _WAITING * rest:
            sides = both_sides(rates, run.work, times_of(rates, run.work), run.gpu_s)
            factors.append((host_s, run.work.launches.host_factor(*sides, rest)))
    return factors


def lines_of(rates: Rates, learn: Sequence[ReadRun], test: Sequence[FollowedRun]) -> list[UtilizationLine]:
    """Return all figures on runs for testing; `learn` are the runs for fitting, the source of the constant guess."""
    if not learn or not test:
        raise InvalidValue(
            "runs must include some for fitting and some for testing, of the machine whose host the rates know"
        )
    predictions = predicted(rates, test)
    lines = _times("step time", "step_s", learn, test, predictions, NEUSIGHT)
    lines += _times("time on the GPU", "gpu_s", learn, test, predictions)
    hosted = [run for run in test if run.host_s]
    if hosted:
        others = [run for run in learn if run.host_s]
        lines += _times("time of the host", "host_s", others, hosted, predictions)
    lines += _times("power", "power_w", learn, test, predictions)
    lines += _shares(learn, test, predictions)
    return lines + _classes(learn, test, predictions)


def _times(
    figure: str,
    field: str,
    learn: Sequence[ReadRun],
    test: Sequence[FollowedRun],
    predictions: Predictions,
    published: tuple[float | None, float | None] = (None, None),
) -> list[UtilizationLine]:
    guess = float(np.median([getattr(run, field) for run in learn]))
    lines = []
    for name, several in [("all", test), *_kinds(test)]:
        truth = np.array([getattr(run, field) for run in several])
        off = np.abs(np.array([getattr(predictions[run.id], field) for run in several]) / truth - 1)
        constant = np.abs(guess / truth - 1)
        for words, share, others in (("median error", 0.5, published[0]), ("90th percentile", 0.9, published[1])):
            lines.append(
                UtilizationLine(
                    figure=f"{figure}, {words}",
                    runs=name,
                    count=len(several),
                    value=float(np.quantile(off, share)),
                    constant=float(np.quantile(constant, share)),
                    published=others if name == "transformer" else None,
                )
            )
    return lines


def _shares(learn: Sequence[ReadRun], test: Sequence[FollowedRun], predictions: Predictions) -> list[UtilizationLine]:
    lines = []
    for name in SHARES:
        read = [run for run in test if name in run.shares]
        guess = np.median([run.shares[name] for run in learn if name in run.shares])
        truth = np.array([run.shares[name] for run in read])
        says = np.array([getattr(predictions[run.id], name) for run in read])
        lines.append(
            UtilizationLine(
                figure=f"{_WORDS[name]}, mean error",
                runs="all",
                count=len(read),
                unit="points",
                value=100 * float(np.abs(says - truth).mean()),
                constant=100 * float(np.abs(guess - truth).mean()),
            )
        )
    return lines


def _classes(learn: Sequence[ReadRun], test: Sequence[FollowedRun], predictions: Predictions) -> list[UtilizationLine]:
    lines = []
    for (kind, name), edges in BINS.items():
        read, before = ([run for run in runs if run.kind == kind and name in run.shares] for runs in (test, learn))
        if not read:
            continue
        truth = classes_of([run.shares[name] for run in read], edges)
        says = classes_of([getattr(predictions[run.id], name) for run in read], edges)
        usual = Counter(classes_of([run.shares[name] for run in before or read], edges).tolist()).most_common(1)[0][0]
        high = int((truth == 2).sum())
        lines.append(
            UtilizationLine(
                figure=f"{_WORDS[name]}, three classes, right",
                runs=kind,
                count=len(read),
                value=float((says == truth).mean()),
                constant=float((truth == usual).mean()),
                published=PAPER[kind, name][0],
                high=high,
                recall=float((says[truth == 2] == 2).mean()) if high else None,
            )
        )
    return lines


def _kinds(runs: Sequence[FollowedRun]) -> list[tuple[str, list[FollowedRun]]]:
    names = sorted({run.kind for run in runs})
    kinds = [(name, [run for run in runs if run.kind == name]) for name in names]
    compiled = [run for run in runs if run.compiled]
    return [*kinds, ("compiled", compiled)] if compiled else kinds
