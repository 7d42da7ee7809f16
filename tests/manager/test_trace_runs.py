"""Traces run through a real daemon: stand-ins take the memory of virtual cards, crash, recover, and are cancelled."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ullage.cli.trace_runs import execute
from ullage.manager.placement import policies
from ullage.manager.simulation.known import known_workload
from ullage.manager.simulation.result import DONE, FINISHED, OUT_OF_MEMORY
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.units import GIB

ALIKE = '[monitoring]\ninterval = 0.05\nwindow = 1.0\n[placing]\nunknown = "floor"\nfree_floor = 0\nmargin = 0\n'
ALIKE += "[running]\ngrace = 1.0\n[recovering]\nexclusive_after = 1\n"
IDLE, MIDDLE, BUSY = "mobilenetv3_small cifar100 b64", "resnet50 b64", "vgg16 b64"  # activity alone: 4, 52 and 69 %


def trace_of(*jobs: tuple[float, str, int, float]) -> JobTrace:
    """Jobs by arrival, known workload, GiB and seconds of work."""
    kinds = [JobKind(name, size * GIB, known_workload(name).kind.alone) for _, name, size, _ in jobs]
    made = [
        TraceJob(number, job[0], kind, job[3]) for number, (job, kind) in enumerate(zip(jobs, kinds, strict=True), 1)
    ]
    return JobTrace("toy", made)


def started(home, policy: str, gpus: str, settings: str = ALIKE):
    home.options = ["--virtual", gpus, "--estimator", "none", "--policy", policy]
    home.settings = settings
    home.start()
    return home.client


def test_jobs_run_at_their_times_for_their_lengths(home) -> None:
    client = started(home, "magm", "2xA100-40GB")
    result = execute(trace_of((0, IDLE, 5, 60), (50, IDLE, 5, 100)), client, speed=50, estimator="oracle")
    first, second = result.jobs
    assert (first.state, second.state) == (DONE, DONE) and [each.cause for each in first.attempts] == [FINISHED]
    assert second.arrival - first.arrival >= 49
    assert first.attempts[0].end - first.attempts[0].begin >= 60  # no sooner than the work
    assert second.attempts[0].end - second.attempts[0].begin >= 100
    assert first.attempts[0].promise == 5 * GIB and result.trace == "toy"


def test_overbooked_jobs_crash_and_recover_alone(home) -> None:
    client = started(home, "round-robin", "1xA100-40GB")
    result = execute(trace_of((0, IDLE, 25, 120), (10, IDLE, 25, 60)), client, speed=50, estimator="none")
    assert result.figures.ooms >= 1 and result.figures.done == 2
    crashed = next(job for job in result.jobs if len(job.attempts) > 1)
    assert [each.cause for each in crashed.attempts] == [OUT_OF_MEMORY, FINISHED]
    other = next(job for job in result.jobs if job is not crashed)
    assert crashed.attempts[-1].begin >= other.attempts[0].end  # it waited for the GPU to be free


@pytest.mark.parametrize(("policy", "gpu"), [("lug", 0), ("magm", 1), ("mug", 2)])
def test_policies_differ_as_they_are_defined(home, policy: str, gpu: int) -> None:
    """No two of the first three fit one GPU; the fourth may join each of them."""
    client = started(home, policy, "3xA100-40GB")
    trace = trace_of((0, IDLE, 38, 600), (20, MIDDLE, 20, 600), (40, BUSY, 25, 600), (200, IDLE, 1, 10))
    result = execute(trace, client, speed=100, estimator="oracle")
    assert [job.attempts[0].gpus[0] for job in result.jobs] == [0, 1, 2, gpu]
    assert result.figures.ooms == 0


@pytest.mark.slow
def test_an_activity_limit_holds_where_it_is_set(home) -> None:
    client = started(home, "magm", "1xA100-40GB")
    trace = trace_of((0, BUSY, 10, 900), (500, IDLE, 2, 30))
    beside = execute(trace, client, speed=100, estimator="oracle")
    assert beside.jobs[1].attempts[0].begin < beside.jobs[0].attempts[0].end
    home.stop()
    limited = ALIKE.replace("[placing]\n", "[placing]\nsmact_limit = 0.6\nfresh_busy = 0\n")
    client = started(home, "magm", "1xA100-40GB", limited)
    apart = execute(trace, client, speed=100, estimator="oracle")
    assert apart.jobs[1].attempts[0].begin >= apart.jobs[0].attempts[0].end


def test_jobs_that_share_a_card_slow_each_other(home) -> None:
    client = started(home, "magm", "1xA100-40GB")
    result = execute(trace_of((0, BUSY, 5, 200), (0, BUSY, 5, 200)), client, speed=100, estimator="oracle")
    alone = 200.0
    assert all(job.attempts[0].end - job.attempts[0].begin > 1.4 * alone for job in result.jobs)


ORACLES = ("first-fit", "best-fit", "worst-fit", "least-utilized")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "gpu"), [("first-fit", 0), ("best-fit", 1), ("worst-fit", 2)])
def test_oracles_use_the_memory_of_the_job_file(home, policy: str, gpu: int) -> None:
    """Promises are unknown, so other policies would give each job a GPU of its own."""
    assert set(ORACLES) <= set(policies())
    client = started(home, policy, "3xA100-40GB", ALIKE.replace('"floor"', '"exclusive"'))
    trace = trace_of((0, IDLE, 22, 500), (20, IDLE, 30, 500), (40, IDLE, 20, 500), (60, IDLE, 5, 20))
    result = execute(trace, client, speed=100, estimator="none")
    assert {job.attempts[0].gpus[0] for job in result.jobs[:3]} == {0, 1, 2} and result.figures.ooms == 0
    by_size = [job.attempts[0].gpus[0] for job in result.jobs[:3]]
    assert result.jobs[3].attempts[0].gpus[0] == by_size[gpu]


def test_the_command_prints_a_table_and_recoveries(home, tmp_path: Path) -> None:
    started(home, "round-robin", "1xA100-40GB")
    file, saved = tmp_path / "toy.csv", tmp_path / "run.json"
    file.write_text("arrival,memory,work_s\n0,25GiB,120\n10,25GiB,60\n")
    words = ["trace", str(file), "--run", "--speed", "50x", "-e", "none"]
    told = json.loads(home.cli(*words, "--json", "--save", str(saved)))
    assert told["runs"][0]["figures"]["done"] == 2 and told["runs"][0]["figures"]["total_s"] > 180
    assert told["recoveries"][0]["ooms"] >= 1 and told["recoveries"][0]["state"] == DONE
    compared = home.cli("simulate", "--compare-with", str(saved))
    assert "round-robin, executed" in compared
    text = home.cli(*words)
    assert "total" in text and "ran out of memory" in text
    for wrong, message in (("fast", "factor such as 60x"), ("0x", "speed must be above 0"), ("nanx", "speed must be")):
        assert message in home.cli("trace", str(file), "--run", "--speed", wrong, code=2)
    assert "--speed works only with --run" in home.cli("trace", str(file), "--speed", "2x", code=2)


def test_ctrl_c_cancels_the_jobs_of_the_trace_only(home, tmp_path: Path) -> None:
    client = started(home, "magm", "1xA100-40GB")
    own = home.submit(proceed="proceed", memory=GIB)
    file = tmp_path / "toy.csv"
    file.write_text("arrival,memory,work_s\n0,5GiB,86400\n10,6GiB,86400\n86000,1GiB,60\n")
    words = [home.python, "-m", "ullage", "trace", str(file), "--run", "--speed", "60x", "-e", "oracle"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(words, env=home.environment(), cwd=tmp_path, **pipes)
    home.until(lambda: len(client.queue()) == 3, "two jobs of the trace")
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in error and out == ""
    home.until(lambda: [job["id"] for job in client.queue()] == [own], "the jobs of the trace to be cancelled")
    assert list(tmp_path.glob("*.csv")) == [file]
