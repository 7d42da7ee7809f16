"""Starts waiting jobs: gets decisions from `placement`, promises memory, records the promises, and starts the jobs."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ullage.errors import Overbooked, PolicyFailed
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.dependencies import Dependencies, waits_for
from ullage.manager.core.drains import usable_by
from ullage.manager.core.limits import UserLimits, share_of
from ullage.manager.fault_injection import crash_point
from ullage.manager.identity import rights
from ullage.manager.placement import Decision, Job, Ledger, PassOutcome, Rules, Running, Slot, decide, part_of_gpu
from ullage.manager.placement.custom_policies import forgiving
from ullage.manager.placement.fairness import waited
from ullage.manager.running.cgroups import Cgroups
from ullage.manager.running.environment import gpu_variables, job_environment, output_paths
from ullage.manager.settings import ManagerSettings
from ullage.manager.storage.records import STARTING, AttemptRecord, Cause, Drain, JobRecord, State
from ullage.units import format_bytes, format_moment

_TO_THE_END = (Cause.SLOT_ENDED, Cause.REQUEUED)  # jobs that had a turn go behind the others
_SLICE = 0.02  # seconds of work after which the event loop gets control


class Scheduler:
    """Decides which waiting jobs start now, promises them memory, and starts them. `awaits_estimate` returns why a job
    must not start before its estimate, or `None`."""

    def __init__(
        self, context: ManagerContext, cgroups: Cgroups, awaits_estimate: Callable[[JobRecord], str | None]
    ) -> None:
        self._context, self._cgroups, self._awaits_estimate = context, cgroups, awaits_estimate
        self._dependencies = Dependencies(context.store)
        self._rules = replace(rules_of(context.settings, context.cards is not None), predict=context.works.predict)
        self._policy = forgiving(context.policy, self._policy_failed)
        self._failures: dict[int, PolicyFailed] = {}  # failures of the policy in this pass, by job
        self._last_failure = ""
        self._limits = UserLimits(context)
        self._seen: dict[int, tuple[JobRecord, float | None, Job]] = {}
        self._ready: dict[int, Job] = {}
        self._blocked: set[int] = set()  # jobs that wait for other jobs or for a time
        self._drains: list[Drain] = []  # the drains that the ready jobs were built with

    async def place(self) -> list[tuple[JobRecord, AttemptRecord]]:
        """Promise memory, in the ledger and on disk, to the jobs that may start now; call `start` for each of them.
        Orders that come meanwhile take effect."""
        context = self._context
        await context.store.change(self._dependencies.settle)
        while self._dependencies.unsettled:
            await context.store.change(self._dependencies.settle)
        waiting = await self._waiting()
        held = self._limits.gpus_held()
        if held is not None:
            waiting = [job for job in waiting if not self._beyond_limit(job, held)]
        if not waiting:
            return []
        running = [self._running(attempt) for attempt in context.store.attempts.values()]
        self._failures = {}
        outcome = await asyncio.to_thread(self._pass(waiting, running, context.slots, context.ledger.copy()))
        context.reasons.update((waits.job, waits) for waits in outcome.waiting)
        self._tell_failures([self._failures[each.job] for each in outcome.waiting if each.job in self._failures])
        async with context.store.turn:
            return self._promise(self._within_limits(outcome.placed, held))

    def _policy_failed(self, failure: PolicyFailed) -> None:
        self._failures[failure.job] = failure

    def _tell_failures(self, failures: Sequence[PolicyFailed]) -> None:
        """Keep jobs waiting whose custom policy failed, and show the error."""
        if not failures:
            return
        self._context.reasons.update((failure.job, str(failure)) for failure in failures)
        self._context.service.trouble = str(failures[0])
        if failures[0].reason != self._last_failure:
            self._last_failure = failures[0].reason
            self._context.say(str(failures[0]))

    def _beyond_limit(self, job: Job, held: Counter[int] | None) -> bool:
        why = self._limits.why_not(self._context.store.job(job.id), job.gpus, held)
        if why is not None:
            self._context.reasons[job.id] = why
        return why is not None

    def _within_limits(self, decisions: Sequence[Decision], held: Counter[int] | None) -> list[Decision]:
        """Drop decisions that would exceed a user's limit."""
        if held is None:
            return list(decisions)
        allowed = []
        for decision in decisions:
            job = self._context.store.job(decision.job)
            if self._limits.why_not(job, len(decision.slots), held) is None:
                held[job.uid] += len(decision.slots)
                allowed.append(decision)
        if len(allowed) < len(decisions):
            self._context.service.wake()  # other jobs may have these places
        return allowed

    def try_out(self, jobs: Sequence[JobRecord], throttle: int | None) -> Generator[None, None, PassOutcome]:
        context, now = self._context, time.monotonic()
        for number in self._unsorted():
            self._sort_in(number, now)
            yield
        held = self._limits.gpus_held()
        ready = [job for job in self._ready.values() if not self._beyond_limit(job, held)]
        running = [self._running(attempt) for attempt in context.store.attempts.values()]
        waiting = [*ready, *(self._made(job, None, throttle) for job in jobs)]
        return self._pass(waiting, running, context.slots, context.ledger)()

    async def _waiting(self) -> list[Job]:
        """Return the jobs that could start. Only changed or blocked jobs are checked, since queues are long."""
        now = began = time.monotonic()
        for number in self._unsorted():
            self._sort_in(number, now)
            if time.monotonic() - began > _SLICE:
                await asyncio.sleep(0)
                began = time.monotonic()
        return list(self._ready.values())

    def _unsorted(self) -> set[int]:
        """Return changed or blocked jobs; all jobs if drains have changed."""
        unsorted = self._context.store.changed() | self._blocked
        if self._drains != self._context.drains:
            self._drains = self._context.drains
            self._seen.clear()
            unsorted |= self._ready.keys()
        return unsorted

    def _sort_in(self, number: int, now: float) -> None:
        context = self._context
        job = context.store.jobs.get(number)
        self._ready.pop(number, None)
        self._blocked.discard(number)
        if job is None:
            for by_job in (self._seen, context.reasons, context.not_before, context.queued_at):
                by_job.pop(number, None)
        elif job.state is State.QUEUED:
            others = context.store.dependencies.get(number)
            pause = context.not_before.get(number, 0.0) - now
            begin = job.option("begin")
            if others:
                context.reasons[number] = waits_for(others, context.store.name_of)
            elif begin is not None and begin > context.clock():
                context.reasons[number] = f"starts at {format_moment(begin)} at the earliest"
            elif pause > 0:
                context.reasons[number] = f"is tried again in {pause:.0f} s"
            elif (why := self._awaits_estimate(job)) is not None:
                context.reasons[number] = why
            else:
                self._ready[number] = self._as_placement(job)
                return
            self._blocked.add(number)

    def _as_placement(self, job: JobRecord) -> Job:
        """Return the job for placement, cached until its record changes."""
        queued = self._context.queued_at.get(job.id)
        known = self._seen.get(job.id)
        throttle = self._context.store.throttles.get(job.array_id) if job.array_id is not None else None
        busy = self._context.works.busy(job.work)
        now = (queued, throttle, busy)
        if known is None or known[0] is not job or (known[1], known[2].throttle, known[2].busy) != now:
            known = self._seen[job.id] = (job, queued, self._made(job, queued, throttle))
        return known[2]

    def _made(self, job: JobRecord, queued: float | None, throttle: int | None) -> Job:
        context, spec = self._context, job.spec
        busy, min_speed = context.works.busy(job.work), job.option("min_speed")
        came = max(job.submitted, job.option("begin") or 0.0)  # waiting begins at its start time
        queued = max(came, queued or came)
        return Job(
            id=job.id,
            user=job.user,
            submitted=queued if job.cause in _TO_THE_END else came,
            gpus=spec["gpus"],
            array=job.array_id,
            throttle=throttle,
            promise=job.promise,
            promises=job.promises,
            true=job.option("measured") or job.option("memory"),
            exclusive=job.exclusive,
            priority=job.priority,
            recovery=job.recovery,
            time_limit=spec["time_limit"],
            share=context.settings.fairness.shares.get(job.user, 1.0),
            queued=queued,
            part=part_of_gpu(job.promise, context.largest, job.exclusive, max(busy or 0.0, context.claim(job))),
            busy=busy,
            work=job.work,
            min_speed=context.settings.placing.min_speed if min_speed is None else min_speed,
            host=share_of(spec["asked"], context.settings.host),
            bookings=usable_by(job, context.drains),
        )

    def _running(self, attempt: AttemptRecord) -> Running:
        return Running(self._as_placement(self._context.store.job(attempt.job)), attempt.slots, attempt.placed)

    def makes_room(self, leaving: AttemptRecord) -> bool:
        """Whether another waiting job would start if, besides the attempts being stopped, this one ended and its job
        were queued again."""
        context = self._context
        gone = [each for each in context.store.attempts.values() if context.store.job(each.job).state is State.STOPPING]
        more = self._placed_without([*gone, leaving])
        return bool(more) and bool(more - self._placed_without(gone))

    def _placed_without(self, gone: Sequence[AttemptRecord]) -> set[int]:
        """Return the waiting jobs of the last pass that would start if some attempts ended and their jobs waited
        again."""
        context, now = self._context, self._context.clock()
        ledger, used, numbers = context.ledger.copy(), dict[str, int](), {each.job for each in gone}
        for attempt in gone:
            ledger.release(attempt.job)
            for slot, held in context.used.get(attempt.token, {}).items():
                used[slot] = used.get(slot, 0) + held
        slots = [
            slot if slot.used is None else replace(slot, used=max(0, slot.used - used.get(slot.id, 0)))
            for slot in context.slots
        ]
        running = [self._running(each) for each in context.store.attempts.values() if each.job not in numbers]
        again = [replace(self._running(each).job, submitted=now, queued=now) for each in gone]
        ready = [job for job in self._ready.values() if job.id in context.reasons]
        if not ready:
            return set()
        outcome = self._pass(ready + again, running, slots, ledger)()
        return {decision.job for decision in outcome.placed} - numbers

    def _pass(
        self, waiting: Sequence[Job], running: Sequence[Running], slots: Sequence[Slot], ledger: Ledger
    ) -> Callable[[], PassOutcome]:
        """Return a thread-safe function that makes a pass over these jobs by the site's policy, rules and accounts."""
        now, name = self._context.clock(), self._context.store.name_of
        usage = self._context.fair_share.usage(now)
        return partial(decide, self._policy, waiting, running, slots, ledger, self._rules, now, usage, name)

    def _promise(self, decisions: Sequence[Decision]) -> list[tuple[JobRecord, AttemptRecord]]:
        """Promise in the ledger, then on disk; release promises that could not be written."""
        context, placed = self._context, []
        try:
            with context.store.transaction():
                drains, now = context.store.history.drains(context.clock()), context.clock()
                closed = {each.gpu for each in drains if each.closes(now) or drains != self._drains}
                for decision in decisions:
                    if self._outdated(decision, closed):
                        continue
                    try:
                        context.ledger.accept(decision)
                    except Overbooked as refused:
                        context.reasons[decision.job] = str(refused)
                        continue
                    placed.append(self._write_down(decision))
                crash_point("place-before-commit")
        except BaseException:
            for job, _ in placed:
                context.ledger.release(job.id)
            raise
        if placed:
            crash_point("placed")
        return placed

    def _outdated(self, decision: Decision, closed: set[str]) -> bool:
        """Whether an order came between the decision and the promise."""
        job = self._context.store.jobs.get(decision.job)
        known = self._seen.get(decision.job)
        return known is None or job is not known[0] or not closed.isdisjoint(decision.slots)

    def _write_down(self, decision: Decision) -> tuple[JobRecord, AttemptRecord]:
        context = self._context
        job = context.store.job(decision.job)
        attempt = AttemptRecord(
            job=job.id,
            number=context.store.next_attempt(job.id),
            token=secrets.token_hex(16),
            state=STARTING,
            slots=decision.slots,
            promise=decision.promise,
            exclusive=decision.exclusive,
            placed=context.clock(),
            cores=decision.host.cores,
            host_promise=decision.host.memory,
            gpu_part=context.gpu_part(decision.memory, decision.exclusive),
            waited=waited(self._as_placement(job), context.clock()),
            promises=decision.promises,
        )
        alone = ", alone" if decision.exclusive else ""
        sizes = ", ".join(map(format_bytes, decision.promises or (decision.promise,)))
        places = f"on {', '.join(decision.slots)}: {sizes}{alone}" if decision.slots else ""
        context.store.place(job, attempt, "; ".join(filter(None, (places, decision.host.text))))
        context.reasons.pop(job.id, None)
        return job, attempt

    def start(self, job: JobRecord, attempt: AttemptRecord) -> None:
        """Start a promised attempt, unless its job was cancelled meanwhile."""
        context, folder = self._context, self._context.attempt_folder(attempt)
        if context.store.job(job.id).state is not State.STARTING:
            return
        context.launcher.start(folder, self._order(job, attempt))

    def _order(self, job: JobRecord, attempt: AttemptRecord) -> dict[str, Any]:
        context, spec = self._context, JobSpec.model_validate(job.request)
        if context.cards is not None:
            from ullage.virtual.shared_card.cards import environment

            base = job_environment(job, spec, attempt, {})
            env = base | environment(context.cards, attempt.slots, base)
        else:
            env = job_environment(job, spec, attempt, gpu_variables(attempt.slots))
        env |= context.sharing.variables(spec, attempt.slots)
        lead = checkpoint_lead(context, spec)
        cgroup = self._cgroups.make(attempt.token, attempt.host_promise or None, attempt.cores or None)
        return {
            "token": attempt.token,
            "command": spec.command,
            "cwd": spec.folder,
            "env": env,
            "umask": spec.umask,
            "conda": spec.conda,
            "time_limit": spec.time_limit,
            "grace": context.settings.running.grace,
            "checkpoint_lead": lead,
            "checkpoint_signal": spec.checkpoint_signal,
            "checkpoint_extension": context.settings.fairness.checkpoint_extension,
            "log_size": context.settings.running.log_size,
            "log_files": context.settings.running.log_files,
            **output_paths(job, spec, attempt),
            "interactive": spec.interactive,
            "limits": job.spec["limits"],
            "cgroup": cgroup,
            **rights(job.uid, job.gid),
        }


def checkpoint_lead(context: ManagerContext, spec: JobSpec) -> float | None:
    """Return how many seconds before its end a job is asked for a checkpoint; `None` if it saves none."""
    if not spec.resumable and spec.checkpoint_signal is None:
        return None
    return context.checkpoint_lead(spec.checkpoint_lead)


def rules_of(settings: ManagerSettings, virtual: bool) -> Rules:
    """Return the site's settings as placement's rules. Virtual GPUs have a limit of activity only if it is set."""
    placing = settings.placing
    free = placing.smact_limit == "off" or (virtual and "smact_limit" not in placing.model_fields_set)
    return Rules(
        **placing.model_dump(exclude={"smact_limit", "busy_window", "min_speed"}),
        smact_limit=None if free else float(placing.smact_limit),
        busy_window=min(placing.busy_window, settings.monitoring.window),
        window=settings.monitoring.window,
        stale_after=max(30.0, 3 * settings.monitoring.interval),
    )
