"""Jobs side by side: what is predicted of their speeds decides who may join."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ullage.manager.core.works import WorkloadProfiles, read_utilization
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.readings import AT_EVERY_LOOK
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.placement import Slot
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import WorkRecord
from ullage.performance.result import Utilization
from ullage.sandbox.parent import Outcome

sys.path.insert(0, str(Path(__file__).parent / "monitor"))
from fake_nvml import FakeGpu, FakeNvml  # noqa: E402

H200 = "NVIDIA H200"
REST = {"gpu": H200, "tensor": 0.0, "flops": 1e12, "bytes": 1e11, "kernels": 500, "steady": True, "measured": True}
FIGURES = {
    "heavy": {"step_s": 0.1, "gpu_s": 0.1, "host_s": 0.02, "smact": 0.9, "smocc": 0.4, "drama": 0.8, "power_w": 600.0},
}
FIGURES["light"] = dict(zip(FIGURES["heavy"], (0.02, 0.001, 0.02, 0.05, 0.01, 0.02, 150.0), strict=True))
ALONE = {
    name: Utilization(**REST, **figures, energy_j=figures["power_w"] * figures["step_s"])
    for name, figures in FIGURES.items()
}
TRAIN = "import os, sys, time\nwhile not os.path.exists(f'proceed-{sys.argv[2]}'): time.sleep(0.02)\n"


@pytest.fixture
def serve(make_here, monkeypatch, tmp_path):
    """A daemon with one GPU; what is estimated of a job is what its first argument names."""

    def estimated(entry, request, **more):
        told = ALONE[request["questions"][0]["args"][0]].to_dict()
        whole = {
            "gpu": H200,
            "gpu_memory": 140 << 30,
            "peak_allocated": 1,
            "peak_reserved": 1,
            "process_memory": 1,
            "upper": 4 << 30,
            "breakdown": {},
            "fits": True,
            "headroom": 1,
            "steps": 3,
            "seconds": 1.0,
            "utilization": told,
        }
        [gpu] = request["gpus"]
        answer = {"upper": 4 << 30, "figure": 1, "fits": True, "gpu": gpu, "utilization": {gpu: told}}
        return Outcome(answer=answer | {"estimates": [whole], "advice": None})

    monkeypatch.setattr("ullage.manager.core.estimates.run", estimated)

    def make(gpu, **given):
        source = NvmlSource(FakeNvml([gpu]), rates=AT_EVERY_LOOK)
        here = make_here(monitor=Monitor(source, interval=0.05, window=0.2), **given)
        (here.folder / "work/train.py").write_text(TRAIN)
        return here

    yield make
    for name in "abcdef":
        (tmp_path / f"work/proceed-{name}").touch()


def submit(here, kind, name, **more):
    job = {"command": [sys.executable, "train.py", kind, name], "cwd": str(here.folder / "work"), "estimator": "ullage"}
    return here.call("submit", job=job | more, key=f"a job by the name of {name}")["jobs"][0]


def running(here, number):
    here.until(lambda: here.job(number)["state"] == "running", f"job {number} to run")
    return here.job(number)


def refused(here, number):
    return here.until(lambda: "of its speed" in (here.job(number)["reason"] or "") and here.job(number), "a refusal")


def test_a_job_waits_for_a_partner_that_leaves_its_speed(serve):
    here = serve(FakeGpu(uuid="GPU-a", used=0, utilization=30))
    first = submit(here, "heavy", "a", min_speed=0.4)
    assert running(here, first)["speed"] == 1.0
    strict = refused(here, submit(here, "heavy", "s", min_speed=0.6))
    assert strict["reason"].startswith("needs 4.00 GiB on a GPU; on GPU 0 it would run at ")
    assert f"next to job {first} (together they want " in strict["reason"]
    assert strict["reason"].endswith("; its --min-speed is 60%") and strict["min_speed"] == 0.6
    here.call("cancel", jobs=[strict["id"]])
    second = submit(here, "heavy", "b")
    assert 0.4 <= running(here, second)["speed"] < 0.6, "its owner asks for nothing, and the GPU is measured as idle"
    assert running(here, first)["speed"] == running(here, second)["speed"]
    third = refused(here, submit(here, "heavy", "c"))
    assert f"on GPU 0 job {first} would run at " in third["reason"] and third["min_speed"] is None
    assert third["reason"].endswith("; its --min-speed is 40%")
    (here.folder / "work/proceed-a").touch()
    assert running(here, third["id"])["speed"] == running(here, second)["speed"]


def test_a_dry_run_with_an_estimate_says_how_fast_it_would_be(serve):
    here = serve(FakeGpu(uuid="GPU-a", used=0, utilization=30))
    running(here, submit(here, "heavy", "a", min_speed=0.4))
    job = {"command": [sys.executable, "train.py", "heavy", "b"], "cwd": str(here.folder / "work"), "min_speed": 0.4}
    asked = here.call("estimate", question={name: job[name] for name in ("command", "cwd")} | {"gpu": "H200"})["id"]
    here.until(lambda: here.call("estimated", estimate=asked)["state"] == "done", "the estimate")

    def tried():
        answer = here.call("dry_run", job=job, estimate=asked)
        return answer["starts"] and answer

    answer = here.until(tried, "the expected load of the first job to fade")
    [start] = answer["starts"]
    assert (start["promise"], answer["estimate"]) == (4 << 30, f"estimated by ullage for {H200}")
    assert 0.4 <= start["speed"] < 0.6
    second = running(here, submit(here, "heavy", "b", min_speed=0.4))
    assert second["speed"] == start["speed"], "what was foretold comes true"


def test_a_policy_that_ignores_speeds_says_so(make_here):
    here = make_here(policy="magm")
    job = {"command": ["true"], "cwd": "/", "memory": 1 << 30, "min_speed": 0.9}
    said = here.call("submit", job=job, key="the first of two jobs")["notes"]
    assert said == ["min_speed is not heeded here: the policy is magm, not ullage"]
    assert here.call("submit", job=job | {"min_speed": None}, key="the second of two jobs")["notes"] == []


SLOT = Slot("GPU-a", 0, H200, total=140 << 30)


@pytest.fixture
def works(store):
    return WorkloadProfiles(store, "mps")


def keep(works, *kinds):
    store = works._store
    with store.transaction():
        return [works.keep(0, ["/", None, "train.py"], {H200: ALONE[kind].to_dict()}) for kind in kinds]


def test_the_same_work_is_one_and_another_is_another(works):
    heavy, light, again = keep(works, "heavy", "light", "heavy")
    assert heavy == again != light
    assert works.keep(0, ["/", None, "train.py"], {}) is None
    assert works.known(heavy) == {H200: ALONE["heavy"]} and works.known("no such work") == {}
    speeds = works.predict([heavy, light], SLOT)
    assert works.predict([light, heavy], SLOT).shares == speeds.shares[::-1]


def test_unknown_gpus_and_deleted_workloads_have_no_speed(works):
    heavy, light = keep(works, "heavy", "light")
    assert works.predict([heavy, light], replace(SLOT, name="GeForce 9999")) is None
    assert works.predict([heavy, "gone"], SLOT) is None and works.busy("gone") is None


def test_unreadable_speeds_are_unknown_and_stop_nothing(works, store):
    [heavy] = keep(works, "heavy")
    store.keep_work(WorkRecord(id="older", predicted={H200: {"smact": 0.5}}))
    store.database.write([("UPDATE works SET predicted = '[1' WHERE id = ?", [(heavy,)])])
    again = WorkloadProfiles(JobStore(store.database, clock=lambda: 0.0), "mps")
    for work in (heavy, "older"):
        assert again.busy(work) is None and again.shown(work, [H200]) is None
        assert again.predict([work, work], SLOT) is None


def test_a_users_process_cannot_make_a_work_of_nonsense():
    good = ALONE["heavy"].to_dict()
    assert read_utilization({H200: good | {"notes": ["x" * 10**6]}}, [H200])[H200]["notes"] == []
    for bad in (
        {"smact": math.nan},
        {"smact": 1.5},
        {"step_s": 0.0},
        {"step_s": math.inf},
        {"kernels": "many"},
        {"gpu_s": -1.0},
        {"power_w": True},
        {"steady": "yes"},
        {"flops": None},
        {"kernel_groups": 3},
        {"kernel_groups": [[1.0, 2.0]]},
        {"kernel_groups": [["many", 0.1, 0.1]]},
        {"kernel_groups": [[9.0, math.nan, 0.1]]},
        {"kernel_groups": [[9.0, 0.1, -1.0]]},
        {"kernel_groups": [[9.0, 0.1, 0.1]] * 10_000},
    ):
        assert read_utilization({H200: good | bad}, [H200]) == {}, bad
    for told in (None, [], {H200: []}, {H200: {}}, {"T4": good}):
        assert read_utilization(told, [H200]) == {}
