"""The fit of `performance.rates`: of times and shares by regression trees, of the host and of power by least squares.

The trees of times are grown on two kinds of truth at once. A call that was timed says what its factor is. A run says
what the calls of its step add up to: its error falls on each of them by its share of the sum. The trees of shares are
grown on runs in the same way; for SMOCC, calls whose SMOCC over SMACT was read count, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.performance.rates import (
    SHARES,
    Floats,
    Rates,
    measured_gpu,
    prior_shares,
    serial_times,
    share_vectors,
)
from ullage.performance.trees import Trees
from ullage.performance.work import Work
from ullage_lab.train.steps.host import host_and_step, least_squares, of_one_host
from ullage_lab.train.steps.runs import FollowedRun, MeasuredCall
from ullage_lab.train.trees import from_lists, grow

GAP = 1e-6  # seconds between two kernels, within what counts as work
# The same before large kernels of libraries. Timed over and over, their code is in the cache; in a step it is not.
GAPS = {"convolution": 4.5e-6, "convolution_backward": 4.5e-6, "product": 2.5e-6}
OF_RUNS = 10.0  # a run's weight against that of a timed call
OF_CALLS = 0.03  # the weight of a call's SMOCC against that of a run
ROBUST = 0.3  # beyond such an error, in logarithms, weights fall
TREES = 1000  # of times
OF_SHARES = {"smact": 0.125, "smocc": 0.3, "drama": 0.125, "tensor": 0.125}  # so many times as many for a share
_LEAVES, _DEPTH = {"times": 127, "shares": 31}, {"times": 12, "shares": 10}
_RATE = {"times": 0.05, "smact": 0.05, "smocc": 0.1, "drama": 0.05, "tensor": 0.05}
Begin = Callable[[str], None]


@dataclass(frozen=True)
class _Sums:
    """The distinct calls of all runs, and how often each run makes each."""

    works: list[Work]
    call: npt.NDArray[np.int64]
    run: npt.NDArray[np.int64]
    count: Floats

    @classmethod
    def of(cls, runs: Sequence[FollowedRun]) -> "_Sums":
        works: list[Work] = []
        places: dict[Any, int] = {}
        call, run, count = [], [], []
        for number, one in enumerate(runs):
            for work, times in zip(one.work.works, one.work.counts.tolist(), strict=True):
                key = (work.operator, work.flops, work.read, work.written, work.dtype, work.tf32, *work.shape.values())
                if key not in places:
                    places[key] = len(works)
                    works.append(work)
                call.append(places[key])
                run.append(number)
                count.append(times)
        return cls(works, np.array(call), np.array(run), np.array(count))

    def over(self, values: Floats, runs: int) -> Floats:
        return _summed(self.run, self.count * values[self.call], runs)


def _summed(places: npt.NDArray[np.int64], values: Floats, length: int) -> Floats:
    return np.bincount(places, values, length).astype(np.float64)


def fit(
    calls: Sequence[MeasuredCall],
    runs: Sequence[FollowedRun],
    begin: Begin = lambda _: None,
    trees: int = TREES,
    on_host: Mapping[str, float] | None = None,
) -> Rates:
    """Return the rates that fit these calls and runs best. Pass no run that will be used for judging.

    `on_host` says what the host takes for a call of an operator by itself (`runs.calls_on_host`).
    """
    if len(runs) < 10:
        raise InvalidValue(f"fitting needs at least 10 runs, got {len(runs)}")
    operators, usual = _usual_factors(calls)
    empty = from_lists([[{"value": 0.0}]])
    rates = Rates(
        time=empty,
        shares=dict.fromkeys(SHARES, empty),
        starts={},
        operators=operators,
        usual=usual,
        gap_s=GAP,
        gaps=GAPS,
        host={},
        copied=7e9,
        stretch=1.05,
        idle_w=100.0,
        power=dict.fromkeys(SHARES, 0.0),
        shape=shape_names([call.work for call in calls] + [work for run in runs for work in run.work.works]),
    )
    sums = _Sums.of(runs)
    begin("times of calls")
    rates = replace(rates, time=_times(rates, calls, runs, sums, trees))
    vectors = rates.vectors(sums.works)
    times = rates.times(sums.works, vectors)
    rows = share_vectors(sums.works, vectors, times)
    priors, taken = prior_shares(sums.works, times), times + rates.gaps_of(sums.works)
    starts: dict[str, float] = {}
    grown: dict[str, Trees] = {}
    for name in SHARES:
        begin(name)
        read = _occupied(rates, calls, starts["smact"], grown["smact"]) if name == "smocc" else (rows[:0], times[:0])
        several = int(trees * OF_SHARES[name])
        starts[name], grown[name] = _shares(name, rows, priors[name], taken, runs, sums, several, read)
    begin("host and power")
    rates = _power(host_and_step(replace(rates, starts=starts, shares=grown), runs, on_host), runs)
    return replace(rates, card=_card(calls, runs))


def shape_names(works: Sequence[Work]) -> list[str]:
    return sorted({name for work in works for name in work.shape})


def _card(calls: Sequence[MeasuredCall], runs: Sequence[FollowedRun]) -> dict[str, Any]:
    hosts = of_one_host(runs)
    return {
        "gpu": measured_gpu().name,
        "calls": len(calls),
        "runs": len(runs),
        "families": len({r.family for r in runs}),
        "machine": hosts[0].machine,
        "runs_of_machine": len(hosts),
    }


def _usual_factors(calls: Sequence[MeasuredCall]) -> tuple[dict[str, float], float]:
    """Return each operator's median factor over its least time, as a logarithm, shrunk to that of all if it is rare."""
    factors: dict[str, list[float]] = {}
    for call in calls:
        least = call.work.least_time(measured_gpu())
        factors.setdefault(call.work.operator, []).append(float(np.log(call.seconds / least)))
    usual = float(np.median([factor for several in factors.values() for factor in several]))
    return {name: (sum(several) + 2 * usual) / (len(several) + 2) for name, several in factors.items()}, usual


def _times(rates: Rates, calls: Sequence[MeasuredCall], runs: Sequence[FollowedRun], sums: _Sums, trees: int) -> Trees:
    works = [call.work for call in calls]
    timed = rates.vectors(works)
    truth = np.log(np.array([call.seconds for call in calls]) / rates.usual_times(works))
    usual, least, gaps = rates.usual_times(sums.works), serial_times(sums.works), rates.gaps_of(sums.works)
    whole = np.array([run.gpu_s for run in runs])
    first = len(calls)

    def objective(guess: Floats, _: Any) -> tuple[Floats, Floats]:
        slope, bend = np.zeros(len(guess)), np.full(len(guess), 1e-4)
        off = guess[:first] - truth
        weight = 1 / np.sqrt(1 + (off / ROBUST) ** 2)
        slope[:first], bend[:first] = weight * off, weight
        each = np.maximum(usual * np.exp(guess[first:]), least)
        summed = sums.over(each + gaps, len(runs))
        off = np.log(summed / whole)
        weight = OF_RUNS / np.sqrt(1 + (off / ROBUST) ** 2)
        share = sums.count * each[sums.call] / summed[sums.run]
        slope[first:] += _summed(sums.call, (weight * off)[sums.run] * share, len(each))
        bend[first:] += _summed(sums.call, weight[sums.run] * share, len(each))
        return slope, bend

    return _grow("times", "times", np.vstack([timed, rates.vectors(sums.works)]), objective, trees)


def _occupied(rates: Rates, calls: Sequence[MeasuredCall], start: float, smact: Trees) -> tuple[Floats, Floats]:
    """The features of calls whose SMOCC over SMACT was read, and their SMOCC, with the SMACT that trees say."""
    read = [call for call in calls if call.warps is not None]
    works = [call.work for call in read]
    vectors = rates.vectors(works)
    rows = share_vectors(works, vectors, rates.times(works, vectors))
    active = 1 / (1 + np.exp(-(start + smact.sums(rows))))
    return rows, np.array([call.warps or 0.0 for call in read]) * active


def _shares(
    name: str,
    rows: Floats,
    prior: Floats,
    times: Floats,
    runs: Sequence[FollowedRun],
    sums: _Sums,
    trees: int,
    read: tuple[Floats, Floats],
) -> tuple[float, Trees]:
    """Return the initial value and the trees of a share.

    What they say, weighted by the `times` of calls with what passes before them, is the share of each run while its GPU
    works. `read` are the features of single calls, and their shares, which no prior is known for.
    """
    first = len(read[0])
    known = np.array([name in run.shares for run in runs])
    truth = np.array([min(1.0, run.shares.get(name, 0.0) * run.step_s / run.gpu_s) for run in runs])
    weight = np.where(known, np.array([run.gpu_s / run.step_s for run in runs]) ** 2, 0.0)
    part = sums.count * times[sums.call]
    part = part / _summed(sums.run, part, len(runs))[sums.run]

    def too_much(start: float) -> float:
        share = 1 / (1 + np.exp(-(start + prior)))
        return float((weight * (_summed(sums.run, part * share[sums.call], len(runs)) - truth)).sum())

    start = _root(too_much)

    def objective(guess: Floats, _: Any) -> tuple[Floats, Floats]:
        share = 1 / (1 + np.exp(-(start + np.concatenate([np.zeros(first), prior]) + guess)))
        grows = np.maximum(share * (1 - share), 0.01)
        of_runs = share[first:]
        off = _summed(sums.run, part * of_runs[sums.call], len(runs)) - truth
        slope = _summed(sums.call, (weight * off)[sums.run] * part, len(rows))
        bend = _summed(sums.call, weight[sums.run] * part, len(rows))
        slope = np.concatenate([OF_CALLS * (share[:first] - read[1]), slope]) * grows
        bend = np.concatenate([np.full(first, OF_CALLS), bend]) * grows**2
        return 100 * slope, 100 * bend + 1e-4

    return start, _grow(name, "shares", np.vstack([read[0], rows]), objective, trees)


def _root(grows: Callable[[float], float], low: float = -8.0, high: float = 8.0) -> float:
    """Return the root of an increasing function, to a thousandth."""
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) > 0 else (middle, high)
    return (low + high) / 2


def _grow(
    name: str, of: str, rows: Floats, objective: Callable[[Floats, Any], tuple[Floats, Floats]], trees: int
) -> Trees:
    options = {
        "objective": objective,
        "num_leaves": _LEAVES[of],
        "max_depth": _DEPTH[of],
        "learning_rate": _RATE[name],
        "min_data_in_leaf": 5,
        "min_sum_hessian_in_leaf": 1.0,
        "lambda_l2": 2.0,
        "seed": 0,
    }
    return grow(rows, np.zeros(len(rows)), options, trees, "the training of rates")


def _power(rates: Rates, runs: Sequence[FollowedRun]) -> Rates:
    """Fit the power without work, and for each share of it, in watts."""
    full = [run for run in runs if len(run.shares) == len(SHARES)]
    parts = np.array([[1.0, *(run.shares[name] for name in SHARES)] for run in full])
    watts = least_squares(parts, np.array([run.power_w for run in full]))
    return replace(rates, idle_w=float(watts[0]), power=dict(zip(SHARES, map(float, watts[1:]), strict=True)))
