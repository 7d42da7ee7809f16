"""Jobs side by side: what is predicted of their speeds decides who may join, and what is measured corrects it."""

import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from ullage.manager.core.works import Works, read_utilization
from ullage.manager.monitor import Monitor, NvmlSource
from ullage.manager.monitor.readings import AT_EVERY_LOOK
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
    "light": {"step_s": 0.02, "gpu_s": 0.001, "host_s": 0.02, "smact": 0.05, "smocc": 0.01, "drama": 0.02,
              "power_w": 150.0},
}  # fmt: skip
ALONE = {
    name: Utilization(**REST, **figures, energy_j=figures["power_w"] * figures["step_s"])
    for name, figures in FIGURES.items()
}
TRAIN = "import os, sys, time\nwhile not os.path.exists(f'proceed-{sys.argv[2]}'): time.sleep(0.02)\n"


def gpm(gract, smact, drama=10.0):
    """What the counters show, in percent."""
    return {
        pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: gract,
        pynvml.NVML_GPM_METRIC_SM_UTIL: smact,
        pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: smact / 2,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: drama,
    }


@pytest.fixture
def serve(make_here, monkeypatch, tmp_path):
    """A daemon with one GPU; what is estimated of a job is what its first argument names."""

    def estimated(entry, request, **more):
        told = ALONE[request["questions"][0]["args"][0]].to_dict()
        if request["whole"]:
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
            }
            return Outcome(answer={"estimates": [whole | {"utilization": told}], "advice": None})
        return Outcome(answer={"upper": 4 << 30, "figure": 1, "fits": True, "gpu": H200, "utilization": {H200: told}})

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


def windows(here, count):
    """Wait until so many windows of readings are over."""
    meter, context = here.daemon.context.work_meter, here.daemon.context
    last = meter.windows + count

    def over():
        here.daemon._loop.call_soon_threadsafe(context.service.wake)
        return meter.windows >= last

    here.until(over, f"{count} windows")


def refused(here, number):
    return here.until(lambda: "of its speed" in (here.job(number)["reason"] or "") and here.job(number), "a refusal")


def test_a_job_waits_for_a_partner_beside_whom_it_keeps_the_speed_that_its_owner_asked_for(serve):
    here = serve(FakeGpu(uuid="GPU-a", used=0, utilization=30))
    first = submit(here, "heavy", "a", min_speed=0.4)
    assert running(here, first)["speed"] == 1.0
    strict = refused(here, submit(here, "heavy", "s", min_speed=0.6))
    assert strict["reason"].startswith("needs 4.00 GiB on a GPU; on GPU 0 it would run at ")
    assert f"beside job {first} (together they want " in strict["reason"]
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


def test_a_dry_run_with_an_estimate_says_how_fast_it_and_its_neighbour_would_be(serve):
    here = serve(FakeGpu(uuid="GPU-a", used=0, utilization=30))
    first = submit(here, "heavy", "a", min_speed=0.4)
    running(here, first)
    job = {"command": [sys.executable, "train.py", "heavy", "b"], "cwd": str(here.folder / "work"), "min_speed": 0.4}
    asked = here.call("estimate", question={name: job[name] for name in ("command", "cwd")} | {"gpu": "H200"})["id"]
    here.until(lambda: here.call("estimated", estimate=asked)["state"] == "done", "the estimate")

    def tried():
        answer = here.call("dry_run", job=job, estimate=asked)
        return answer["starts"] and answer

    answer = here.until(tried, "the expected load of the first job to fade")
    [start], [beside] = answer["starts"], answer["beside"]
    assert (start["promise"], answer["estimate"]) == (4 << 30, f"estimated by ullage for {H200}")
    assert 0.4 <= start["speed"] < 0.6 and beside == {"job": first, "gpu": 0, "speed": 1.0, "then": start["speed"]}
    second = running(here, submit(here, "heavy", "b", min_speed=0.4))
    assert second["speed"] == start["speed"], "what was foretold comes true"


def test_a_policy_that_does_not_heed_speeds_says_so(make_here):
    here = make_here(policy="magm")
    job = {"command": ["true"], "cwd": "/", "memory": 1 << 30, "min_speed": 0.9}
    said = here.call("submit", job=job, key="the first of two jobs")["notes"]
    assert said == ["min_speed is not heeded here: the policy is magm, not ullage"]
    assert here.call("submit", job=job | {"min_speed": None}, key="the second of two jobs")["notes"] == []


def test_what_is_measured_takes_the_place_of_what_was_predicted(serve, make_here, tmp_path):
    """Also after a kill -9, and for the same job when it is submitted again."""
    gpu = FakeGpu(uuid="GPU-a", used=0, power_mw=250_000)
    here = serve(gpu)
    first, second = (submit(here, "heavy", name, min_speed=0.8) for name in "ab")
    assert running(here, first)["utilization"]["step_s"] == 0.1
    before = refused(here, second)["utilization"]
    assert (before["smact"], before["windows"]) == (0.9, 0)
    gpu.busy = gpm(gract=30.0, smact=30.0)
    windows(here, 4)  # after so many it may join; from then on both are corrected together
    found = running(here, second)["utilization"]
    assert 0.2 < found["smact"] < 0.5 and 250.0 < found["power_w"] < 400.0 and found["step_s"] > 0.15
    (here.folder / "work/proceed-a").touch()
    (here.folder / "work/proceed-b").touch()
    for number in (first, second):
        here.until_over(number)
    jobs = here.folder / "manager/jobs"  # their orders are cleared away at the end: not while they are being copied
    here.until(lambda: not any(jobs.glob("*/*/order.json")), "both orders to go")
    shutil.copytree(here.folder / "manager", tmp_path / "killed/manager")  # what kill -9 would leave
    kept = here.call("status", job=second)[0]["utilization"]
    here.close()
    shutil.rmtree(tmp_path / "manager")
    (tmp_path / "killed/manager").rename(tmp_path / "manager")
    (tmp_path / "run").rename(tmp_path / "run-before")
    here = serve(gpu)
    assert here.job(second)["utilization"] == kept
    again = submit(here, "heavy", "c", hold=True)
    here.until(lambda: here.job(again)["estimate"], "an estimate")
    assert here.job(again)["utilization"] == kept
    assert here.until(lambda: here.job(again)["utilization"], "figures")["windows"] >= 3


def test_readings_that_tell_nothing_change_nothing(serve):
    gpu = FakeGpu(uuid="GPU-a", used=0)
    here = serve(gpu)
    number = submit(here, "heavy", "a")
    running(here, number)
    for busy in ({}, gpm(math.nan, math.nan), gpm(0.0, 0.0), gpm(30.0, math.inf)):
        gpu.busy = busy
        windows(here, 2)
    found = here.job(number)["utilization"]
    assert (found["windows"], found["smact"], found["step_s"]) == (0, 0.9, 0.1)
    gpu.compute, gpu.used = {os.getpid(): 1 << 30}, 1 << 30  # a process that is none of its
    here.until(lambda: here.call("gpus")[0]["foreign"], "the stranger to be seen")
    gpu.busy, over = gpm(30.0, 30.0), here.daemon.context.work_meter.windows
    here.submit("sleep 0.5", gpus=0, memory=None)
    here.until(lambda: here.job(number + 1)["state"] == "done", "another look or two")
    assert here.job(number)["utilization"]["windows"] == 0 and here.daemon.context.work_meter.windows == over


SLOT = Slot("GPU-a", 0, H200, total=140 << 30)


@pytest.fixture
def works(store):
    return Works(store, "mps")


def keep(works, *kinds):
    store = works._store
    with store.transaction():
        return [works.keep(0, ["/", None, "train.py"], {H200: ALONE[kind].to_dict()}) for kind in kinds]


def test_the_same_work_is_one_and_another_is_another(works):
    heavy, light, again = keep(works, "heavy", "light", "heavy")
    assert heavy == again != light
    assert works.keep(0, ["/", None, "train.py"], {}) is None
    assert works.known(heavy) == {H200: ALONE["heavy"].to_dict()} and works.known("no such work") == {}


def test_corrections_are_damped_and_bounded(works):
    [heavy] = keep(works, "heavy")
    works.learn(SLOT, [heavy], {"smact": 0.1, "gract": 0.1})
    assert works.busy(heavy) == pytest.approx(0.5), "half way at first"
    for _ in range(40):
        works.learn(SLOT, [heavy], {"smact": 0.01, "gract": 0.01, "power_w": 9e4})
    found = works.utilization(heavy, H200)
    assert found.smact == pytest.approx(0.9 / 4) and found.step_s == pytest.approx(0.4), "to a quarter, and no further"
    assert found.power_w == 4 * 600.0 and found.drama == 0.8, "what was not measured stays"
    for _ in range(60):
        works.learn(SLOT, [heavy], {"smact": 0.6, "gract": 0.7})
    assert works.busy(heavy) == pytest.approx(0.6, abs=0.01), "and back"
    one = works.busy(heavy)
    works.learn(SLOT, [heavy], {"smact": 0.2})
    assert one > works.busy(heavy) > 0.54, "a single window counts for little by then"


def test_of_jobs_that_share_each_is_corrected_by_the_same_part(works):
    heavy, light = keep(works, "heavy", "light")
    speeds = works.predict([heavy, light], SLOT)
    assert works.predict([light, heavy], SLOT).shares == speeds.shares[::-1]
    expected = sum(ALONE[kind].smact * speed for kind, speed in zip(("heavy", "light"), speeds.shares, strict=True))
    works.learn(SLOT, [heavy, light], {"smact": expected / 2, "gract": 0.5})
    parts = [
        works.utilization(work, H200).smact / ALONE[kind].smact for work, kind in ((heavy, "heavy"), (light, "light"))
    ]
    assert parts == pytest.approx([0.875, 0.875]), "half of half the weight that a job alone has"
    assert works.predict([heavy, light], SLOT).shares[1] >= speeds.shares[1]
    works.learn(SLOT, [heavy, light], {"smact": 0.99})
    assert works.utilization(heavy, H200).smact == pytest.approx(0.9 * 0.875), "a full GPU tells nothing apart"


def test_a_gpu_that_nobody_knows_and_a_work_that_is_gone_are_unknown(works):
    heavy, light = keep(works, "heavy", "light")
    assert works.predict([heavy, light], replace(SLOT, name="GeForce 9999")) is None
    assert works.predict([heavy, "gone"], SLOT) is None and works.busy("gone") is None


def test_what_cannot_be_read_any_more_is_unknown_and_stops_nobody(works, store):
    [heavy] = keep(works, "heavy")
    store.keep_work(WorkRecord(id="older", predicted={H200: {"smact": 0.5}}))
    store.database.write([("UPDATE works SET measured = '[1' WHERE id = ?", [(heavy,)])])
    again = Works(JobStore(store.database, clock=lambda: 0.0), "mps")
    for work in (heavy, "older"):
        assert again.busy(work) is None and again.shown(work, [H200]) is None
        assert again.predict([work, work], SLOT) is None
        again.learn(SLOT, [work], {"smact": 0.5})


def test_a_users_process_cannot_make_a_work_of_nonsense():
    good = ALONE["heavy"].to_dict()
    assert read_utilization({H200: good | {"notes": ["x" * 10**6]}}, [H200])[H200]["notes"] == []
    for bad in ({"smact": math.nan}, {"smact": 1.5}, {"step_s": 0.0}, {"step_s": math.inf}, {"kernels": "many"},
                {"gpu_s": -1.0}, {"power_w": True}, {"steady": "yes"}, {"flops": None}, {"kernel_groups": 3},
                {"kernel_groups": [[1.0, 2.0]]}, {"kernel_groups": [["many", 0.1, 0.1]]},
                {"kernel_groups": [[9.0, math.nan, 0.1]]}, {"kernel_groups": [[9.0, 0.1, -1.0]]},
                {"kernel_groups": [[9.0, 0.1, 0.1]] * 10_000}):  # fmt: skip
        assert read_utilization({H200: good | bad}, [H200]) == {}, bad
    for told in (None, [], {H200: []}, {H200: {}}, {"T4": good}):
        assert read_utilization(told, [H200]) == {}
