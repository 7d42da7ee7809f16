"""Why attempts end, by evidence, and what becomes of their jobs."""

import signal
import sys

import pytest

from ullage.manager.core.ends import AttemptEnd, classify, read_output, was_seen, what_next
from ullage.manager.placement.recovery import RecoveryRules
from ullage.manager.storage.records import INFRASTRUCTURE, MEMORY, AttemptRecord, Cause, JobRecord, State

GIB = 1 << 30
TORCH = (
    "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB "
    "of which 1.31 GiB is free. Process 7 has 18.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "20.00 GiB memory in use. Of the allocated memory 19 GiB is allocated by PyTorch.\n"
)
TENSORFLOW = (
    "2024-01-01 W tensorflow/core/common_runtime/bfc_allocator.cc:491] Allocator (GPU_0_bfc) ran out of memory trying "
    "to allocate 4.00GiB\ntensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor "
    "with shape[64,512,512] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n"
)
JAX = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1717 bytes.\n"


def ended(code=1, number=None, reason=None, **more):
    return {"code": None if number else code, "signal": number, "reason": reason, **more}


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (TORCH, Cause.GPU_MEMORY),
        (TENSORFLOW, Cause.GPU_MEMORY),
        (JAX, Cause.GPU_MEMORY),
        ("RuntimeError: CUDA error: out of memory\n", Cause.GPU_MEMORY),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED\n", Cause.GPU_MEMORY),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
            Cause.GPU_MEMORY,
        ),
        (
            TORCH + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED\n",
            Cause.GPU_MEMORY,
        ),
        ("Traceback ...\nMemoryError\n", Cause.HOST_MEMORY),
        (
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\n",
            Cause.HOST_MEMORY,
        ),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. \n", Cause.HOST_MEMORY),
        ("RuntimeError: CUDA error: MPS client failed to connect to the MPS control daemon\n", Cause.MPS_LOST),
        ("CUDA failure: CUDA_ERROR_MPS_RPC_FAILURE\n", Cause.MPS_LOST),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered\n", Cause.GPU_LOST),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n", Cause.GPU_LOST),
        ("ValueError: too many values to unpack\n", Cause.OWN_FAILURE),
        ("RuntimeError: CUDA error: device-side assert triggered\n", Cause.OWN_FAILURE),
        (TORCH + "trying a smaller batch\nTraceback ...\nKeyError: 'weight'\n", Cause.OWN_FAILURE),
        ("", Cause.OWN_FAILURE),
    ],
)
def test_the_words_of_frameworks_are_understood(output, cause):
    assert classify(ended(), output).cause is cause


def test_a_program_that_overcame_an_error_is_finished():
    assert classify(ended(code=0), TORCH).cause is Cause.FINISHED


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (ended(number=signal.SIGKILL), Cause.KILLED),
        (ended(number=signal.SIGKILL, host_kills=1), Cause.HOST_MEMORY),
        (ended(code=137, host_kills=2), Cause.HOST_MEMORY),
        (ended(number=signal.SIGKILL, cgroup_kills=1), Cause.HOST_MEMORY),
        (ended(number=signal.SIGSEGV), Cause.OWN_FAILURE),
        (ended(number=signal.SIGKILL, reason="cancelled", signals_sent=["SIGTERM", "SIGKILL"]), Cause.CANCELLED),
        (ended(code=0, reason="cancelled"), Cause.CANCELLED),
        (ended(code=143, reason="time-limit"), Cause.TIME_LIMIT),
        (ended(code=85, reason="slot-end"), Cause.SLOT_ENDED),
        (ended(code=0, reason="slot-end"), Cause.FINISHED),
        (ended(number=signal.SIGTERM, reason="slot-end"), Cause.SLOT_ENDED),
        (ended(code=127, could_not_run="cannot run x: No such file or directory"), Cause.OWN_FAILURE),
    ],
)
def test_exit_records_are_understood(record, cause):
    assert classify(record, "").cause is cause


def test_gpu_readings_explain_an_unexplained_end():
    assert classify(ended(), "", gpu_lost=True).cause is Cause.GPU_LOST
    assert classify(ended(), "", mps_lost=True).cause is Cause.MPS_LOST


def test_pytorch_says_how_much_it_would_have_needed():
    assert read_output(TORCH).needed == 22 * GIB


def job(**more):
    base = dict(id=1, submission="k", part=0, user="u", uid=1, gid=1, name="n", state=State.RUNNING, submitted=0.0)
    return JobRecord(**base | more)


def attempt(promise=None, exclusive=False):
    return AttemptRecord(
        job=1, number=1, token="t", state="running", slots=("g",), promise=promise, exclusive=exclusive, placed=0.0
    )


def test_the_promise_grows_by_steps_to_exclusive_at_last():
    rules, failure = RecoveryRules(), AttemptEnd(Cause.GPU_MEMORY, "oom")
    promise, alone, steps = 8 * GIB, False, []
    for failures in range(rules.attempts):
        following = what_next(
            job(promise=promise, memory_failures=failures, exclusive=alone),
            attempt(promise, alone),
            failure,
            None,
            40 * GIB,
            rules,
        )
        steps.append((following.again, following.promise, following.exclusive))
        promise, alone = following.promise, following.exclusive
        if not following.again:
            break
    assert steps == [
        (True, 13 * GIB, False),
        (True, 18 * GIB, False),
        (True, 18 * GIB, True),
        (False, 18 * GIB, True),
    ]


def test_measured_use_counts_more_than_the_promise():
    rules = RecoveryRules()
    told = AttemptEnd(Cause.GPU_MEMORY, "oom", needed=22 * GIB)
    assert what_next(job(promise=GIB), attempt(GIB), told, None, 40 * GIB, rules).promise == 27 * GIB
    seen = AttemptEnd(Cause.GPU_MEMORY, "oom")
    assert what_next(job(promise=GIB), attempt(GIB), seen, 11 * GIB, 40 * GIB, rules).promise == 16 * GIB
    assert what_next(job(promise=GIB), attempt(GIB), told, None, 24 * GIB, rules).exclusive


@pytest.mark.parametrize("cause", [Cause.OWN_FAILURE, Cause.TIME_LIMIT])
def test_a_bug_and_a_time_limit_are_not_tried_again(cause):
    assert not what_next(job(), attempt(), AttemptEnd(cause, ""), None, 40 * GIB, RecoveryRules()).again


def test_failures_of_the_system_are_tried_again_a_few_times():
    rules, lost = RecoveryRules(others=2), AttemptEnd(Cause.GPU_LOST, "gone")
    assert what_next(job(other_failures=1), attempt(), lost, None, 40 * GIB, rules).again
    assert not what_next(job(other_failures=2), attempt(), lost, None, 40 * GIB, rules).again


OOM, LOST = AttemptEnd(Cause.GPU_MEMORY, "oom"), AttemptEnd(Cause.GPU_LOST, "gone")


@pytest.mark.parametrize(
    ("ended", "used", "fullest", "gpu_lost", "seen"),
    [
        (OOM, None, 0.0, False, False),
        (OOM, 2 * GIB, 0.3, False, False),
        (OOM, 8 * GIB, 0.3, False, True),
        (OOM, None, 0.97, False, True),
        (LOST, None, 0.0, False, False),
        (LOST, None, 0.0, True, True),
        (AttemptEnd(Cause.KILLED, "by itself, perhaps"), None, 0.0, False, False),
        (AttemptEnd(Cause.SUPERVISOR_LOST, ""), None, 0.0, False, True),
    ],
)
def test_only_what_the_daemon_saw_puts_a_job_before_others(ended, used, fullest, gpu_lost, seen):
    assert was_seen(ended, attempt(8 * GIB), used, fullest, gpu_lost, False) is seen


@pytest.mark.parametrize("cause", sorted(INFRASTRUCTURE | MEMORY | {Cause.OWN_FAILURE, Cause.TIME_LIMIT}))
def test_a_start_once_job_is_retried_only_if_it_never_began(cause):
    once = job(spec={"asked": {"requeue": False}})
    following = what_next(once, attempt(GIB), AttemptEnd(cause, "x"), None, 40 * GIB, RecoveryRules())
    assert following.again == (cause is Cause.NOT_STARTED)


def test_retries_are_for_failures_of_the_jobs_own():
    rules = RecoveryRules(others=0)
    for failures, again in ((0, True), (1, True), (2, False)):
        tried = job(spec={"asked": {"retries": 2}}, own_failures=failures)
        own = what_next(tried, attempt(), AttemptEnd(Cause.OWN_FAILURE, "x"), None, 40 * GIB, rules)
        lost = what_next(tried, attempt(), AttemptEnd(Cause.GPU_LOST, "x"), None, 40 * GIB, rules)
        assert (own.again, lost.again) == (again, False)


# With real processes on virtual GPUs.


def test_printing_out_of_memory_moves_no_job_to_the_front(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.start()
    liar = home.script(
        'echo "start $ULLAGE_JOB_ID" >> attempts.log; [ -e was ] && exit 0; while [ ! -e go-on ]; do sleep 0.05; done; '
        'touch was; echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." >&2; exit 1',
        memory=25 * GIB,
    )
    home.wait(liar, "running")
    first = home.script('echo "start $ULLAGE_JOB_ID" >> attempts.log', memory=25 * GIB, priority=1)
    home.go("go-on")
    assert home.wait(first)["state"] == "done" and home.wait(liar)["state"] == "done"
    assert home.log() == [f"start {number}" for number in (liar, first, liar)]
    assert not home.job(liar)["recovery"]


TRAIN = """
import sys, torch
kept = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
"""
# Takes memory of its card as PyTorch there would, without the time that PyTorch takes to import.
TAKE = """
import os, pathlib, sys, time
from ullage.virtual.shared_card.cards import Cards
assert Cards.open(os.environ["ULLAGE_CARDS"]).card(os.environ["CUDA_VISIBLE_DEVICES"]).take(int(sys.argv[1]) << 30)
pathlib.Path("there").touch()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_overbooked_virtual_gpu_gives_an_error_and_a_recovery(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.start()
    env = home.environment()
    large = home.submit([sys.executable, "-c", TAKE, "25", "proceed"], env=env)
    home.until((home.work / "there").exists, "the first job to have its memory")
    second = home.submit([sys.executable, "-c", TRAIN, "20"], env=env)
    home.until(lambda: home.job(second)["attempts"][0]["cause"] if home.job(second)["attempts"] else None, "the error")
    job = home.job(second)
    assert job["attempts"][0]["cause"] == "out of GPU memory", job
    assert "Tried to allocate 20.00 GiB" in job["attempts"][0]["detail"]
    assert job["promise"] > 25 * GIB and not job["recovery"], "nobody saw what it tried to take"
    small = home.wait(home.script("true"))
    assert small["state"] == "done", "a waiting recovery job does not block others that fit"
    reported = [event for event in home.client.call("events", since=0)["events"] if event["kind"] == "over promise"]
    assert [event["job"] for event in reported] == [large], "who takes more than promised is reported"
    home.go()
    assert home.wait(second)["state"] == "done" and len(home.job(second)["attempts"]) == 2
    assert home.wait(large)["attempts"][0]["used"] == 25 * GIB


def test_a_job_beyond_its_promise_is_stopped_on_request(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.settings += 'over_promise = "stop"\n'
    home.start()
    honest = home.submit(proceed="proceed", memory=20 * GIB)
    home.wait(honest, "running")
    greedy = home.submit([sys.executable, "-c", TAKE, "25", "never"], env=home.environment(), memory=2 * GIB)
    home.until(lambda: home.job(greedy)["attempts"][0]["cause"] if home.job(greedy)["attempts"] else None, "its end")
    assert home.job(greedy)["attempts"][0]["cause"] == "took more than promised"
    assert home.job(greedy)["promise"] >= 25 * GIB and home.job(honest)["state"] == "running"
