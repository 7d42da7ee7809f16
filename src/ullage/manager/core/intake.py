"""Takes jobs in: submissions become rows, with a promise that was asked for, kept from before, or to be estimated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, NamedTuple

from ullage.errors import InvalidValue, NoSuchJob, StoreFull
from ullage.estimation.estimators.registry import estimators, find
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.estimates import EstimateAnswer, EstimateRequest, Estimates, key_of, questions_of
from ullage.manager.core.host import share_of
from ullage.manager.core.limits import UserLimits
from ullage.manager.fault_injection import crash_point
from ullage.manager.identity import Caller, rights
from ullage.manager.running.environment import base_environment
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import WAITING, JobRecord, State
from ullage.units import format_bytes
from ullage.workloads.job_files import JobSpec

NOBODY = "none"
Commit = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Does a work as a transaction of its own (`GroupCommit.do`)."""


class InitialPromise(NamedTuple):
    """What a new job is to be promised on each GPU, in bytes, before any attempt."""

    promise: int | None  # None: unknown, or not estimated yet
    note: str | None  # where it comes from; None while it is being estimated
    estimate_key: str | None = None  # by which the estimate is kept


class Intake:
    """Turns submissions into jobs, and has the estimates made that they wait for."""

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self._late: list[EstimateAnswer] = []
        self.limits = UserLimits(context)
        self.estimates = Estimates(context.settings.estimating, self.answered)

    @property
    def _store(self) -> JobStore:
        return self._context.store

    def submit(self, caller: Caller, spec: JobSpec, key: str) -> Generator[None, None, list[JobRecord]]:
        """The jobs of a submission. The same key again gives the same jobs."""
        known = self._store.of_submission(key)
        if known:
            if known[0].uid != caller.uid:
                raise InvalidValue("this submission's key is in use by somebody else; submit again")
            return known
        self._check(spec)
        self.limits.check(caller, spec, len(spec.array or [0]))
        needs = self._needs(spec)
        promises: dict[tuple[str, ...], InitialPromise] = {}  # parts that run the same command get the same promise
        parts: list[dict[str, Any]] = []
        for part, index in enumerate([None] if spec.array is None else spec.array):
            each = _of_index(spec, index)
            command = tuple(each.command)
            if command not in promises:
                promises[command] = self._initial_promise(each)
            parts.append(
                {"part": part, "array_index": index, "name": each.title, **self._promised(spec, promises[command])}
            )
            yield
        made = yield from self._store.submit(self._common(caller, spec) | {"submission": key}, parts, needs)
        self._store.afterwards(partial(self._accepted, made))
        return made

    def _accepted(self, made: list[JobRecord]) -> None:
        crash_point("submit-before-answer")
        for job in {job.estimate_key: job for job in made}.values():
            self._want(job)

    def _check(self, spec: JobSpec) -> None:
        _ = spec.folder  # refused where there is none
        limit = self._context.settings.access.queue_limit
        if len(self._store.jobs) + len(spec.array or [0]) > limit:
            raise InvalidValue(f"the queue is full: {limit} jobs are its limit (access.queue_limit in the settings)")
        if spec.estimator is not None and spec.estimator not in (NOBODY, *estimators()):
            find(spec.estimator)  # which says what there is
        self._needs(spec)
        devices = self._context.slot_reader.devices()
        if spec.gpus > len(devices):
            raise InvalidValue(f"the job asks for {spec.gpus} GPUs; there are {len(devices)}")
        share, host = share_of(spec.model_dump(), self._context.settings.host), self._context.ledger.host
        if host is not None and not host.holds(share):
            raise InvalidValue(f"the job asks for {share.text}; jobs have {host.text or 'none of either'} here")
        largest = max((device.total or 0 for device in devices), default=0)
        if spec.memory is not None and largest and spec.memory > largest:
            asked = f"the job asks for {format_bytes(spec.memory)} of GPU memory"
            raise InvalidValue(f"{asked}; the largest GPU has {format_bytes(largest)}")

    def _needs(self, spec: JobSpec) -> dict[int, str]:
        """The jobs to wait for; one that is not there is refused now, not waited for."""
        needs: dict[int, str] = {}
        for other in spec.after:
            if not isinstance(other.job, int):
                raise NoSuchJob(repr(other.job))
            needs[self._store.job(other.job).id] = other.kind
        return needs

    def _common(self, caller: Caller, spec: JobSpec) -> dict[str, Any]:
        """What all jobs of a submission have; what was asked for is kept once."""
        asked = spec.model_dump(exclude={"array", "throttle", "after", "hold"})
        return {
            "user": caller.user, "uid": caller.uid, "gid": caller.gid,
            "submitted": self._context.clock(), "priority": spec.priority, "exclusive": spec.exclusive,
            "spec": {"asked": asked, "gpus": spec.gpus, "time_limit": spec.time_limit, "throttle": spec.throttle,
                     "limits": caller.limits},
        }  # fmt: skip

    def _promised(self, spec: JobSpec, initial: InitialPromise) -> dict[str, Any]:
        state = State.HELD if spec.hold else State.ESTIMATING if initial.note is None else State.QUEUED
        return {"state": state, "estimate_key": initial.estimate_key, "estimate_note": initial.note,
                "promise": initial.promise}  # fmt: skip

    def _initial_promise(self, spec: JobSpec) -> InitialPromise:
        if spec.gpus == 0:
            return InitialPromise(0, "it uses no GPU")
        if spec.memory is not None:
            return InitialPromise(spec.memory, "as its submitter says")
        estimator = self._estimator(spec)
        if estimator == NOBODY:
            return InitialPromise(
                None, f"not estimated: {'its submitter' if spec.estimator else 'this site'} wants none"
            )
        questions = questions_of(spec)
        if not questions:
            return InitialPromise(None, "not estimated: no Python script or model in it (--memory tells how much)")
        key = key_of(questions, estimator, self._gpus(), spec.env, spec.folder)
        known = self._store.known_estimate(key)
        if known is not None:
            fresh = known["made"] + self._context.settings.estimating.retry_failed_after > self._context.clock()
            if known["upper"] is not None or fresh:
                return InitialPromise(known["upper"], f"{known['note']} (kept from before)", key)
        return InitialPromise(None, None, key)

    def _gpus(self) -> list[str]:
        return sorted({device.name for device in self._context.slot_reader.devices()})

    def resume(self) -> None:
        """After a restart: ask again for estimates that were under way."""
        for job in {job.estimate_key: job for job in self._store.jobs.values() if job.estimate_note is None}.values():
            self._want(job)

    def _want(self, job: JobRecord) -> None:
        if job.estimate_note is not None or job.estimate_key is None or job.state not in WAITING:
            return
        spec = JobSpec.model_validate(job.request)
        try:
            env = base_environment(spec, job.uid)
        except InvalidValue as error:
            self.answered(EstimateAnswer(job.estimate_key, None, f"not estimated: {error}", 0.0))
            return
        self.estimates.want(
            EstimateRequest(
                job.estimate_key, self._estimator(spec), questions_of(spec), self._gpus(), env, spec.folder,
                rights(job.uid, job.gid),
            )
        )  # fmt: skip

    def _estimator(self, spec: JobSpec) -> str:
        return spec.estimator or self._context.settings.estimating.estimator

    def answered(self, answer: EstimateAnswer) -> None:
        """Take an estimate that is done; the next step writes it down."""
        self._late.append(answer)
        self._context.service.wake()

    async def write_answers(self, commit: Commit) -> None:
        """Write down estimates, also those that could not be written before because the disk was full."""
        try:
            while self._late:
                await commit(partial(self._write, self._late[0]))
                self._late.pop(0)
                crash_point("estimated")
        except StoreFull as error:
            self._context.say(str(error))

    def _write(self, answer: EstimateAnswer) -> Generator[None, None, None]:
        """Keep it, and let the jobs with that content go on."""
        self._store.keep_estimate(answer.key, answer.upper, answer.note, answer.seconds)
        for job in list(self._store.jobs.values()):
            if job.estimate_key != answer.key or job.estimate_note is not None:
                continue
            job = self._store.update(job, promise=answer.upper, estimate_note=answer.note)
            if job.state is State.ESTIMATING:
                self._store.move(job, "estimated", State.QUEUED, answer.note)
            yield
        crash_point("estimated-before-commit")


def _of_index(spec: JobSpec, index: int | None) -> JobSpec:
    """One job of an array: `{index}` in the command becomes its index."""
    if index is None:
        return spec
    return spec.model_copy(update={"command": [word.replace("{index}", str(index)) for word in spec.command]})
