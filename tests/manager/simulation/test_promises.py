"""What jobs are promised by estimators, and the known workloads that they say it of."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.manager.simulation.made_runs import utilization

from ullage.errors import UllageError
from ullage.manager.simulation.known import MEASURED_ON, known_workload, known_workloads, promise_of
from ullage.manager.simulation.trace import JobKind
from ullage.units import GIB

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "training"))
from known_workloads import with_step  # noqa: E402

SMALL = "resnet18 cifar100 b32"


def test_every_known_workload_has_what_a_simulation_needs() -> None:
    assert len(known_workloads()) == 39 and sum(known.in_table for known in known_workloads().values()) == 35
    for known in known_workloads().values():
        alone = known.kind.alone[MEASURED_ON]
        assert alone.step_s == pytest.approx(known.step_s, rel=1e-3)
        assert 0 < alone.gpu_s <= alone.step_s * 1.0001 and 0 < alone.smact <= 1 and 40 < alone.power_w <= 400
        assert known.kind.alone["H200"].step_s <= alone.step_s * 1.05
        assert known.kind.estimates["ullage"] == pytest.approx(known.kind.memory, rel=0.9)
        assert not known.in_table or {"horus", "faketensor", "gpumemnet"} <= set(known.kind.estimates)


def test_jobs_waiting_for_images_leave_gpu_idle_at_any_batch() -> None:
    small, large = known_workload("mobilenet_v2 b32").kind, known_workload("mobilenet_v2 b128").kind
    assert small.alone[MEASURED_ON].waits_for_input and large.alone[MEASURED_ON].waits_for_input
    assert small.alone[MEASURED_ON].busy == pytest.approx(large.alone[MEASURED_ON].busy, abs=0.1)


def test_a_faster_gpu_is_faster_unless_the_data_loader_limits() -> None:
    images, text = known_workload("mobilenet_v2 b128").kind.alone, known_workload("gpt2_large b8").kind.alone
    assert images["H200"].step_s == images[MEASURED_ON].step_s and images["H200"].busy < images[MEASURED_ON].busy
    assert text["H200"].step_s < 0.5 * text[MEASURED_ON].step_s < text["T4"].step_s


def test_a_longer_step_does_the_same_work_and_waits() -> None:
    found = with_step(utilization("H200", 1.0, 0.9), 2.0)
    assert (found.step_s, found.gpu_s, found.smact, found.waits_for_input) == (2.0, 0.9, pytest.approx(0.4), True)
    assert 400.0 < found.energy_j < 800.0 and found.power_w == pytest.approx(found.energy_j / 2)


def test_a_measured_step_shorter_than_the_predicted_one_counts() -> None:
    found = with_step(utilization("H200", 1.0, 0.8), 0.4)
    assert (found.step_s, found.gpu_s) == (0.4, pytest.approx(0.4))
    assert found.smact == pytest.approx(1.0) and found.energy_j < 400.0


def test_promises_are_true_memory_nothing_or_what_the_trace_has() -> None:
    kind = JobKind("own", memory=3 * GIB, estimates={"gpumemnet": 8 * GIB, "faketensor": None})
    names = ("oracle", "none", "gpumemnet", "faketensor")
    assert [promise_of(kind, name) for name in names] == [3 * GIB, None, 8 * GIB, None]


def test_an_estimator_missing_in_the_trace_runs_and_is_cached() -> None:
    kept = known_workload(SMALL).kind
    asked = promise_of(replace(kept, estimates={}), "ullage")
    assert asked == pytest.approx(kept.estimates["ullage"], rel=0.05)


def test_an_unknown_job_has_no_estimates() -> None:
    kind = JobKind("mine", GIB, estimates={"horus": GIB})
    with pytest.raises(
        UllageError, match="the trace has no estimate by fast for jobs like mine.* of oracle .*, none, horus"
    ):
        promise_of(kind, "fast")
    with pytest.raises(UllageError, match="no estimator named 'hours'"):
        promise_of(kind, "hours")
