"""The fit of the host's time for a step, as `performance.timeline` combines it with the GPU's.

Runs of several machines are fitted at once: their hosts differ by one factor each. Where a run says what the host took
until the backward pass and for it, each pass has an equation of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.performance.alone import StepWork, both_sides, times_of
from ullage.performance.rates import HOST_PARTS, KNOWN_PARTS, Floats, Rates, of_call
from ullage_lab.train.steps.runs import FollowedRun

# Bytes copied a second, and how many times longer the GPU takes than it works.
_SETTINGS = ((5e9, 6e9, 7e9, 8e9, 10e9, 13e9), (1.0, 1.02, 1.04, 1.06))
_WAITING = 0.75  # where the GPU works less of a step, it waits for the host
_WAITING_MUCH = 0.4  # where the step is little longer than what the host takes
_FEW = 3  # runs of a machine that say nothing of how fast it is
_ROUNDS, _EXACT, _SMALL = 8, 0.03, 0.003
# What each pass is made of; `calls` are those of operators, as long as each takes by itself. What few runs
# have is known from elsewhere.
_PASSES = {
    which: (*(name for name in several if name not in KNOWN_PARTS), *(("calls",) if which != "optimizer" else ()))
    for which, several in HOST_PARTS.items()
}


def of_one_host(runs: Sequence[FollowedRun]) -> list[FollowedRun]:
    """Return the runs with the host's time, of the machine that has most of them."""
    read = [run for run in runs if run.host_s]
    machines = Counter(run.machine for run in read)
    return [run for run in read if run.machine == machines.most_common(1)[0][0]] if read else []


def least_squares(parts: Floats, whole: Floats) -> Floats:
    """Return the least-squares coefficients, none below zero."""
    from sklearn.linear_model import LinearRegression

    fitted = LinearRegression(positive=True, fit_intercept=False).fit(parts, whole)
    return np.asarray(fitted.coef_, dtype=np.float64)


@dataclass(frozen=True)
class _Runs:
    """Facts about runs, one number each."""

    works: Sequence[StepWork]
    alone: Mapping[str, float]
    parts: Floats  # the columns of all passes
    machine: npt.NDArray[np.int64]
    step: Floats
    gpu: Floats
    host: Floats
    copied: Floats
    passes: Floats  # three of each run; NaN where they are not known
    on_gpu: Sequence[Floats]  # what each launch of a step takes

    @classmethod
    def of(cls, rates: Rates, runs: Sequence[FollowedRun], alone: Mapping[str, float], first: str) -> "_Runs":
        machines = [first, *sorted({run.machine for run in runs} - {first})]
        rows = [[value for which in _PASSES for value in _columns(run, which, alone)] for run in runs]
        numbers = np.array([(run.step_s, run.gpu_s, run.host_s, run.work.copied) for run in runs], dtype=np.float64)
        passes = [
            (*one, run.host_s - sum(one)) if (one := run.host_passes) and run.host_s else (np.nan,) * 3 for run in runs
        ]
        where = np.array([machines.index(run.machine) for run in runs])
        step, gpu, host, copied = numbers.T
        rates = replace(rates, stretch=1.0)
        on_gpu = [both_sides(rates, run.work, times_of(rates, run.work), run.gpu_s)[1] for run in runs]
        works = [run.work for run in runs]
        return cls(works, alone, np.array(rows), where, step, gpu, host, copied, np.array(passes), on_gpu)

    def on_host(self, each: Floats) -> list[Floats]:
        """Return the host's time for each launch of a step, with the given times of the columns."""
        seconds = _named(each, self.alone)
        return [work.launches.on_host(seconds["host"], seconds["host_calls"], work.host) for work in self.works]


def _columns(run: FollowedRun, which: str, alone: Mapping[str, float]) -> list[float]:
    calls = sum(count * of_call(alone, name) for name, count in run.work.host_calls.items() if name.startswith(which))
    known: dict[str, float] = {**run.work.host, "calls": calls}
    return [float(known.get(name, 0.0)) for name in _PASSES[which]]


def host_and_step(rates: Rates, runs: Sequence[FollowedRun], alone: Mapping[str, float] | None = None) -> Rates:
    """Fit the host's time, its copy rate, and the factor of the GPU's time with the least errors.

    Where the GPU waits for the host, a step tells what the host takes. Otherwise only runs whose passes were timed
    count. The host is that of the machine with most runs. The rates know already what calls take on the GPU.
    """
    read = [run for run in runs if run.host_s]
    least = sum(map(len, HOST_PARTS.values()))
    if len(read) < least:
        raise InvalidValue(f"fitting the host needs at least {least} runs with the host's time, got {len(read)}")
    alone = alone or {"forward": 1e-5, "backward": 1e-5}
    known = _Runs.of(rates, read, alone, of_one_host(read)[0].machine)
    chosen = [several[len(several) // 2] for several in _SETTINGS]
    for place, several in enumerate(_SETTINGS):  # one after the other: all at once would take minutes
        tried = [[*chosen[:place], value, *chosen[place + 1 :]] for value in several]
        chosen = min(tried, key=lambda one: _off(known, *one))
    speed, stretch = chosen
    each, _ = _fitted(known, known.copied / speed, stretch)
    return replace(rates, copied=speed, stretch=stretch, **_named(each, alone))


def _off(runs: _Runs, speed: float, stretch: float) -> float:
    """Return the mean error of steps, as a logarithm."""
    copy = runs.copied / speed
    each, factors = _fitted(runs, copy, stretch)
    ends = [
        work.launches.end(factor * host, stretch * gpu)
        for work, factor, host, gpu in zip(
            runs.works, factors[runs.machine], runs.on_host(each), runs.on_gpu, strict=True
        )
    ]
    return float(np.abs(np.log((copy + np.array(ends)) / runs.step)).mean())


def _named(each: Floats, alone: Mapping[str, float]) -> dict[str, Any]:
    """Return seconds for each of HOST_PARTS, and for calls of operators."""
    names = [(which, name) for which, several in _PASSES.items() for name in several]
    by_column = {key: float(value) for key, value in zip(names, each, strict=True)}
    parts = {name: value for (_, name), value in by_column.items() if name != "calls"} | {**KNOWN_PARTS}
    calls = {name: by_column[name.partition(" ")[0], "calls"] * seconds for name, seconds in alone.items()}
    return {"host": parts, "host_calls": calls}


def _fitted(runs: _Runs, copy: Floats, stretch: float) -> tuple[Floats, Floats]:
    """Return the seconds of each column, and each machine's time relative to the first.

    At first only steps count that are little longer than what the host takes. Then it is known about how the host's
    time is spread over a step, and all steps in which the GPU waits tell how long the host takes.
    """
    rest = np.maximum(runs.step - copy, 0.2 * runs.step)
    each, factors = _solved(runs, copy, rest, runs.gpu < _WAITING_MUCH * rest)
    for _ in range(2):
        by_step, waits, hosts = rest.copy(), runs.gpu < _WAITING * rest, runs.on_host(each)
        for number in np.flatnonzero(waits).tolist():
            host, gpu, launches = hosts[number], stretch * runs.on_gpu[number], runs.works[number].launches
            by_step[number] = host.sum() * launches.host_factor(host, gpu, float(rest[number]))
        each, factors = _solved(runs, copy, by_step, waits)
    return each, factors


def _solved(runs: _Runs, copy: Floats, by_step: Floats, waits: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the same, if the host took `by_step` for steps in which the GPU waits.

    Errors count relative to the whole, those of a pass at most four times so; outliers count less.
    """
    by_host = np.maximum(runs.host - copy, 0.2 * runs.host)
    timed = ~np.isnan(runs.passes[:, 0])
    whole = np.where(waits, np.where(timed, np.sqrt(by_step * by_host), by_step), by_host)
    chosen, passes = np.flatnonzero(waits | timed), np.flatnonzero(timed)
    rows, truth, scale = [runs.parts[chosen]], [whole[chosen]], [whole[chosen]]
    begin = 0
    for place, names in enumerate(_PASSES.values()):
        own = np.zeros((len(passes), runs.parts.shape[1]))
        own[:, begin : begin + len(names)] = runs.parts[passes, begin : begin + len(names)]
        begin += len(names)
        taken = np.maximum(runs.passes[passes, place] - (copy[passes] if place == 0 else 0.0), 0.0)
        rows.append(own)
        truth.append(taken)
        scale.append(np.maximum(taken, whole[passes] / 4))
    parts, wanted, size = np.vstack(rows), np.concatenate(truth), np.concatenate(scale)
    machine = np.concatenate([runs.machine[chosen], *[runs.machine[passes]] * 3])
    factors, weight = np.ones(int(runs.machine.max()) + 1), np.ones(len(wanted))
    factors_of_parts = np.zeros(parts.shape[1])
    for _ in range(_ROUNDS):
        left = parts * (factors[machine] / size * weight)[:, None]
        norms = np.maximum(np.linalg.norm(left, axis=0), 1e-30)
        # Columns that nothing tells apart share what they take.
        held = np.eye(len(norms)) * _SMALL * np.sqrt(len(wanted))
        right = np.concatenate([wanted / size * weight, np.zeros(len(norms))])
        factors_of_parts = least_squares(np.vstack([left / norms, held]), right) / norms
        fitted = runs.parts[chosen] @ factors_of_parts
        for number in range(len(factors)):
            own = runs.machine[chosen] == number
            if own.sum() >= _FEW:
                factors[number] = np.exp(np.median(np.log(whole[chosen][own] / np.maximum(fitted[own], 1e-12))))
        factors_of_parts, factors = factors_of_parts * factors[0], factors / factors[0]
        off = np.abs(factors[machine] * (parts @ factors_of_parts) - wanted) / size
        weight = 1 / np.sqrt(np.maximum(off, _EXACT))
    return factors_of_parts, factors
