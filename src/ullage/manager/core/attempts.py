"""Watches live attempts: notices when they begin and end, decides about their jobs, and checks promises and time
slots."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ullage.manager.core.context import ManagerContext
from ullage.manager.core.ends import (
    CANCELLED,
    REQUEUE_HELD,
    REQUEUES,
    AttemptEnd,
    classify,
    was_seen,
    what_next,
)
from ullage.manager.core.usage import MemoryCurve
from ullage.manager.core.watchdog import MOST_CRASHES
from ullage.manager.core.works import run_key
from ullage.manager.fault_injection import crash_point
from ullage.manager.placement import HostShare
from ullage.manager.placement.recovery import RetryDecision
from ullage.manager.running.launcher import STDERR, STDOUT, AttemptStatus
from ullage.manager.running.output import read_end
from ullage.manager.running.process_tree import read_record
from ullage.manager.running.supervisor import STARTED, boot_now
from ullage.manager.storage.records import INFRASTRUCTURE, MEMORY, STARTING, AttemptRecord, Cause, JobRecord, State
from ullage.units import format_bytes

_TAIL = 64 << 10  # bytes of each output file read to find the cause of an end
_LONGEST_PAUSE = 60.0  # longest pause between two attempts after failures of the system, in seconds
_MPS_BLAME = 30.0  # seconds after the loss of MPS during which a failure is attributed to it
_FINAL = {Cause.FINISHED: State.DONE, Cause.CANCELLED: State.CANCELLED}


def _poison(job: JobRecord) -> str:
    return f"the daemon ended {job.crashes} times while it dealt with this job; 'ullage edit --release' tries it again"


class AttemptTracker:
    """Watches live attempts by their folders. The changes of one pass are one transaction."""

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self.adopting = True  # during the first pass, this process has not started anything

    def count_crash(self, number: int | None) -> None:
        """Count a daemon's crash against the job that it was handling; hold the job after a few in a row."""
        context = self._context
        job = context.store.jobs.get(number or 0)
        if job is None:
            return
        with context.store.transaction():
            job = context.store.update(job, crashes=job.crashes + 1)
            context.store.event("daemon ended", job, f"while it dealt with this job ({job.crashes} in a row)")
            if job.crashes >= MOST_CRASHES and job.state is State.QUEUED:
                context.store.move(job, "hold", State.HELD, _poison(job), detail=_poison(job))
        context.say(f"the daemon before this one ended while it dealt with job {job.reference}")

    def adopt(self) -> int:
        """Restore the promises of attempts that may be alive, and repeat stop orders."""
        context = self._context
        context.queued_at |= context.store.history.last_ends()
        for number, attempt in context.store.attempts.items():
            share = HostShare(attempt.cores, attempt.host_promise)
            context.ledger.adopt(number, attempt.memory, attempt.exclusive, share)
            context.energy.interrupted(attempt.token)
            curve = context.store.history.curves(number).get(attempt.number)
            if curve is not None:
                context.curves[attempt.token] = MemoryCurve(*curve)
            started = read_record(context.attempt_folder(attempt) / STARTED)
            if started is not None:
                context.pids[number] = int(started["job_pid"])
        for attempt in context.store.unwatched:
            context.ledger.adopt(attempt.job, attempt.memory, attempt.exclusive)
        crash_point("adopt-begun")
        self.follow()
        self.adopting = False
        for number in list(context.store.attempts):
            job = context.store.job(number)
            if job.state is State.STOPPING:
                self.send_stop(job)
        return len(context.store.attempts)

    def follow(self) -> bool:
        """Check all live attempts; return whether anything changed."""
        context, looks = self._context, []
        for attempt in list(context.store.attempts.values()):
            try:
                look = self._look(attempt)
            except OSError as error:  # such as a full disk; the next pass may succeed
                context.say(f"job {context.store.name_of(attempt.job)} cannot be looked at: {error}")
                continue
            if look is not None:
                looks.append((attempt, look))
        if looks:
            with context.store.transaction():
                ended = [attempt for attempt, look in looks if self._see(attempt, look)]
                names = (["over"] if ended else []) + (["running"] if len(ended) < len(looks) else [])
                for name in names:
                    crash_point(f"{name}-before-commit")
            for name in names:
                crash_point(name)
            for attempt in ended:
                self._let_go(attempt)
        self._watch_promises()
        context.launcher.reap()
        return bool(looks)

    def _watch_promises(self) -> None:
        """Release the promises of ended attempts whose jobs cannot be read."""
        context = self._context
        for attempt in list(context.store.unwatched):
            if context.launcher.look(context.attempt_folder(attempt), attempt.token).state not in ("alive", "orphaned"):
                context.ledger.release(attempt.job)
                context.store.unwatched.remove(attempt)

    def _look(self, attempt: AttemptRecord) -> AttemptStatus | None:
        """Return what has changed for an attempt, or `None`."""
        launcher, folder = self._context.launcher, self._context.attempt_folder(attempt)
        look = launcher.look(folder, attempt.token)
        if look.state == "absent":
            if not launcher.revoke(folder):
                return None  # it has just begun; the next pass handles it
            crash_point("adopt-revoked")
        if look.state in ("orphaned", "lost") and (launcher.sweep(folder, attempt.token) or look.state == "orphaned"):
            return None  # gone in the next pass
        news = look.state in ("absent", "lost", "ended") or look.state == "alive" and attempt.state == STARTING
        return look if news else None

    def _see(self, attempt: AttemptRecord, look: AttemptStatus) -> bool:
        """Record the status of an attempt; return whether it is over."""
        context = self._context
        if look.state == "alive":
            if look.started is not None:
                context.store.run(attempt, float(look.started["time"]))
                job = context.store.job(attempt.job)
                if job.crashes:
                    context.store.update(job, crashes=0)
                context.pids[attempt.job] = int(look.started["job_pid"])
            return False
        job, record = context.store.job(attempt.job), look.record or {}
        ended = self._how(attempt, look)
        if job.stop_reason in (CANCELLED, *REQUEUES) and ended.cause is not Cause.FINISHED:
            ended = classify({"reason": job.stop_reason}, "")
        used, started = context.peaks.get(attempt.token), look.started or {}
        context.store.end_attempt(
            attempt,
            ended.cause,
            ended.detail,
            exit_code=record.get("code"),
            signal=record.get("signal"),
            started=attempt.started or started.get("time"),
            ended=record.get("time", context.clock()),
            elapsed=record.get("elapsed"),
            used=used,
            host_memory=record.get("max_rss"),
            energy=context.energy_of(attempt),
        )
        context.keep_curve(attempt)
        context.fair_share.end(attempt, job.user, record.get("time", context.clock()))
        if record.get("checkpoint_unheard"):
            text = "no process of it handled the signal to save itself, so none was sent"
            context.store.event("no checkpoint", job, text, attempt.number)
        self._move_on(job, attempt, ended, record, started, used)
        return True

    def _how(self, attempt: AttemptRecord, look: AttemptStatus) -> AttemptEnd:
        context, folder = self._context, self._context.attempt_folder(attempt)
        if look.state == "absent":
            if self.adopting:
                return AttemptEnd(Cause.NOT_STARTED, "the daemon ended before it was started")
            return AttemptEnd(Cause.NOT_STARTED, f"it could not be started: {context.launcher.failure(folder)}")
        if look.state == "lost":
            if (look.started or {}).get("boot") != boot_now():
                return AttemptEnd(Cause.HOST_RESTARTED, "this machine was restarted")
            return AttemptEnd(Cause.SUPERVISOR_LOST, "the process that watched it was killed")
        output = "\n".join(read_end(str(folder / name), _TAIL).decode(errors="replace") for name in (STDOUT, STDERR))
        return classify(look.record or {}, output, self._gpu_lost(attempt), self._mps_lost())

    def _gpu_lost(self, attempt: AttemptRecord) -> bool:
        return any(slot.lost for slot in self._context.slots if slot.id in attempt.slots)

    def _mps_lost(self) -> bool:
        since = self._context.sharing.lost_at
        return since is not None and time.monotonic() - since < _MPS_BLAME

    def _move_on(
        self,
        job: JobRecord,
        attempt: AttemptRecord,
        ended: AttemptEnd,
        record: dict[str, Any],
        started: dict[str, Any],
        used: int | None,
    ) -> None:
        context = self._context
        ran = job.ran + float(record.get("elapsed") or 0.0)
        common = {
            "ran": ran,
            "started": job.started or started.get("time"),
            "stop_reason": None,
            "cause": ended.cause,
            "exit_code": record.get("code"),
        }
        over = {"ended": record.get("time", context.clock())}
        if ended.cause is Cause.FINISHED and used is not None:
            context.store.keep_run(run_key(job.uid, job.request), used, float(record.get("elapsed") or 0.0))
        if ended.cause in _FINAL:
            context.store.move(job, "end", _FINAL[ended.cause], ended.detail, detail=ended.detail, **over, **common)
            return
        if ended.cause in (Cause.SLOT_ENDED, Cause.REQUEUED):
            after = State.HELD if job.stop_reason == REQUEUE_HELD else State.QUEUED
            context.store.move(job, "retry", after, ended.detail, detail=ended.detail, **common)
            return
        if ended.cause is Cause.NOT_STARTED and self.adopting:
            held = job.crashes >= MOST_CRASHES
            text, after = (_poison(job), State.HELD) if held else (ended.detail, State.QUEUED)
            context.store.move(job, "retry", after, text, detail=text, recovery=not held, **common)
            return
        following = what_next(job, attempt, ended, used, context.largest, context.settings.recovering.rules)
        if not following.again:
            text = f"{ended.cause}: {following.text}"
            context.store.move(job, "end", State.FAILED, text, detail=following.text, **over, **common)
            return
        fullest = context.fullest.get(attempt.token, 0.0)
        first = was_seen(ended, attempt, used, fullest, self._gpu_lost(attempt), self._mps_lost())
        self._again(job, ended, following, common | {"recovery": first})

    def _again(self, job: JobRecord, ended: AttemptEnd, following: RetryDecision, common: dict[str, Any]) -> None:
        memory = job.memory_failures + (ended.cause in MEMORY - {Cause.HOST_MEMORY})
        others = job.other_failures + (ended.cause in INFRASTRUCTURE or ended.cause is Cause.HOST_MEMORY)
        own = job.own_failures + (ended.cause is Cause.OWN_FAILURE)
        crash_point("retry-before-commit")
        same = following.promise == job.promise and not following.exclusive
        self._context.store.move(
            job,
            "retry",
            State.QUEUED,
            following.text,
            detail=following.text,
            promise=following.promise,
            promises=job.promises if same else (),  # it is not known which rank ran out, so all get more
            exclusive=following.exclusive,
            memory_failures=memory,
            other_failures=others,
            own_failures=own,
            **common,
        )
        failures = others if others > job.other_failures else own if own > job.own_failures else 0
        if failures:
            pause = min(_LONGEST_PAUSE, 2.0 ** min(failures - 1, 10) - 1.0)  # no pause before the first retry
            self._context.not_before[job.id] = time.monotonic() + pause

    def _let_go(self, attempt: AttemptRecord) -> None:
        context = self._context
        context.ledger.release(attempt.job)
        for known in (context.peaks, context.fullest, context.curves, context.used):
            known.pop(attempt.token, None)
        context.warned.discard(attempt.token)
        context.pids.pop(attempt.job, None)
        context.queued_at[attempt.job] = context.clock()
        context.launcher.tidy(context.attempt_folder(attempt))

    def stop(self, job: JobRecord, reason: str, text: str) -> None:
        """Stop a live job; its supervisor writes the reason into the exit record."""
        with self._context.store.transaction():
            job = self._context.store.move(job, "stop", State.STOPPING, text, stop_reason=reason)
            self._context.store.afterwards(partial(crash_point, "stop-decided"))
            self._context.store.afterwards(partial(self.send_stop, job))
            crash_point("stop-before-commit")

    def send_stop(self, job: JobRecord) -> None:
        """Tell the supervisor to stop the job; may be repeated."""
        context = self._context
        folder = context.attempt_folder(context.store.live_attempt(job.id))
        if folder.exists():
            reason = job.stop_reason or "cancelled"
            lead = context.checkpoint_lead(job.option("checkpoint_lead")) if reason == "slot-end" else None
            context.launcher.stop(folder, reason, context.settings.running.grace, lead)


class RunningJobGuard:
    """Reports running jobs that exceed their promise, and stops them if the settings say so."""

    def __init__(
        self, context: ManagerContext, attempts: AttemptTracker, makes_room: Callable[[AttemptRecord], bool]
    ) -> None:
        self._context, self._attempts, self._makes_room = context, attempts, makes_room
        self._ask_times: dict[str, float] = {}  # last time of the `makes_room` check, by token

    def look(self) -> None:
        """Check all running jobs. `makes_room` needs a pass over the queue, so it is called for one job at a time."""
        past = []
        for number, attempt in list(self._context.store.attempts.items()):
            job = self._context.store.job(number)
            if job.state is State.RUNNING:
                self._memory(job, attempt)
                if self._slot_is_over(job, attempt):
                    past.append((self._ask_times.get(attempt.token, 0.0), job, attempt))
        if past:
            _, job, attempt = min(past, key=lambda each: each[0])
            self._ask_times = {each.token: self._ask_times.get(each.token, 0.0) for _, _, each in past}
            self._ask_times[attempt.token] = time.monotonic()
            if self._makes_room(attempt):
                lead = self._context.checkpoint_lead(job.option("checkpoint_lead"))
                self._attempts.stop(job, "slot-end", f"its time slot ends; it has {lead:g} s to save itself")

    def _memory(self, job: JobRecord, attempt: AttemptRecord) -> None:
        context = self._context
        held = context.used.get(attempt.token, {})
        promised, rules = attempt.memory, context.settings.running
        beyond = {slot: used - promised.get(slot, 0) for slot, used in held.items()}
        if attempt.promise is None or attempt.exclusive or max(beyond.values(), default=0) <= rules.tolerance:
            return
        slot = max(beyond, key=lambda each: beyond[each])
        text = f"took {format_bytes(held[slot])} on {slot}; {format_bytes(promised.get(slot, 0))} were promised"
        if attempt.token not in context.warned:
            context.warned.add(attempt.token)
            context.store.event("over promise", job, text, attempt.number)
            context.say(f"job {job.reference} {text}")
        if rules.over_promise == "stop" and self._others_in_danger(attempt, slot):
            self._attempts.stop(job, "over-promise", text)

    def _others_in_danger(self, attempt: AttemptRecord, slot: str) -> bool:
        """Whether the other jobs' promised but unused memory exceeds the free memory."""
        context = self._context
        card = next((each for each in context.slots if each.id == slot), None)
        if card is None or card.used is None:
            return False
        missing = 0
        for other in context.store.attempts.values():
            if slot in other.slots and other.token != attempt.token:
                missing += max(0, other.memory[slot] - context.used.get(other.token, {}).get(slot, 0))
        return missing > card.total - card.used

    def _slot_is_over(self, job: JobRecord, attempt: AttemptRecord) -> bool:
        slot = self._context.settings.fairness.slot
        if slot is None or not job.spec["asked"]["resumable"]:
            return False
        ran = self._context.launcher.running_for(self._context.attempt_folder(attempt))
        return ran is not None and ran >= max(0.0, slot - self._context.checkpoint_lead(job.option("checkpoint_lead")))
