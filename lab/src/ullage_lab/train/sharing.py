"""The model of jobs that share a GPU, fitted to measured sets and judged on sets with families that the fit never saw.

Sets come from `ullage lab measure together`. What a job is alone was measured in the same session, so the model of
sharing is judged by itself; `predicted` jobs judge it together with the model of a job alone. How often a job's host
waits for the GPU is not measured but followed on the virtual GPU.
"""

import functools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from ullage.errors import InvalidValue
from ullage.hardware import gpu as find_gpu
from ullage.jobs.model import read_rows as read_lines
from ullage.performance.alone import utilization_of
from ullage.performance.contention import SharingRules
from ullage.performance.rates import Rates
from ullage.performance.result import Utilization
from ullage.performance.sharing import Sharing, share_of
from ullage.performance.step import StepCalls, runs_kernels
from ullage_lab.clean.families import family_of, is_for_testing
from ullage_lab.measure.turns import slowdowns as middle_slowdowns
from ullage_lab.train.steps.runs import follow as follow_runs

Row = Mapping[str, Any]
Reading = tuple[int, str, str]  # session, way of sharing, and the job's id
Jobs = Mapping[Reading, Utilization]
KEEPS = 0.8  # of its speed
HOWS = ("mps", "time-slicing")
H200 = find_gpu("H200")
START = SharingRules(overlap=8.0, contention=1.0, crowding=0.1, closing=0.4, turn_s=2e-3, switch_s=1e-4, idle_w=115.0)
FITTED = ("overlap", "contention", "crowding", "closing", "turn_s", "switch_s")
_LEAST = {"overlap": 1.0, "contention": 0.5, "crowding": 0.01, "closing": 0.01, "turn_s": 1e-4, "switch_s": 1e-6}
_FIRST_STEP, _LEAST_STEP, _WORTH_IT = 0.5, 0.02, 0.001  # of the search, in logarithms, and what it must gain
_DRAWN_AGAIN = 200
_SHARES = ("gract", "smact", "smocc", "drama", "tensor")
_LEAST_LOSS, _LEAST_TRUE_LOSS = 0.1, 0.02


@dataclass(frozen=True, kw_only=True)
class MeasuredSet:
    """Jobs that ran at the same time; `slowdown` is each job's shared time divided by its time alone."""

    session: int
    how: str
    jobs: tuple[str, ...]
    slowdown: tuple[float, ...]
    power_w: float | None
    is_test: bool

    @property
    def readings(self) -> list[Reading]:
        return [(self.session, self.how, name) for name in self.jobs]

    @property
    def throughput(self) -> float:
        """Return the work done relative to running the jobs one after the other."""
        return sum(1 / slow for slow in self.slowdown)


def read_rows(files: Sequence[Path]) -> list[Row]:
    """Read the rows of `ullage lab measure together` from files, with sessions; 0.1 wrote `timeslice`."""
    rows: list[Row] = []
    session = 0
    for file in files:
        for row in read_lines(file):
            if not all(_is_turn(turn, row.get("jobs")) for turn in row.get("turns", ())):
                raise InvalidValue(
                    f"{file}: the turns of set {row.get('set')!r} are not those of 'ullage lab measure together'"
                )
            session += "header" in row
            rows.append(row | {"session": session, "how": row.get("how", "").replace("timeslice", "time-slicing")})
    if not any("set" in row for row in rows):
        raise InvalidValue(f"{files[0]} has no sets of jobs; 'ullage lab measure together' writes them")
    return rows


def _is_turn(turn: Any, jobs: Any) -> bool:
    """Whether a turn has a step of each job, together and alone."""
    steps = [turn.get("step_s"), turn.get("alone_s")] if isinstance(turn, dict) else [None]
    return all(
        isinstance(each, list)
        and len(each) == len(jobs or ())
        and all(type(one) in (int, float) and one > 0 for one in each)
        for each in steps
    )


def follow(
    rows: Sequence[Row], cache: Path | None = None, notify: Callable[[str], None] = lambda _: None
) -> dict[str, StepCalls]:
    """Return the step of every job by id; steps in the file `cache` are not followed again."""
    jobs = {f"job {row['alone']}": row["job"] for row in rows if "alone" in row and "failed" not in row}
    steps = follow_runs([{**job, "id": name} for name, job in jobs.items()], cache, notify)
    return {name.removeprefix("job "): step for name, step in steps.items() if name in jobs}


def _readings(rows: Sequence[Row]) -> dict[Reading, list[Row]]:
    readings: dict[Reading, list[Row]] = {}
    for row in rows:
        if "failed" not in row and len(row.get("jobs", ())) == 1:
            readings.setdefault((row["session"], row["how"], row["jobs"][0]), []).append(row)
    return readings


def noise(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean difference of two readings of the same job alone, by way of sharing, as a share of the step."""
    apart: dict[str, list[float]] = {}
    for (_, how, _), each in _readings(rows).items():
        steps = [row["step_s"][0] for row in each]
        apart.setdefault(how, []).extend(abs(later - steps[0]) / steps[0] for later in steps[1:])
    return {how: fmean(gaps) for how, gaps in apart.items() if gaps}


def noise_of_turns(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean change of slowdowns when their turns are resampled, by way of sharing."""
    chance = random.Random("ullage turns")
    moved: dict[str, list[float]] = {}
    for row in rows:
        turns = row.get("turns", ()) if "set" in row and len(row["jobs"]) > 1 else ()
        if len(turns) < 2:
            continue
        read = middle_slowdowns(turns)
        for _ in range(_DRAWN_AGAIN):
            again = middle_slowdowns(chance.choices(turns, k=len(turns)))
            moved.setdefault(row["how"], []).extend(abs(new / old - 1) for new, old in zip(again, read, strict=True))
    return {how: fmean(moves) for how, moves in moved.items()}


def measured_alone(rows: Sequence[Row], steps: Mapping[str, StepCalls]) -> dict[Reading, Utilization]:
    """Return jobs as they were measured alone; of several readings, the one with the median step.

    Their kernels, these kernels' relative lengths, and the time of their copies are predicted, since no counter has
    them.
    """
    jobs = {}
    predicted = {name: utilization_of(step, H200) for name, step in steps.items()}
    for key, each in _readings(rows).items():
        if key[2] not in steps:
            continue
        step_s = median(row["step_s"][0] for row in each)
        busy = {name: fmean(row[name] * row["step_s"][0] for row in each) / step_s for name in _SHARES}
        power = fmean(row["power_w"] for row in each)
        jobs[key] = Utilization(
            gpu=H200.name,
            step_s=step_s,
            gpu_s=min(1.0, busy.pop("gract")) * step_s,
            host_s=step_s,
            power_w=power,
            energy_j=power * step_s,
            flops=0.0,
            bytes=0.0,
            steady=True,
            measured=True,
            kernels=sum(map(runs_kernels, steps[key[2]])),
            kernel_groups=predicted[key[2]].kernel_groups,
            copy_s=predicted[key[2]].copy_s,
            waits=steps[key[2]].waits,
            **{name: min(1.0, share) for name, share in busy.items()},
        )
    return jobs


def predicted_alone(
    measured: Jobs, steps: Mapping[str, StepCalls], rates: Rates | None = None
) -> dict[Reading, Utilization]:
    """Return the same jobs as predicted by the model of a job alone."""
    predicted = {name: utilization_of(step, H200, rates) for name, step in steps.items()}
    return {reading: predicted[reading[2]] for reading in measured}


def sets_of(rows: Sequence[Row], alone: Jobs) -> list[MeasuredSet]:
    """Return the sets of two jobs and more, relative to their jobs alone.

    Of one that was read several times, the middle step of each job counts. One that was read in turns has its own
    slowdowns: each reading against the jobs alone just before and after.
    """
    tests = {row["alone"]: is_for_testing(family_of(row["job"]).name) for row in rows if "alone" in row}
    several: dict[tuple[Reading, ...], list[Row]] = {}
    for row in rows:
        if "set" in row and "failed" not in row and len(row["jobs"]) > 1 and None not in row["step_s"]:
            readings = tuple((row["session"], row["how"], name) for name in row["jobs"])
            if all(reading in alone for reading in readings):
                several.setdefault(readings, []).append(row)
    sets = []
    for readings, each in several.items():
        powers = [row["power_w"] for row in each if row.get("power_w") is not None]
        session, how, _ = readings[0]
        jobs = tuple(name for _, _, name in readings)
        turns = [turn for row in each for turn in row.get("turns", ())] or [
            {"step_s": row["step_s"], "alone_s": [alone[reading].step_s for reading in readings]} for row in each
        ]
        sets.append(
            MeasuredSet(
                session=session,
                how=how,
                jobs=jobs,
                slowdown=tuple(middle_slowdowns(turns)),
                power_w=median(powers) if powers else None,
                is_test=any(tests[name] for name in jobs),
            )
        )
    return sets


# The fit: a search along one figure after the other, in ever smaller steps. Some make up for each other, so that one
# alone can move neither way: these move together, too.

_ALONG = (
    {"contention": 1, "crowding": -1},
    {"contention": 1, "crowding": -3},
    {"contention": 1, "crowding": -1, "closing": -1},
    {"contention": 1, "crowding": -3, "closing": -3},
)
_DIRECTIONS: tuple[Mapping[str, int], ...] = (*({name: 1} for name in FITTED), *_ALONG)


def fit(sets: Sequence[MeasuredSet], alone: Jobs, start: SharingRules = START) -> SharingRules:
    """Return the figures that fit the sets not kept for testing best."""
    learn = [one for one in sets if not one.is_test]
    if not learn:
        raise InvalidValue("there must be sets for fitting, but each has a job of a family that is kept for testing")
    rules, least, step = start, _loss(learn, alone, start), _FIRST_STEP
    while step > _LEAST_STEP:
        before = least
        for direction in _DIRECTIONS:
            for way in (step, -step):
                moved = {name: getattr(rules, name) * math.exp(way * part) for name, part in direction.items()}
                tried = replace(rules, **{name: max(_LEAST[name], value) for name, value in moved.items()})
                loss = _loss(learn, alone, tried)
                if loss < least:
                    rules, least = tried, loss
        if least > before * (1 - _WORTH_IT):
            step /= 2
    return replace(rules, idle_w=_idle_power(learn, alone, rules))


def _loss(sets: Sequence[MeasuredSet], alone: Jobs, rules: SharingRules) -> float:
    """Return the mean error of slowdowns over sets, in logarithms."""
    return fmean(
        fmean(abs(math.log(slow / true)) for slow, true in zip(slowdowns(one, alone, rules), one.slowdown, strict=True))
        for one in sets
    )


def _idle_power(sets: Sequence[MeasuredSet], alone: Jobs, rules: SharingRules) -> float:
    """Return the figure that fits the power of the sets best, in steps of 5 W."""

    def off(idle: float) -> float:
        tried = replace(rules, idle_w=idle)
        powers = [(shared(one, alone, tried).power_w, one.power_w) for one in sets if one.power_w is not None]
        return fmean(abs(power - true) / true for power, true in powers) if powers else 0.0

    return min(range(60, 135, 5), key=off)


def shared(one: MeasuredSet, alone: Jobs, rules: SharingRules | None = None) -> Sharing:
    return share_of([alone[reading] for reading in one.readings], H200, one.how, rules=rules)


def slowdowns(one: MeasuredSet, alone: Jobs, rules: SharingRules | None = None) -> list[float]:
    """Return each job's predicted shared time divided by its time alone."""
    return [1 / job.speed for job in shared(one, alone, rules).jobs]


def save(rules: SharingRules, card: Mapping[str, Any], path: Path) -> None:
    figures = {name: float(f"{value:.4g}") for name, value in asdict(rules).items()}
    path.write_text(json.dumps({"rules": figures, "card": card}, indent=2) + "\n")


def card_of(files: Sequence[Path], sets: Sequence[MeasuredSet]) -> dict[str, Any]:
    learn = [one for one in sets if not one.is_test]
    counts = {how: sum(one.how == how for one in learn) for how in HOWS}
    return {
        "gpu": H200.name,
        "files": [file.name for file in files],
        "sets": counts,
        "for_testing": len(sets) - len(learn),
    }


# The evaluation, on sets with families that were left out of the fit.


@dataclass(frozen=True, kw_only=True)
class SharingLine:
    """One figure on a number of sets. `constant` is the same figure for a guess that ignores the jobs.

    `inputs` are the jobs alone: as measured, or as predicted. `always_yes` is the accuracy of always answering yes,
    `published` the figure that others report for their own jobs.
    """

    figure: str
    how: str
    sets: str
    count: int
    inputs: str
    value: float
    constant: float
    always_yes: float | None = None
    published: float | None = None


PARALLAX = {"mps": 0.061, "time-slicing": 0.043}  # what its authors report for training next to inference
BUSY = 0.7  # of its step a job keeps the GPU busy: the host, which is unsteady, matters little to it
SLOWDOWN_BUSY = "slowdown, jobs with GRACT above 70%"
SLOWDOWN, POWER = "slowdown, mean error", "power, mean error"
KEEPS_SPEED, REGRET = "each job keeps 80%, right", "throughput lost by the advice"
_SIZES: Mapping[str, Callable[[int], bool]] = {"pairs": lambda jobs: jobs == 2, "larger": lambda jobs: jobs > 2}


def lines_of(
    sets: Sequence[MeasuredSet], measured: Jobs, predicted: Jobs | None = None, rules: SharingRules | None = None
) -> list[SharingLine]:
    """Return all figures on the sets for testing, by way of sharing and size of the set."""
    busy = functools.partial(_slowdown, counts=lambda reading: measured[reading].busy >= BUSY)
    figures: Mapping[str, Callable[..., tuple[float, float]]] = {
        SLOWDOWN: _slowdown,
        SLOWDOWN_BUSY: busy,
        KEEPS_SPEED: _keeps,
        REGRET: _regret,
        POWER: _power,
    }
    given = {"measured": measured} | ({} if predicted is None else {"predicted": predicted})
    lines = []
    for how in HOWS:
        for size, belongs in _SIZES.items():
            chosen = [one for one in sets if one.how == how and belongs(len(one.jobs))]
            learn, test = ([one for one in chosen if one.is_test is wanted] for wanted in (False, True))
            if not test:
                continue
            for inputs, alone in given.items():
                for figure, judge in figures.items():
                    value, constant = judge(learn or test, test, alone, rules)
                    if math.isnan(value):
                        continue
                    published = PARALLAX[how] if (figure, size) == (SLOWDOWN, "pairs") else None
                    yes = fmean(map(_keeps_speed, test)) if figure == KEEPS_SPEED else None
                    lines.append(
                        SharingLine(
                            figure=figure,
                            how=how,
                            sets=size,
                            count=len(test),
                            inputs=inputs,
                            value=value,
                            constant=constant,
                            always_yes=yes,
                            published=published,
                        )
                    )
    return lines


def loss_spread(sets: Sequence[MeasuredSet], alone: Jobs, rules: SharingRules | None = None) -> dict[str, float]:
    """Return the spread of true losses around predicted ones, by way of sharing, on the sets for testing.

    A job's loss is its slowdown less 1. The spread is half the distance between the 16th and the 84th percentile of the
    logarithm of true by predicted: the standard deviation if it were normal, and a few wild readings do not matter.
    Small losses are left out: the noise of a reading is larger.
    """
    ratios: dict[str, list[float]] = {}
    for one in sets:
        for predicted, true in zip(slowdowns(one, alone, rules), one.slowdown, strict=True):
            if one.is_test and predicted - 1 >= _LEAST_LOSS:
                ratios.setdefault(one.how, []).append(math.log(max(true - 1, _LEAST_TRUE_LOSS) / (predicted - 1)))
    return {how: (quantiles(logs, n=25)[20] - quantiles(logs, n=25)[3]) / 2 for how, logs in ratios.items() if logs[1:]}


def _slowdown(
    learn: Sequence[MeasuredSet],
    test: Sequence[MeasuredSet],
    alone: Jobs,
    rules: SharingRules | None,
    counts: Callable[[Reading], bool] = bool,
) -> tuple[float, float]:
    guess = median(slow for one in learn for slow in one.slowdown)
    pairs = [
        (predicted, true)
        for one in test
        for predicted, true, reading in zip(slowdowns(one, alone, rules), one.slowdown, one.readings, strict=True)
        if counts(reading)
    ]
    if not pairs:
        return math.nan, math.nan
    return (
        fmean(abs(predicted - true) / true for predicted, true in pairs),
        fmean(abs(guess - true) / true for _, true in pairs),
    )


def _keeps(
    learn: Sequence[MeasuredSet], test: Sequence[MeasuredSet], alone: Jobs, rules: SharingRules | None
) -> tuple[float, float]:
    """Return the accuracy of the model, and of the more frequent answer among the sets for fitting."""
    truth = [_keeps_speed(one) for one in test]
    says = [max(slowdowns(one, alone, rules)) <= 1 / KEEPS for one in test]
    guess = fmean(map(_keeps_speed, learn)) >= 0.5
    return fmean(one == other for one, other in zip(says, truth, strict=True)), fmean(one == guess for one in truth)


def _keeps_speed(one: MeasuredSet) -> bool:
    return max(one.slowdown) <= 1 / KEEPS


def _power(
    learn: Sequence[MeasuredSet], test: Sequence[MeasuredSet], alone: Jobs, rules: SharingRules | None
) -> tuple[float, float]:
    guess = median(one.power_w for one in learn if one.power_w is not None)
    pairs = [(shared(one, alone, rules).power_w, one.power_w) for one in test if one.power_w is not None]
    return (
        fmean(abs(predicted - true) / true for predicted, true in pairs),
        fmean(abs(guess - true) / true for _, true in pairs),
    )


def _regret(
    learn: Sequence[MeasuredSet], test: Sequence[MeasuredSet], alone: Jobs, rules: SharingRules | None
) -> tuple[float, float]:
    """Return for each job, of the sets in which it was measured, the one with the highest predicted throughput, or
    none.

    The share of the best one's throughput that is lost by that. The guess takes any of them.
    """
    lost, by_chance = [], []
    predicted = {one: shared(one, alone, rules).throughput for one in test}
    for reading in {reading for one in test for reading in one.readings}:
        choice = [one for one in test if reading in one.readings]
        if len(choice) < 2:
            continue
        best = max(1.0, *(one.throughput for one in choice))
        chosen = max(choice, key=lambda one: predicted[one])
        lost.append(1 - (chosen.throughput if predicted[chosen] > 1 else 1.0) / best)
        by_chance.append(1 - fmean(one.throughput for one in choice) / best)
    return (fmean(lost), fmean(by_chance)) if lost else (0.0, 0.0)
