"""Finds out why an attempt ended, and decides whether its job gets another attempt."""

import re
import signal
from dataclasses import dataclass
from typing import Any, Literal

from ullage.manager.placement.recovery import Failure, RecoveryRules, RetryDecision, after_failure
from ullage.manager.running.supervisor import CHECKPOINT_EXIT
from ullage.manager.storage.records import INFRASTRUCTURE, AttemptRecord, Cause, JobRecord
from ullage.sandbox.process_identity import signal_name
from ullage.units import parse_bytes

# The messages of PyTorch, TensorFlow, JAX, CUDA and Python when memory runs out or a GPU is lost.
_GPU_MEMORY = re.compile(
    r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(?:STATUS_)?ALLOC_FAILED"
    r"|OOM when allocating tensor|Allocator \(GPU_\d+_bfc\) ran out of memory"
    r"|RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)|RESOURCE_EXHAUSTED:.*?(?:allocating|allocate)"
)
_HOST_MEMORY = re.compile(
    r"^MemoryError\b|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc"
    r"|Cannot allocate memory|numpy\._core\._exceptions\._ArrayMemoryError|unable to mmap .*Cannot allocate"
    r"|DataLoader worker .* is killed by signal: (?:Killed|Bus error)",
    re.MULTILINE,
)
_MPS_LOST = re.compile(
    r"cudaErrorMps\w+|CUDA_ERROR_MPS_\w+|MPS (?:server|client|control daemon|RPC)[^\n]{0,80}"
    r"(?:fail|not ready|terminat|lost|exceeded|connect)",
    re.IGNORECASE,
)
_GPU_LOST = re.compile(
    r"GPU is lost|fallen off the bus|uncorrectable ECC error|cudaErrorECCUncorrectable"
    r"|is/are busy or unavailable|cudaErrorDevicesUnavailable|CUDA_ERROR_DEVICE_UNAVAILABLE"
    r"|cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_NOT_READY|Unable to determine the device handle"
)
# The last line of a traceback begins with the name of an exception.
_LAST_WORDS = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Exhausted))\b.*$", re.MULTILINE
)
# Exceptions that only report the failure of another process.
_MESSENGERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException"})
_TRIED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_IN_USE = re.compile(r"this process has ([\d.]+ [KMGT]iB) memory in use")

_KINDS = (
    (Cause.GPU_MEMORY, _GPU_MEMORY),
    (Cause.MPS_LOST, _MPS_LOST),
    (Cause.GPU_LOST, _GPU_LOST),
    (Cause.HOST_MEMORY, _HOST_MEMORY),
)


@dataclass(frozen=True)
class OutputEvidence:
    """The cause that the output names, its line, and the GPU memory that the job needed, in bytes."""

    cause: Cause
    line: str
    needed: int | None = None


def read_output(text: str) -> OutputEvidence | None:
    """Return the last evidence in the output, or `None`; errors that the program handled do not count."""
    matches = [(match.start(), cause, match) for cause, pattern in _KINDS for match in pattern.finditer(text)]
    if not matches:
        return None
    place, cause, _ = max(matches, key=lambda item: item[0])
    if _something_else_came_later(text, place):
        return None
    begin, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
    line = text[begin : end if end >= 0 else len(text)].strip()[:500]
    return OutputEvidence(cause, line, needed_memory(text) if cause is Cause.GPU_MEMORY else None)


def needed_memory(text: str) -> int | None:
    """Return the bytes that PyTorch held plus those it requested, by its last out-of-memory message.

    >>> needed_memory("nothing of the kind") is None
    True
    """
    tried, in_use = list(_TRIED.finditer(text)), list(_IN_USE.finditer(text))
    if not tried or not in_use:
        return None
    return parse_bytes(tried[-1][1]) + parse_bytes(in_use[-1][1])


def _something_else_came_later(text: str, place: int) -> bool:
    """Whether the program ended with another exception than the one at `place`."""
    after = text.find("\n", place)
    if after < 0:
        return False
    own_names = {"OutOfMemoryError", "ResourceExhaustedError", "XlaRuntimeError", "JaxRuntimeError", *_MESSENGERS}
    words = [match for match in _LAST_WORDS.finditer(text, after + 1) if match[1] not in own_names]
    return bool(words) and not any(pattern.search(words[-1][0]) for _, pattern in _KINDS)


CANCELLED = "cancelled"
REQUEUE, REQUEUE_HELD = REQUEUES = ("requeue", "requeue-held")  # reasons to stop a job that goes back to the queue
_STOPPED = {
    CANCELLED: (Cause.CANCELLED, "cancelled"),
    **dict.fromkeys(REQUEUES, (Cause.REQUEUED, "stopped to go into the queue again")),
    "time-limit": (Cause.TIME_LIMIT, "it ran longer than its time limit"),
    "over-promise": (Cause.OVER_PROMISE, "it took more GPU memory than promised and others were in danger"),
    "supervisor-stopped": (Cause.KILLED, "the process that watches it was told to stop"),
}
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended: the cause, its evidence, and the GPU memory that it needs, if known."""

    cause: Cause
    detail: str
    needed: int | None = None


def classify(record: dict[str, Any], output: str, gpu_lost: bool = False, mps_lost: bool = False) -> AttemptEnd:
    """Return the cause of an end from its exit record, its output, and the state of the GPU. The output counts only if
    neither exit code 0 nor a stop order explains the end."""
    code, number, reason = record.get("code"), record.get("signal"), record.get("reason")
    if reason in _STOPPED:
        return AttemptEnd(*_STOPPED[reason])
    # The exit code may be that of a shell around the program that saved its checkpoint, and then says nothing about it.
    saved_inside = reason == "slot-end" and record.get("checkpoint_asked") and not record.get("leader_asked")
    if code == 0 and not saved_inside:
        return AttemptEnd(Cause.FINISHED, "exit code 0")
    if reason == "slot-end":
        unheard = "; no process of it handled the signal to save itself" if record.get("checkpoint_unheard") else ""
        return AttemptEnd(Cause.SLOT_ENDED, f"its time slot was over{unheard}")
    if code == CHECKPOINT_EXIT and record.get("checkpoint_asked"):
        return AttemptEnd(Cause.TIME_LIMIT, "it saved itself before its time limit")
    if record.get("could_not_run"):
        return AttemptEnd(Cause.OWN_FAILURE, record["could_not_run"])
    words = read_output(output)
    memory = _host_memory(record)
    if memory is not None and (words is None or words.cause is not Cause.GPU_MEMORY):
        return AttemptEnd(Cause.HOST_MEMORY, memory)
    return _by_words(words, code, number, gpu_lost, mps_lost)


def _by_words(
    words: OutputEvidence | None, code: int | None, number: int | None, gpu_lost: bool, mps_lost: bool
) -> AttemptEnd:
    how = f"exit code {code}" if number is None else f"ended by {signal_name(number)}"
    if words is not None:
        return AttemptEnd(words.cause, f"{how}: {words.line}", words.needed)
    if gpu_lost:
        return AttemptEnd(Cause.GPU_LOST, f"{how} while its GPU did not answer")
    if mps_lost:
        return AttemptEnd(Cause.MPS_LOST, f"{how} as the MPS server was lost")
    if number in _OUTSIDE or code in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
        return AttemptEnd(Cause.KILLED, f"{how}, sent from outside")
    return AttemptEnd(Cause.OWN_FAILURE, how)


def _host_memory(record: dict[str, Any]) -> str | None:
    """Return the evidence that the kernel killed the job for lack of host memory, or `None`."""
    if record.get("cgroup_kills"):
        return f"the kernel ended {record['cgroup_kills']} of its processes at its memory limit"
    killed = record.get("signal") == signal.SIGKILL or record.get("code") == 128 + signal.SIGKILL
    if killed and record.get("host_kills") and not record.get("signals_sent"):
        return "the kernel ended it as the system ran out of memory"
    return None


# Causes that the daemon observes itself; for all others, the job's output or exit may be the only evidence.
_SEEN = frozenset({Cause.OVER_PROMISE, Cause.NOT_STARTED, Cause.SUPERVISOR_LOST, Cause.HOST_RESTARTED})
_KINDS_OF_MEMORY: dict[Cause, Literal["memory", "over promise"]] = {
    Cause.GPU_MEMORY: "memory",
    Cause.OVER_PROMISE: "over promise",
}
_NEARLY = 0.9  # of a promise or of a GPU


def was_seen(
    ended: AttemptEnd, attempt: AttemptRecord, used: int | None, fullest: float, gpu_lost: bool, mps_lost: bool
) -> bool:
    """Whether the daemon itself saw the cause of an end. Only then does the next attempt go first: printing "CUDA out
    of memory" must not be a way to the front of the queue. `used` is the job's highest use of a GPU, `fullest` that of
    all processes as a share."""
    if ended.cause is Cause.GPU_MEMORY:
        return fullest >= _NEARLY or bool(attempt.promise and used and used >= _NEARLY * attempt.promise)
    return (
        ended.cause in _SEEN or ended.cause is Cause.GPU_LOST and gpu_lost or ended.cause is Cause.MPS_LOST and mps_lost
    )


def what_next(
    job: JobRecord, attempt: AttemptRecord, ended: AttemptEnd, used: int | None, largest: int, rules: RecoveryRules
) -> RetryDecision:
    """Decide about another attempt: first by the job's own settings, then by placement's rules. `used` is the job's
    highest use, `largest` the memory of the largest GPU, in bytes."""
    stay = RetryDecision(False, job.promise, job.exclusive, ended.detail)
    if job.option("requeue") is False and ended.cause is not Cause.NOT_STARTED:
        return stay._replace(text=f"{ended.detail}; it has --no-requeue")
    if job.option("interactive") and ended.cause is not Cause.NOT_STARTED:
        return stay._replace(text=f"{ended.detail}; a job at a terminal is not started again")
    retries = job.option("retries") or 0
    if ended.cause is Cause.OWN_FAILURE and retries:
        again = job.own_failures < retries
        how = f"retry {job.own_failures + 1} of {retries}" if again else f"no retry is left of {retries}"
        return stay._replace(again=again, text=f"{ended.detail}; {how}")
    if ended.cause in INFRASTRUCTURE or ended.cause is Cause.HOST_MEMORY:
        failure = Failure("system", job.other_failures, job.promise, exclusive=job.exclusive)
        why = f"{ended.cause}: {ended.detail}"
    elif ended.cause in _KINDS_OF_MEMORY:
        failure = Failure(
            _KINDS_OF_MEMORY[ended.cause],
            job.memory_failures,
            max(attempt.promise or 0, job.promise or 0) or None,
            used,
            ended.needed,
            job.exclusive,
            attempt.exclusive,
        )
        why = str(ended.cause)
    else:
        return stay
    following = after_failure(failure, largest, rules)
    return following._replace(text=f"{why if following.again else ended.detail}; {following.text}")
