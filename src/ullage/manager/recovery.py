"""Why an attempt ended, by evidence, and what becomes of its job: another attempt with more room, or the end."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from ullage.manager.evidence import Words, read_output
from ullage.manager.records import AttemptRecord, JobRecord
from ullage.manager.settings import Recovering
from ullage.manager.states import INFRASTRUCTURE, Cause
from ullage.manager.supervisor import CHECKPOINT_EXIT
from ullage.units import format_bytes

_STOPPED = {
    "cancelled": (Cause.CANCELLED, "cancelled"),
    "time-limit": (Cause.TIME_LIMIT, "it ran longer than its time limit"),
    "over-promise": (Cause.OVER_PROMISE, "it took more GPU memory than promised and others were in danger"),
    "supervisor-stopped": (Cause.KILLED, "the process that watches it was told to stop"),
}
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: the cause, what shows it, and the GPU memory that it is known to need."""

    cause: Cause
    detail: str
    needed: int | None = None


def classify(record: dict[str, Any], output: str, gpu_lost: bool = False, mps_lost: bool = False) -> Ended:
    """The cause of an end from its exit record, the end of its output, and what was seen of the GPU at that time.

    A program that ended well is finished whatever it printed; one that we stopped was stopped; only of the others the
    output is read.

    >>> classify({"code": 0, "signal": None, "reason": None}, "CUDA out of memory; smaller batch").cause.value
    'finished'
    >>> classify({"code": 1, "signal": None, "reason": None}, "torch.OutOfMemoryError: CUDA out of memory").cause.value
    'out of GPU memory'
    >>> classify({"code": 1, "signal": None, "reason": None}, "ValueError: x").cause.value
    'failed by itself'
    """
    code, number, reason = record.get("code"), record.get("signal"), record.get("reason")
    if reason in _STOPPED:
        return Ended(*_STOPPED[reason])
    if code == 0:
        return Ended(Cause.FINISHED, "exit code 0")
    if reason == "slot-end":
        return Ended(Cause.SLOT_ENDED, "its time slot was over")
    if code == CHECKPOINT_EXIT and record.get("checkpoint_asked"):
        return Ended(Cause.TIME_LIMIT, "it saved itself before its time limit")
    if record.get("could_not_run"):
        return Ended(Cause.OWN_FAILURE, record["could_not_run"])
    words = read_output(output)
    memory = _host_memory(record)
    if memory is not None and (words is None or words.cause is not Cause.GPU_MEMORY):
        return Ended(Cause.HOST_MEMORY, memory)
    return _by_words(words, code, number, gpu_lost, mps_lost)


def _by_words(words: Words | None, code: int | None, number: int | None, gpu_lost: bool, mps_lost: bool) -> Ended:
    how = f"exit code {code}" if number is None else f"ended by {_signal_name(number)}"
    if words is not None:
        return Ended(words.cause, f"{how}: {words.line}", words.needed)
    if gpu_lost:
        return Ended(Cause.GPU_LOST, f"{how} while its GPU did not answer")
    if mps_lost:
        return Ended(Cause.MPS_LOST, f"{how} as the MPS server was lost")
    if number in _OUTSIDE or code in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
        return Ended(Cause.KILLED, f"{how}, sent by somebody else")
    return Ended(Cause.OWN_FAILURE, how)


def _host_memory(record: dict[str, Any]) -> str | None:
    """Whether the kernel ended it for want of memory: its own cgroup counts that, or the whole system's counter."""
    if record.get("cgroup_kills"):
        return f"the kernel ended {record['cgroup_kills']} of its processes at its memory limit"
    killed = record.get("signal") == signal.SIGKILL or record.get("code") == 128 + signal.SIGKILL
    if killed and record.get("host_kills") and not record.get("signals_sent"):
        return "the kernel ended it as the system ran out of memory"
    return None


@dataclass(frozen=True)
class Next:
    """What becomes of a job: again (with what need, alone or not) or not, and the words for it."""

    again: bool
    need: int | None
    exclusive: bool
    text: str


def after_failure(
    job: JobRecord, attempt: AttemptRecord, ended: Ended, taken: int | None, largest: int, rules: Recovering
) -> Next:
    """Whether a job gets another attempt. `taken` is the most that was seen in use, `largest` the largest GPU's memory.

    More room by steps: the promise, what was seen and what the error message says are what is known to be too little;
    a step more is asked for, at last a GPU for itself.
    """
    stay = Next(False, job.need, job.exclusive, ended.detail)
    if ended.cause in INFRASTRUCTURE or ended.cause is Cause.HOST_MEMORY:
        made = job.other_failures + 1
        if made > rules.others:
            return Next(False, job.need, job.exclusive, f"{ended.detail}; {made} such failures are the limit")
        return Next(True, job.need, job.exclusive, f"{ended.cause}: {ended.detail}; tried again")
    if ended.cause not in (Cause.GPU_MEMORY, Cause.OVER_PROMISE):
        return stay
    if job.memory_failures + 1 >= rules.attempts:
        return Next(False, job.need, job.exclusive, f"{ended.detail}; {rules.attempts} attempts are the limit")
    if attempt.exclusive and ended.cause is Cause.GPU_MEMORY:
        return Next(False, job.need, True, f"{ended.detail}; it had a GPU for itself, so no more room can be given")
    return _grown(job, attempt, ended, taken, largest, rules)


def _grown(
    job: JobRecord, attempt: AttemptRecord, ended: Ended, taken: int | None, largest: int, rules: Recovering
) -> Next:
    known = max(attempt.promised or 0, job.need or 0, taken or 0, ended.needed or 0)
    need = known + rules.step
    if job.memory_failures + 1 >= rules.exclusive_after or need >= largest or not known:
        return Next(True, min(known, largest) or None, True, f"{ended.cause}; next with a GPU for itself")
    return Next(True, need, job.exclusive, f"{ended.cause}; next with {format_bytes(need)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
