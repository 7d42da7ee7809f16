"""The manager's recorded runs on an H200, simulated again: what comes out beside what was measured.

    python benchmarks/gpu/simulated_reality.py [--traces FOLDER]     # more traces that manager_trace.py wrote

A run is replayed in one or two ways. With its placements, each job starts when it did: that judges phases and sharing
alone. With its policy, the simulator decides; only runs whose policy is still as it was are replayed so.

What is known of a trace is learnt from the other traces, and from jobs alone (`gpu_behaviour.py`): how long each kind
of job takes to start, to warm up, for a step alone, to evaluate, to save and to end. Of a kind that is in no other
trace, the step is predicted and the rest is that of all kinds. The trace itself gives when its jobs came, when each
could start, its steps, and Ullage's predictions for the GPU.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from manager_trace import KINDS, Trace, arrivals
from ullage.hardware import gpu as find_gpu
from ullage.manager.placement import Rules
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.history import scenario_of_history, trace_of_history
from ullage.manager.simulation.result import SimulationResult
from ullage.manager.simulation.scenario import Scenario, World
from ullage.manager.simulation.trace import WORKING, JobKind, JobTrace, Phase, TraceJob
from ullage.performance.result import Utilization
from ullage.units import parse_duration

DATA = Path(__file__).resolve().parents[1] / "data"
DETAILED = DATA / "h200_trace_detail.jsonl"
GPU = "H200"
RULES = Rules(smact_limit=0.8, window=10.0, fresh_busy=0.2)  # the settings of `manager_trace.py`
ALL_FIT = Rules(smact_limit=None, unknown="floor", free_floor=0, margin=0, fair=False)  # every job starts as it comes
READING_S = 1.0  # between two readings of the daemon's monitor
# Predicted slowdowns are taken as true. A reading is as old as the monitor's last look: NVML is late by a millisecond.
WORLD = World(interference_error=0.0, reading_s=READING_S, monitor_delay_s=0.0)
STARTUP_S = 11.0  # of the jobs of the last trace alone, until their first step: 10 to 13; histories tell of no phases
ESTIMATE_S = 10.0  # the first job of a kind, when the first two traces were played: ten to twenty, as was noted then
# Traces without phases and placements: the mean gap between arrivals, and the share of each kind's steps.
GAPS = {"h200_trace": (1.2, 0.25), "h200_trace_long": (2.0, 1.0)}
# The policy that decided in their runs of `ullage` is gone.
OLD_POLICY = {
    *GAPS,
    "h200_trace_detail",
    "h200_traces_trial",
    "seed101_mps",
    "seed101_timeslice",
    "seed101_timeslice_admission",
    "seed303_long_mps",
    "seed303_long_mps_admission",
}
FAR = 0.05  # policies whose measured makespans differ by less are not told apart by one run
ALONE = 0.5  # a job had its GPU nearly to itself if on average fewer others worked beside it


class JobPhases(NamedTuple):
    """Seconds that an attempt took for each of its phases and for a step, and how many others worked beside it on
    average."""

    kind: str
    starting: float
    warming_up: float
    evaluating: float
    saving: float
    ending: float
    step: float
    beside: float


class Played(NamedTuple):
    """A job as it was: when it was submitted, might start, was placed and ended."""

    kind: str
    steps: int
    submitted: float
    ready: float
    placed: float
    ended: float


class Beside(NamedTuple):
    """A run, measured or simulated: seconds from the first job that could start to the last end, the mean time from
    there to the end of a job, and kilojoules."""

    makespan_s: float
    completion_s: float
    energy_kj: float | None


@dataclass(frozen=True)
class Recorded:
    """A trace that was played. `steps` is the share of each kind's steps. `current` names the runs whose policy is
    still as it was. Of the first traces neither phases nor placements were recorded, and `gap` drew their arrivals."""

    name: str
    runs: Mapping[str, dict[str, Any]]
    steps: float
    current: frozenset[str]
    gap: float | None = None

    @property
    def in_detail(self) -> bool:
        return self.gap is None

    @property
    def label(self) -> str:
        return f"{self.name}, seed {next(iter(self.runs.values()))['seed']}" if self.named else self.name

    @property
    def named(self) -> bool:
        """Whether its jobs are scripts of the traces with names: they validate, save and wait for data."""
        return any("trace" in row for row in self.runs.values())

    def settings(self, run: str) -> dict[str, Any]:
        """The settings of `manager_trace.py` that differ for a run such as "magm/monitoring.window=10s"."""
        changes = own_name(run).partition("+")[0].split("/")[1:] if self.named else []
        values = [each.partition("=")[::2] for each in changes]
        return {name.rpartition(".")[2]: None if value == "off" else parse_duration(value) for name, value in values}

    def rules(self, run: str) -> Rules:
        values = self.settings(run)
        values.pop("min_speed", None)  # of jobs, not of the site
        return replace(Rules(), **values) if self.named else RULES

    def of_all_runs(self, key: str) -> list[Any]:
        """What its runs have, and after it what the runs of the first trace with predictions have."""
        return [row[key] for row in (*self.runs.values(), rows(DETAILED)[0]) if key in row]

    def unknown_kinds(self) -> set[str]:
        """The kinds of which nothing was predicted."""
        kinds = {job.kind for run in self.runs for job in self.played(run)}
        return kinds - {kind for works in self.of_all_runs("works") for kind in works}

    def steps_of(self, kind: str) -> int:
        """How many steps a job makes."""
        return max(1, round(next(each.steps for each in KINDS if each.name == kind) * self.steps))

    def played(self, run: str) -> list[Played]:
        each = self.runs[run]["each"]
        if self.in_detail:
            return [
                Played(
                    job["name"],
                    job["told"]["steps"],
                    job["submitted"],
                    job["submitted"] if job["queued"] is None else job["queued"],
                    job["attempts"][0]["placed"],
                    job["attempts"][-1]["ended"],
                )
                for job in each
            ]
        moments = [moment for moment, _ in arrivals(Trace(KINDS, len(each), self.gap or 0.0, self.steps, seed=7))]
        ready = moments if run == "exclusive" else estimated(moments, [job[0] for job in each])
        return [
            Played(kind, self.steps_of(kind), came, min(may, came + waited), came + waited, came + waited + ran)
            for (kind, _, waited, ran), came, may in zip(each, moments, ready, strict=True)
        ]

    def used(self, kind: str) -> list[int]:
        """The bytes that its jobs of a kind used."""
        jobs = [job for row in self.runs.values() for job in row["each"] if self.in_detail and job["name"] == kind]
        return [attempt["used"] or 0 for job in jobs for attempt in job["attempts"]]

    @cached_property
    def timed(self) -> list[JobPhases]:
        if not self.in_detail:
            return []
        return [each for run in self.runs.values() for each in job_phases(run["each"])]


def estimated(moments: Sequence[float], kinds: Sequence[str]) -> list[float]:
    """When each job is estimated: eight at once, in the order in which they come; a kind once.

    >>> estimated([0.0, 1.0, 2.0, 30.0], ["a", "a", "b", "b"])
    [10.0, 10.0, 12.0, 30.0]
    """
    free, done = [0.0] * 8, dict[str, float]()
    for moment, kind in zip(moments, kinds, strict=True):
        if kind not in done:
            done[kind] = max(moment, heapq.heappop(free)) + ESTIMATE_S
            heapq.heappush(free, done[kind])
    return [max(moment, done[kind]) for moment, kind in zip(moments, kinds, strict=True)]


def seconds_of(pairs: Iterable[Sequence[float]]) -> float:
    return sum(end - begin for begin, end in pairs)


def job_phases(each: Iterable[Mapping[str, Any]]) -> Iterator[JobPhases]:
    """The phases of each job of a run that told of them."""
    jobs = [(job, job["told"], job["attempts"][-1]) for job in each if "last_step" in job["told"]]

    def working(begin: float, end: float) -> float:
        overlaps = [min(end, phases["last_step"]) - max(begin, phases["first_step"]) for _, phases, _ in jobs]
        return sum(max(0.0, seconds) for seconds in overlaps) / max(end - begin, 1e-6)

    for job, phases, attempt in jobs:
        imported, first, last = phases["imported"], phases["first_step"], phases["last_step"]
        evaluating, saving = (seconds_of(phases.get(key, ())) for key in ("evaluated", "saved"))
        during = [pair for key in ("evaluated", "saved") for pair in phases.get(key, ()) if pair[1] <= last]
        after = evaluating + saving - seconds_of(during)
        yield JobPhases(
            job["name"],
            imported - attempt["placed"],
            first - imported,
            evaluating,
            saving,
            attempt["ended"] - last - after,
            (last - first - seconds_of(during)) / max(1, phases["steps"] - 1),
            working(first, last) - 1,
        )


@cache
def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@cache
def alone() -> list[JobPhases]:
    """Jobs that were timed alone."""
    timed = [row["jobs"] for row in rows(DATA / "gpu_behaviour_h200.jsonl") if row["part"] == "alone"]
    as_run = [
        {"name": job["kind"], "told": job, "attempts": [{"placed": 0.0, "ended": job["ended"]}]}
        for jobs in timed
        for job in jobs
    ]
    return [each for job in as_run for each in job_phases([job])]


def recorded(folder: Path | None = None) -> list[Recorded]:
    """The traces of the repository and those in a folder. Runs of the same jobs at the same moments are one trace.

    Left out are traces with jobs of which nothing was predicted, as where they overbook. If jobs wait for estimates,
    the simulator cannot decide as the manager did: such runs are replayed with their placements only.
    """
    same: dict[object, list[tuple[str, dict[str, Any]]]] = {}
    for path in [*sorted(DATA.glob("h200_trace*.jsonl")), *(sorted(folder.glob("*.jsonl")) if folder else ())]:
        for row in rows(path):
            if path.stem in GAPS or "works" in row:
                played = tuple(row.get(key) for key in ("trace", "seed", "jobs", "mean_gap", "steps"))
                same.setdefault(path if path.stem in GAPS else played, []).append((path.stem, row))
    traces = []
    for recordings in same.values():
        runs: dict[str, dict[str, Any]] = {}
        current = set()
        for number, (stem, row) in enumerate(recordings, 1):
            run = row["run"] if row["run"] not in runs else f"{row['run']} of {stem} ({number})"
            runs[run] = row
            waits_for_estimates = not row.get("estimated", True) and not run.startswith("exclusive")
            if not waits_for_estimates and (not run.startswith("ullage") or stem not in OLD_POLICY):
                current.add(run)
        first = recordings[0][1]
        name = first.get("trace") or os.path.commonprefix([stem for stem, _ in recordings]).rstrip("_")
        gap, steps = GAPS.get(name, (None, first.get("steps")))
        traces.append(Recorded(name, runs, steps, frozenset(current), gap))
    return [each for each in traces if not each.unknown_kinds()]


def own_name(run: str) -> str:
    """A run without the file that tells it from another one of the same name."""
    return run.partition(" of ")[0]


def named(traces: Sequence[Recorded], name: str) -> Recorded:
    return next(each for each in traces if each.name == name)


def typical(values: Iterable[tuple[str, float]], kind: str) -> float:
    """The median of a kind; if there is none of it, of all kinds.

    >>> typical([("a", 1.0), ("a", 3.0), ("b", 9.0)], "a"), typical([("a", 1.0), ("b", 9.0)], "c")
    (2.0, 5.0)
    """
    known = list(values)
    return statistics.median([value for name, value in known if name == kind] or [value for _, value in known])


class Knowledge:
    """What the other traces tell of the jobs of one."""

    def __init__(self, wanted: Recorded, others: Sequence[Recorded]) -> None:
        self.wanted = wanted
        alike = [other for other in others if other.named == wanted.named and other.timed]
        # The scripts of traces with names take other steps; those without may be known from jobs alone.
        self.timed = [each for other in alike or (others if wanted.named else []) for each in other.timed]
        self.timed += [] if wanted.named and alike else alone()
        self.calm = [each for each in self.timed if each.beside < ALONE]
        self.exclusive = [each for other in others if not other.in_detail for each in other.played("exclusive")]

    def step(self, kind: str) -> float:
        measured = [each.step for each in self.calm if each.kind == kind]
        return statistics.median(measured) if measured else self.predicted(kind).step_s

    def predicted(self, kind: str) -> Utilization:
        """What Ullage predicts of a kind on the GPU."""
        work = next(works[kind] for works in self.wanted.of_all_runs("works") if kind in works)
        return replace(Utilization.from_dict(next(iter(work["predicted"].values()))), gpu=GPU)

    def bound(self, kind: str) -> int:
        """The estimate of a kind in bytes, or what its jobs used."""
        estimates = itertools.chain.from_iterable(self.wanted.of_all_runs("estimates"))
        bounds = [int(each["upper"]) for each in estimates if each["name"] == kind]
        return bounds[0] if bounds else max(self.wanted.used(kind))

    def of_phase(self, kind: str, phase: Callable[[JobPhases], float]) -> float:
        return typical([(each.kind, phase(each)) for each in self.timed], kind)

    def phases(self, kind: str) -> tuple[Phase, ...]:
        starting = self.of_phase(kind, lambda each: each.starting)
        warming = typical([(each.kind, each.warming_up) for each in self.calm], kind)
        evaluating = self.of_phase(kind, lambda each: each.evaluating)
        saving = self.of_phase(kind, lambda each: each.saving)
        ending = self.of_phase(kind, lambda each: each.ending)
        if not self.wanted.in_detail and self.exclusive:  # played on another day: it took another time to start
            rests = [
                (each.kind, each.ended - each.placed - each.steps * self.step(each.kind)) for each in self.exclusive
            ]
            scale = max(0.0, typical(rests, kind)) / (starting + warming + ending)
            starting, warming, ending = starting * scale, warming * scale, ending * scale
        return (
            Phase("starting", starting),
            Phase("warming up", warming),
            WORKING,
            Phase("evaluating", evaluating, uses_gpu=True, holds_memory=True),
            Phase("saving", saving, holds_memory=True),
            Phase("ending", ending, holds_memory=True),
        )


class Compared(NamedTuple):
    """A run, by the simulator's decisions or with the recorded placements: measured and simulated."""

    recorded: Recorded
    run: str
    by_policy: bool
    real: Beside
    ours: Beside


class Replays:
    """All recorded traces, each with what the others tell of it."""

    def __init__(self, traces: Sequence[Recorded]) -> None:
        self.traces = traces
        self.known = {id(each): Knowledge(each, [other for other in traces if other is not each]) for each in traces}

    def simulated(
        self, recorded: Recorded, run: str, by_policy: bool, world: World = WORLD, policy: str | None = None
    ) -> SimulationResult:
        """One run, under its own policy or another one; a job has the number of its place in the trace."""
        known, played = self.known[id(recorded)], recorded.played(run)
        own, _, sharing = own_name(run).partition("+")
        policy = policy or own.partition("/")[0]
        kinds = {
            name: JobKind(
                name, known.bound(name), {GPU: known.predicted(name)}, {"ullage": known.bound(name)}, known.phases(name)
            )
            for name in {each.kind for each in played}
        }
        jobs = [
            TraceJob(
                number,
                each.ready if by_policy else each.placed,
                kinds[each.kind],
                work_s=(each.steps - 1) * known.step(each.kind),
                submitted=each.submitted,
            )
            for number, each in enumerate(played)
        ]
        scenario = Scenario(
            gpus=GPU,
            policy=policy if by_policy else "magm",
            estimator="ullage" if by_policy and policy != "exclusive" else "none",
            rules=recorded.rules(run) if by_policy else ALL_FIT,
            min_speed=recorded.settings(run).get("min_speed"),
            world=world,
            sharing=sharing or "time-slicing",
            foresight=recorded.in_detail,  # the manager of the first traces had no predictions
            pause_s=1.0 if by_policy else 0.0,
        )
        result = simulate(JobTrace(recorded.name, sorted(jobs, key=lambda job: job.arrival)), scenario)
        assert result.figures.done == len(jobs)
        return result

    def again(
        self, recorded: Recorded, run: str, by_policy: bool, world: World = WORLD, policy: str | None = None
    ) -> Beside:
        """The figures of one run, simulated."""
        result, played = self.simulated(recorded, run, by_policy, world, policy), recorded.played(run)
        begin = min(each.ready for each in played)
        ends = {job.id: job.attempts[-1].end for job in result.jobs}
        before_s = min(job.arrival for job in result.jobs)  # until then the GPU does nothing
        return Beside(
            max(ends.values()) - begin,
            statistics.mean(ends[number] - each.ready for number, each in enumerate(played)),
            (result.energy_j + before_s * result.gpus[0].power_w[0]) / 1000,
        )

    def rows(self, world: World = WORLD) -> Iterator[Compared]:
        for recorded, by_policy in itertools.product(self.traces, (False, True)):
            for run in recorded.runs:
                if not by_policy or run in recorded.current:
                    again = self.again(recorded, run, by_policy, world)
                    yield Compared(recorded, run, by_policy, measured(recorded, run), again)

    def same_order(self, recorded: Recorded, run: str) -> tuple[int, int]:
        """How many pairs of jobs were placed in the order of the simulation, and how many pairs there are. Those that
        were placed within two seconds of each other do not count."""
        real = [each.placed for each in recorded.played(run)]
        ours = {job.id: job.attempts[0].begin for job in self.simulated(recorded, run, by_policy=True).jobs}
        apart = [
            (real[a] < real[b], ours[a] < ours[b])
            for a, b in itertools.combinations(range(len(real)), 2)
            if min(abs(real[a] - real[b]), abs(ours[a] - ours[b])) > 2
        ]
        return sum(one == other for one, other in apart), len(apart)


def measured(recorded: Recorded, run: str) -> Beside:
    played = recorded.played(run)
    begin = min(each.ready for each in played)
    completion = statistics.mean(each.ended - each.ready for each in played)
    return Beside(max(each.ended for each in played) - begin, completion, recorded.runs[run]["energy_kj"])


def history_of(run: dict[str, Any]) -> dict[str, Any]:
    """A recorded run as the manager tells it (`Client.trace`)."""
    policy, _, sharing = run["run"].partition("+")
    rules = asdict(RULES)
    del rules["predict"]
    jobs = [
        {
            "id": number,
            "user": "user",
            "name": job["name"],
            "state": job["state"],
            "submitted": job["submitted"],
            "queued": job["queued"],
            "gpus": 1,
            "priority": 0,
            "time_limit": None,
            "work": job["name"],
            "promise": job["attempts"][0]["promise"],
            "attempts": [each | {"slots": each["gpus"]} for each in job["attempts"]],
        }
        for number, job in enumerate(run["each"])
    ]
    return {
        "since": 0.0,
        "until": run["makespan_s"],
        "policy": policy,
        "sharing": sharing or "time-slicing",
        "min_speed": 0.8,
        "rules": rules,
        "reading_s": READING_S,
        "all": True,
        "jobs": jobs,
        "gpus": [{"id": 0, "index": 0, "name": GPU, "total": find_gpu(GPU).usable, "mig": False}],
        "works": {name: work["predicted"] for name, work in run["works"].items()},
    }


def from_histories(detailed: Recorded) -> Iterator[tuple[str, str, float, float]]:
    """Each run of a trace, and the others as they would have been by it: from which run, which one, its makespan, and
    what comes out."""
    for known, wanted in itertools.product(detailed.runs.values(), repeat=2):
        policy, _, sharing = wanted["run"].partition("+")
        history = history_of(known)
        scenario = scenario_of_history(history).but(
            policy=policy, sharing=sharing or "time-slicing", startup_s=STARTUP_S, estimator="promised"
        )
        result = simulate(trace_of_history(history, startup_s=STARTUP_S), scenario)
        yield known["run"], wanted["run"], wanted["makespan_s"], result.figures.total_s


def disagreements(rows: Sequence[Compared]) -> list[str]:
    """Pairs of runs of one trace whose order is another one in the simulation, where they truly differ."""
    wrong = []
    for one, other in itertools.combinations(rows, 2):
        far = abs(one.real.makespan_s / other.real.makespan_s - 1) > FAR
        same = (one.real.makespan_s < other.real.makespan_s) == (one.ours.makespan_s < other.ours.makespan_s)
        if one.recorded is other.recorded and one.by_policy == other.by_policy and far and not same:
            wrong.append(f"{one.recorded.name}: {one.run} and {other.run}")
    return wrong


def off(ours: float | None, real: float | None) -> str:
    return "unknown" if ours is None or real is None else f"{100 * (ours / real - 1):+.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="more traces that manager_trace.py wrote")
    replays = Replays(recorded(parser.parse_args().traces))
    rows = list(replays.rows())
    for by_policy, title in ((False, "with the recorded placements"), (True, "with the policy")):
        print(f"| {title} | run | makespan, s | | completion, s | | energy |")
        print("|---|---|---|---|---|---|---|")
        these = [each for each in rows if each.by_policy == by_policy]
        for each in these:
            offs = [off(ours, real) for ours, real in zip(each.ours, each.real, strict=True)]
            both = [f"{real:.1f} / {ours:.1f}" for ours, real in zip(each.ours[:2], each.real[:2], strict=True)]
            name = f"{each.recorded.label} | {each.run}"
            print(f"| {name} | {both[0]} | {offs[0]} | {both[1]} | {offs[1]} | {offs[2]} |")
        print()
        for number, name in enumerate(("makespan", "completion")):
            errors = [abs(each.ours[number] / each.real[number] - 1) for each in these]
            print(f"{name}: {100 * statistics.mean(errors):.1f}% off on average, {100 * max(errors):.1f}% at most")
        print(f"in another order: {', '.join(disagreements(these)) or 'none'}\n")
    for each in replays.traces:
        for run in sorted(each.current):
            same, pairs = replays.same_order(each, run)
            print(f"{each.label}, {run}: {same} of {pairs} pairs of jobs were placed in the simulated order")
    print()
    print("| when jobs could start in | magm, measured | magm, simulated | ullage as it is, simulated |")
    print("|---|---|---|---|")
    for each in replays.traces:
        for run in each.runs if each.in_detail else ():
            if run.startswith("magm") and run in each.current:
                both = [replays.again(each, run, by_policy=True, policy=policy) for policy in ("magm", "ullage")]
                cells = [f"{one.makespan_s:.1f} s, {one.completion_s:.1f} s" for one in (measured(each, run), *both)]
                print(f"| {each.label}, {run} | {' | '.join(cells)} |")
    print()
    for known, wanted, real, ours in from_histories(named(replays.traces, DETAILED.stem)):
        print(f"from the history of {known}: {wanted} {real:.1f} / {ours:.1f} s, {off(ours, real)}")


if __name__ == "__main__":
    main()
