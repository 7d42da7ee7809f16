"""The manager's recorded runs on an H200, simulated again: what comes out beside what was measured.

    python benchmarks/gpu/simulated_reality.py

A simulation is given what was known before a run: when jobs come, how long each kind takes alone, what Ullage predicts
of it on the GPU, how long estimates take, the daemon's settings, and how a GPU behaves (`gpu_behaviour.py`). It gets
nothing of a run in which jobs shared the GPU. Times alone come from `gpu_behaviour.py`; of kinds that were not timed
there, the step is the predicted one and the rest is that of the exclusive run.
"""

from __future__ import annotations

import heapq
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
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
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.performance.result import Utilization

DATA = Path(__file__).resolve().parents[1] / "data"
GPU = "H200"
RULES = Rules(smact_limit=0.8, window=10.0, fresh_busy=0.2)  # the settings of `manager_trace.py`
READING_S = 1.0  # between two readings of the daemon's monitor; half of it is their mean age
STARTUP_S = 11.0  # of the jobs of the last trace alone, until their first step: 10 to 13
# Each kind has its own start-up; predicted slowdowns are taken as true.
WORLD = World(startup_s=STARTUP_S, interference_error=0.0, reading_s=READING_S, monitor_delay_s=READING_S / 2)
ESTIMATE_S = 10.0  # the first job of a kind, when the first two traces were played: ten to twenty, as was noted then
FAR = 0.05  # policies whose measured makespans differ by less are not told apart by one run


class Alone(NamedTuple):
    """A kind of job alone: seconds for a step, and for all that is no step (imports, the first kernels, the end)."""

    step_s: float
    rest_s: float


class Beside(NamedTuple):
    """A run, measured or simulated: seconds from the first arrival to the last end, means of waiting and running, and
    kilojoules."""

    makespan_s: float
    waited_s: float
    ran_s: float
    energy_kj: float


@dataclass(frozen=True)
class Recorded:
    """A trace that was played. `estimated`: all estimates were there before it began. `foresight`: the daemon was told
    what jobs do on a GPU."""

    name: str
    jobs: int
    gap: float
    steps: float
    estimated: bool = False
    foresight: bool = False

    @cached_property
    def runs(self) -> list[dict[str, Any]]:
        return rows(self.name)

    @cached_property
    def arrivals(self) -> list[tuple[float, str]]:
        """When jobs came, and their kinds."""
        each = self.runs[0]["each"]
        played = [job["name"] if isinstance(job, dict) else job[0] for job in each]
        kinds = [kind for kind in KINDS if not self.estimated or kind.name in TIMED]
        found = [
            (moment, kind.name) for moment, kind in arrivals(Trace(tuple(kinds), self.jobs, self.gap, self.steps, 7))
        ]
        assert [name for _, name in found] == played, f"{self.name} was not played with this seed"
        return found

    @cached_property
    def alone(self) -> dict[str, Alone]:
        if self.estimated:
            return timed()
        found = {}
        exclusive = next(run for run in self.runs if run["run"] == "exclusive")["each"]
        for name in {name for _, name in self.arrivals}:
            step_s = timed()[name].step_s if name in timed() else predicted(name).step_s
            ran = statistics.median(job[3] for job in exclusive if job[0] == name)
            found[name] = Alone(step_s, max(0.0, ran - self.steps_of(name) * step_s))
        return found

    def steps_of(self, name: str) -> int:
        """How many steps a job makes."""
        kind = next(kind for kind in KINDS if kind.name == name)
        return max(1, round(kind.steps * self.steps))


TIMED = ("resnet18_cifar", "efficientnet_cifar", "resnet50", "mobilenet", "vgg16", "bert_base", "gpt2")
RECORDED = (
    Recorded("h200_trace", 40, 1.2, 0.25),
    Recorded("h200_trace_long", 24, 2.0, 1.0),
    Recorded("h200_trace_detail", 17, 1.0, 0.5, estimated=True, foresight=True),
)


@cache
def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


@cache
def predicted(name: str) -> Utilization:
    """What Ullage predicts of a kind on the GPU, before anything was measured."""
    told = next(iter(rows("h200_trace_detail")[0]["works"][name]["predicted"].values()))
    return replace(Utilization.from_dict(told), gpu=GPU)


@cache
def bounds() -> dict[str, int]:
    """The estimate of each kind in bytes."""
    return {each["name"]: each["upper"] for each in rows("h200_trace_detail")[0]["estimates"]}


@cache
def timed() -> dict[str, Alone]:
    """The kinds that were timed alone."""
    found = {}
    for row in rows("gpu_behaviour_h200"):
        for job in row["jobs"] if row["part"] == "alone" else ():
            step = (job["last_step"] - job["first_step"]) / (job["steps"] - 1)
            found[job["kind"]] = Alone(step, job["ended"] - job["steps"] * step)
    return found


def estimated(arrivals: Sequence[tuple[float, str]], seconds: float, at_once: int) -> list[float]:
    """When each job is estimated: so many at once, in the order in which they come; a kind once.

    >>> estimated([(0.0, "a"), (1.0, "a"), (2.0, "b"), (30.0, "b")], seconds=10.0, at_once=1)
    [10.0, 10.0, 20.0, 30.0]
    """
    free, done = [0.0] * at_once, dict[str, float]()
    for moment, kind in arrivals:
        if kind not in done:
            done[kind] = max(moment, heapq.heappop(free)) + seconds
            heapq.heappush(free, done[kind])
    return [max(moment, done[kind]) for moment, kind in arrivals]


def simulated(recorded: Recorded, run: str, world: World) -> SimulationResult:
    """One run, simulated; a job has the number of its place in the trace."""
    policy, _, sharing = run.partition("+")
    arrivals, alone = recorded.arrivals, recorded.alone
    kinds = {
        name: JobKind(name, bounds()[name], {GPU: predicted(name)}, {"ullage": bounds()[name]}, alone[name].rest_s)
        for name in {name for _, name in arrivals}
    }
    moments = [moment for moment, _ in arrivals]
    if policy != "exclusive" and not recorded.estimated:
        moments = estimated(arrivals, ESTIMATE_S, at_once=8)
    jobs = [
        TraceJob(number, moment, kinds[name], work_s=recorded.steps_of(name) * alone[name].step_s)
        for number, (moment, (_, name)) in enumerate(zip(moments, arrivals, strict=True))
    ]
    scenario = Scenario(
        gpus=GPU,
        policy=policy,
        estimator="none" if policy == "exclusive" else "ullage",
        rules=RULES,
        world=world,
        sharing="mps" if sharing == "mps" else "timeslice",
        foresight=recorded.foresight,
        min_speed=0.8,  # the default of the manager that was recorded
    )
    found = simulate(JobTrace(recorded.name, sorted(jobs, key=lambda job: job.arrival)), scenario)
    assert found.figures.done == len(jobs)
    return found


def again(recorded: Recorded, run: str, world: World = WORLD) -> Beside:
    """The figures of one run, simulated."""
    found, arrivals = simulated(recorded, run, world), recorded.arrivals
    waits = [job.attempts[0].begin - arrivals[job.id][0] for job in found.jobs]
    begin = min(job.arrival for job in found.jobs)  # until then the GPU does nothing
    return Beside(
        max(job.attempts[-1].end for job in found.jobs),
        statistics.mean(waits),
        found.figures.running_s or 0.0,
        (found.energy_j + begin * found.gpus[0].power_w[0]) / 1000,
    )


def compared(world: World = WORLD) -> Iterator[tuple[Recorded, str, Beside, Beside]]:
    """All runs: the trace, the run, what was measured and what was simulated."""
    for recorded in RECORDED:
        for run in recorded.runs:
            measured = Beside(run["makespan_s"], run["waited_s"], run["ran_s"], run["energy_kj"])
            yield recorded, run["run"], measured, again(recorded, run["run"], world)


def same_order(recorded: Recorded, run: dict[str, Any]) -> tuple[int, int]:
    """How many pairs of jobs were placed in the order of the simulation, and how many pairs there are. Those that
    were placed within two seconds of each other do not count."""
    real = [job["attempts"][0]["placed"] for job in run["each"]]
    ours = {job.id: job.attempts[0].begin for job in simulated(recorded, run["run"], WORLD).jobs}
    apart = [
        (real[a] < real[b], ours[a] < ours[b])
        for a, b in itertools.combinations(range(len(real)), 2)
        if min(abs(real[a] - real[b]), abs(ours[a] - ours[b])) > 2
    ]
    return sum(one == other for one, other in apart), len(apart)


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


def replays() -> Iterator[tuple[str, str, float, float]]:
    """Each detailed run, and the others of its trace as they would have been by it: from which run, which one, its
    makespan, and what comes out."""
    for recorded in RECORDED:
        for known, wanted in itertools.product(recorded.runs if recorded.estimated else (), repeat=2):
            policy, _, sharing = wanted["run"].partition("+")
            told = history_of(known)
            scenario = scenario_of_history(told).but(
                policy=policy, sharing=sharing or "timeslice", startup_s=STARTUP_S, estimator="promised"
            )
            found = simulate(trace_of_history(told, startup_s=STARTUP_S), scenario)
            yield known["run"], wanted["run"], wanted["makespan_s"], found.figures.total_s


def disagreements(found: Sequence[tuple[Recorded, str, Beside, Beside]]) -> list[str]:
    """Pairs of runs of one trace whose order is another one in the simulation, where they truly differ."""
    wrong = []
    for (trace_a, run_a, real_a, ours_a), (trace_b, run_b, real_b, ours_b) in itertools.combinations(found, 2):
        far = abs(real_a.makespan_s / real_b.makespan_s - 1) > FAR
        same = (real_a.makespan_s < real_b.makespan_s) == (ours_a.makespan_s < ours_b.makespan_s)
        if trace_a is trace_b and far and not same:
            wrong.append(f"{trace_a.name}: {run_a} and {run_b}")
    return wrong


def main() -> None:
    print("| trace | run | makespan, s | | waiting, s | running, s | energy, kJ | |")
    print("|---|---|---|---|---|---|---|---|")
    found = list(compared())
    for recorded, run, real, ours in found:
        both = [f"{a:.1f} / {b:.1f}" for a, b in zip(real, ours, strict=True)]
        off = [f"{100 * (b / a - 1):+.1f} %" for a, b in ((real[0], ours[0]), (real[3], ours[3]))]
        print(f"| `{recorded.name}` | {run} | {both[0]} | {off[0]} | {both[1]} | {both[2]} | {both[3]} | {off[1]} |")
    errors = [abs(ours.makespan_s / real.makespan_s - 1) for *_, real, ours in found]
    print(f"\nmakespan: {100 * statistics.mean(errors):.1f} % off on average, {100 * max(errors):.1f} % at most")
    print(f"in another order: {', '.join(disagreements(found)) or 'none'}")
    for known, wanted, real, ours in replays():
        print(f"from the history of {known}: {wanted} {real:.1f} / {ours:.1f} s, {100 * (ours / real - 1):+.1f} %")
    for recorded in RECORDED:
        for run in recorded.runs if recorded.estimated else ():
            same, pairs = same_order(recorded, run)
            print(f"{recorded.name}, {run['run']}: {same} of {pairs} pairs of jobs were placed in the simulated order")


if __name__ == "__main__":
    main()
