"""A manager like RAD-RM: one job at a time, no books, readings now and then, idle GPUs first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ullage.manager.placement import Rules
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.result import SimulationResult
from ullage.manager.simulation.scenario import Scenario, World
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.units import GIB

POLICIES = Path(__file__).resolve().parents[3] / "benchmarks/dissertation/rad_rm.py"
BLIND = Rules(smact_limit=None, free_floor=0, margin=0, unknown="floor", fair=False, backfill=False, stale_after=None)
QUIET = World(startup_s=0.0, interference_error=0.0, monitor_delay_s=0.0)
BASE = Scenario(gpus="A100-40GB", policy="magm", estimator="none", rules=BLIND, foresight=False, world=QUIET)
ALONE_NEXT = BASE.but(exclusive_after=1)


def job(number: int, arrival: float, gib: int, work_s: float = 1000.0, gpus: int = 1) -> TraceJob:
    return TraceJob(number, arrival, JobKind(f"{gib} GiB", gib * GIB), work_s=work_s, gpus=gpus)


def play(scenario: Scenario, *jobs: TraceJob, **settings: Any) -> SimulationResult:
    return simulate(JobTrace("made here", jobs), scenario.but(interference=False, **settings))


def test_a_crashed_job_blocks_all_until_a_gpu_is_idle() -> None:
    jobs = job(1, 0.0, 30), job(2, 10.0, 20), job(3, 20.0, 2)
    begins = {
        at_a_time: [each.attempts[-1].begin for each in play(ALONE_NEXT, *jobs, at_a_time=at_a_time).jobs]
        for at_a_time in (1, None)
    }
    assert begins[1] == [0.0, 1000.0, 2000.0]
    assert begins[None][2] == 20.0


def test_one_at_a_time_there_is_a_pause_between_decisions() -> None:
    found = play(BASE, *(job(number, 0.0, 2) for number in range(4)), at_a_time=1, pause_s=65.0)
    assert [each.attempts[0].begin for each in found.jobs] == [0.0, 65.0, 130.0, 195.0]


def test_without_a_ledger_promised_memory_is_free_until_used() -> None:
    jobs = job(1, 0.0, 30), job(2, 10.0, 30)
    oracle = {"policy": "worst-fit", "estimator": "oracle", "startup_s": 20.0}
    assert play(BASE, *jobs, **oracle).figures.ooms == 0
    assert play(BASE, *jobs, **oracle, bookkeeping=False).figures.ooms == 1
    later = job(1, 0.0, 30), job(2, 30.0, 30)
    assert play(BASE, *later, **oracle, bookkeeping=False).figures.ooms == 0


def test_without_a_ledger_others_join_a_restarted_job() -> None:
    jobs = job(1, 0.0, 30), job(2, 10.0, 20), job(3, 1010.0, 2)
    begins = {
        books: play(ALONE_NEXT, *jobs, at_a_time=1, bookkeeping=books).jobs[2].attempts[-1].begin
        for books in (True, False)
    }
    assert begins == {True: 2000.0, False: 1010.0}


def test_memory_is_what_it_was_when_the_monitor_last_looked() -> None:
    blind = {"policy": "worst-fit", "estimator": "oracle", "bookkeeping": False, "reading_s": 90.0}
    assert play(BASE, job(1, 10.0, 30), job(2, 80.0, 30), **blind).figures.ooms == 1
    assert play(BASE, job(1, 10.0, 30), job(2, 100.0, 30), **blind).figures.ooms == 0


def test_idle_gpus_come_first_and_turns_continue_on_shared_ones() -> None:
    def gpus(policy: str, *jobs: TraceJob, **settings: Any) -> list[int]:
        found = play(BASE.but(gpus="3xA100-40GB"), *jobs, policy=f"{POLICIES}:{policy}", **settings)
        return [each.attempts[0].gpus[0] for each in found.jobs]

    many = [job(number, 10.0 * number, 2) for number in range(7)]
    assert gpus("round_robin", *many) == [0, 1, 2, 0, 1, 2, 0]
    short = [job(1, 0.0, 2), job(2, 1.0, 2, work_s=50.0), job(3, 2.0, 2), job(4, 100.0, 2), job(5, 101.0, 2)]
    assert gpus("round_robin", *short) == [0, 1, 2, 1, 0]
    sizes = [job(1, 0.0, 9), job(2, 1.0, 20), job(3, 2.0, 30), job(4, 3.0, 5), job(5, 4.0, 12)]
    assert gpus("off", *sizes, estimator="oracle") == [0, 1, 2, 0, 0]
    assert gpus("obf", *sizes, estimator="oracle") == [0, 1, 2, 2, 1]
    assert gpus("magm", *sizes, estimator="oracle") == gpus("owf", *sizes, estimator="oracle") == [0, 1, 2, 0, 0]
    stale = {"bookkeeping": False, "reading_s": 90.0}
    assert gpus("magm", *sizes[:3], **stale) == gpus("lug", *sizes[:3], **stale) == [0, 1, 2]
