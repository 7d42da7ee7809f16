"""The daemon on GPUs that NVML shows: MIG instances, memory by process, a GPU that is lost. NVML is a stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from tests.paths import ROOT, let_everybody_in

from ullage.errors import AlreadyServing, NotAllowed
from ullage.manager.core import daemon as daemon_module
from ullage.manager.core import locks as locks_module
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.settings import read_settings

sys.path.insert(0, str(Path(__file__).parent / "monitor"))
from fake_nvml import GIB, FakeGpu, FakeNvml  # noqa: E402

WAIT = "echo $$ > pid-$ULLAGE_JOB_ID; while [ ! -e proceed ]; do sleep 0.05; done"


@pytest.fixture
def on(make_here):
    """Makes a daemon on these GPUs."""

    def make(*gpus, **given):
        return make_here(monitor=Monitor(NvmlSource(FakeNvml(list(gpus))), interval=0.1), **given)

    return make


def pid_of(here, number):
    file = here.folder / f"work/pid-{number}"
    return int(here.until(lambda: file.exists() and file.read_text().strip(), "the job's process"))


def test_a_mig_instance_takes_one_job_by_its_own_name(on):
    parts = [FakeGpu(uuid=f"MIG-{n}", total=16 * GIB, reserved=0, used=0, instance_id=n) for n in (1, 2)]
    here = on(FakeGpu(uuid="GPU-a", instances=parts), placing={"smact_limit": "off"})
    script = f"echo $CUDA_VISIBLE_DEVICES; {WAIT}"
    jobs = [here.submit(script) for _ in range(3)]
    here.until(lambda: [here.job(number)["state"] for number in jobs[:2]] == ["running"] * 2, "two jobs")
    here.until(lambda: here.job(jobs[2])["reason"], "a reason")
    assert here.job(jobs[2])["state"] == "queued", "1 GiB each would fit, but an instance is one job's"
    assert {here.job(number)["gpus_used"][0] for number in jobs[:2]} == {"MIG-1", "MIG-2"}
    (here.folder / "work/proceed").touch()
    assert [here.until_over(number)["state"] for number in jobs] == ["done"] * 3
    assert {here.call("logs", job=number)["text"].strip() for number in jobs} == {"MIG-1", "MIG-2"}


def test_a_gpu_is_measured_over_the_busy_window_of_the_settings(on, monkeypatch):
    spans, window = set(), Monitor.window
    monkeypatch.setattr(Monitor, "window", lambda self, gpu, span=None: spans.add(span) or window(self, gpu, span))
    here = on(FakeGpu(uuid="GPU-a"), placing={"busy_window": "4s"})
    here.until(lambda: 4.0 in spans, "a reading")
    assert spans == {None, 4.0}


def test_memory_is_put_down_to_the_job_whose_process_has_it(on, monkeypatch):
    monkeypatch.setattr(daemon_module, "_CURVES_EVERY", 0.0)
    gpu = FakeGpu(uuid="GPU-a", total=81 * GIB, used=0)
    here = on(gpu, placing={"smact_limit": "off"})
    number = here.submit(WAIT, memory=10 * GIB)
    pid = pid_of(here, number)
    gpu.compute, gpu.used = {pid: 12 * GIB, 1: 3 * GIB}, 15 * GIB  # 1 has no token of ours
    here.until(lambda: here.job(number)["used"] == 12 * GIB, "what it takes to be seen")
    here.until(lambda: [e for e in here.call("events")["events"] if e["kind"] == "over promise"], "the report")
    shown = here.call("gpus")[0]
    assert (shown["used"], shown["promised"]) == (15 * GIB, 10 * GIB)
    kept = 'SELECT job FROM curves WHERE "values" LIKE ?'
    here.until(lambda: list(here.daemon.database.rows(kept, (f"%{12 * GIB}%",))), "its memory over time on disk")
    assert here.daemon.context.ledger.free("GPU-a") == (80 - 12 - 3) * GIB, "what it took counts, and what others took"
    gpu.compute, gpu.used = {}, 0
    (here.folder / "work/proceed").touch()
    assert here.until_over(number)["attempts"][0]["used"] == 12 * GIB
    [curve] = here.call("memory", job=number)["attempts"]
    assert (curve["number"], curve["promise"], curve["step"]) == (1, 10 * GIB, 1.0)
    assert max(filter(None, curve["values"])) == 12 * GIB, "kept after its end"
    assert here.job(number)["more_memory"] == 17 * GIB, "a step more than it took"


def test_a_gpu_off_its_bus_gets_no_job_and_its_job_moves(on):
    gpus = [FakeGpu(uuid="GPU-a", used=0), FakeGpu(uuid="GPU-b", used=0)]
    here = on(*gpus, placing={"smact_limit": "off"})
    script = f"[ -e again ] && exit 0; touch again; {WAIT}; exit 1"
    number = here.submit(script, exclusive=True)
    pid_of(here, number)
    place = here.job(number)["gpus_used"][0]
    next(gpu for gpu in gpus if gpu.uuid == place).errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    here.until(lambda: [gpu for gpu in here.call("gpus") if gpu["lost"]], "the loss to be seen")
    (here.folder / "work/proceed").touch()
    job = here.until_over(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["GPU lost", "finished"]
    assert job["attempts"][1]["slots"] != [place]


HOLD = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from ullage.manager.core import locks
locks.GPU_LOCKS = (Path(sys.argv[1]),)
if os.getuid() == 0 and sys.argv[3] == "nobody":
    os.setgid(65534); os.setuid(65534)
held = locks.lock_gpus(["GPU-a"], print)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """A place for the locks of GPUs that no daemon of this machine uses."""
    place = tmp_path / "locks"
    place.mkdir()
    place.chmod(0o1777)
    let_everybody_in(tmp_path)
    monkeypatch.setattr(locks_module, "GPU_LOCKS", (place,))
    return place


def held_by(locks, user):
    command = [sys.executable, "-c", HOLD, str(locks), str(ROOT / "src"), user]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_daemon_on_the_same_gpus_is_refused(locks, tmp_path, monkeypatch):
    sources = [NvmlSource(FakeNvml([FakeGpu(uuid=uuid)])) for uuid in ("GPU-a", "GPU-a", "GPU-b")]
    monkeypatch.setattr(daemon_module, "find_source", lambda settings, cards: sources.pop(0))
    with held_by(locks, "root") as other:
        with pytest.raises(AlreadyServing, match=rf"another daemon already serves GPU-a \(process {other.pid} of"):
            daemon_module.make_daemon(tmp_path / "one", read_settings(None), print)
        other.stdin.close()
    one = daemon_module.make_daemon(tmp_path / "one", read_settings(None), print)
    with pytest.raises(AlreadyServing, match="Use that one, or end it first"):
        locks_module.lock_gpus(["GPU-c", "GPU-a"], print)
    two = daemon_module.make_daemon(tmp_path / "two", read_settings(None), print)
    assert one.database.file != two.database.file


def test_a_lock_of_another_user_does_not_block_root(locks):
    if os.geteuid() != 0:
        pytest.skip("needs root, to hold a lock as another user")
    said = []
    with held_by(locks, "nobody") as other:
        assert len(locks_module.lock_gpus(["GPU-a"], said.append)) == 1
        other.stdin.close()
    assert "end the other one" in said[0]
    (locks / "ullage-GPU-x.lock").symlink_to("/etc/passwd")
    with pytest.raises(NotAllowed, match="cannot be opened"):
        locks_module.lock_gpus(["GPU-x"], print)
