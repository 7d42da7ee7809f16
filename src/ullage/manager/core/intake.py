"""Takes jobs in: what was asked for becomes rows, with a need that is known, kept from before, or to be estimated."""

from __future__ import annotations

from functools import partial
from typing import Any

from ullage.errors import InvalidValue, StoreFull
from ullage.estimation.estimators.registry import estimators, find
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.estimates import Answer, Estimates, Wanted, key_of, questions_of
from ullage.manager.fault_injection import crash_point
from ullage.manager.identity import Caller, rights
from ullage.manager.running.environment import base_environment
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import WAITING, JobRecord, State
from ullage.units import format_bytes
from ullage.workloads.job_files import JobSpec

NOBODY = "none"


class Intake:
    """New jobs, and the estimates that they wait for."""

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self._late: list[Answer] = []
        self.estimates = Estimates(context.settings.estimating, self.answered)

    @property
    def _store(self) -> JobStore:
        return self._context.store

    def submit(self, caller: Caller, spec: JobSpec, key: str) -> list[JobRecord]:
        """The jobs of a submission, on disk when this returns. The same key again gives the same jobs."""
        known = self._store.of_submission(key)
        if known:
            if known[0].uid != caller.uid:
                raise InvalidValue("this submission's key is in use by somebody else; submit again")
            return known
        self._check(spec)
        indices: list[int | None] = [None] if spec.array is None else list(spec.array)
        parts = [_of_index(spec, index) for index in indices]
        needs: dict[tuple[str, ...], tuple[int | None, str | None, str | None]] = {}
        for each in parts:  # parts of an array that run the same command need the same
            if tuple(each.command) not in needs:
                needs[tuple(each.command)] = self._need(caller.uid, each)
        rows = [
            {
                **self._row(caller, each, needs[tuple(each.command)]),
                "submission": key,
                "part": part,
                "array_index": index,
            }
            for part, (each, index) in enumerate(zip(parts, indices, strict=True))
        ]
        made = self._store.submit(rows, {each.job: each.kind for each in spec.after})
        self._store.afterwards(partial(self._accepted, made))
        return made

    def _accepted(self, made: list[JobRecord]) -> None:
        crash_point("submit-before-answer")
        for job in made:
            self._want(job)

    def _check(self, spec: JobSpec) -> None:
        _ = spec.folder  # refused where there is none
        limit = self._context.settings.access.queue_limit
        if len(self._store.jobs) + len(spec.array or [0]) > limit:
            raise InvalidValue(f"the queue is full: {limit} jobs are its limit (access.queue_limit in the settings)")
        if spec.estimator is not None and spec.estimator not in (NOBODY, *estimators()):
            find(spec.estimator)  # which says what there is
        for other in spec.after:
            self._store.job(other.job)  # one that is not there is refused now, not waited for
        devices = self._context.slot_reader.devices()
        if spec.gpus > len(devices):
            raise InvalidValue(f"the job asks for {spec.gpus} GPUs; there are {len(devices)}")
        largest = max((device.total or 0 for device in devices), default=0)
        if spec.memory is not None and largest and spec.memory > largest:
            asked = f"the job asks for {format_bytes(spec.memory)} of GPU memory"
            raise InvalidValue(f"{asked}; the largest GPU has {format_bytes(largest)}")

    def _row(self, caller: Caller, spec: JobSpec, known: tuple[int | None, str | None, str | None]) -> dict[str, Any]:
        need, note, estimate_key = known
        state = State.HELD if spec.hold else State.ESTIMATING if note is None else State.QUEUED
        asked = spec.model_dump(exclude={"array", "after", "hold"})
        return {
            "user": caller.user, "uid": caller.uid, "gid": caller.gid, "name": spec.title,
            "state": state, "submitted": self._context.clock(), "priority": spec.priority,
            "spec": {"asked": asked, "gpus": spec.gpus, "time_limit": spec.time_limit, "limits": caller.limits},
            "estimate_key": estimate_key, "estimate_note": note, "need": need, "exclusive": spec.exclusive,
        }  # fmt: skip

    def _need(self, uid: int, spec: JobSpec) -> tuple[int | None, str | None, str | None]:
        """How much, who says so (`None`: nobody yet), and by which key the estimate is kept."""
        if spec.memory is not None:
            return spec.memory, "as its submitter says", None
        estimator = self._estimator(spec)
        if estimator == NOBODY:
            return None, f"not estimated: {'its submitter' if spec.estimator else 'this site'} wants none", None
        questions = questions_of(spec)
        if not questions:
            return None, "not estimated: no Python script or model in it (--memory tells how much)", None
        key = key_of(questions, estimator, self._gpus(), spec.env, spec.folder)
        known = self._store.known_estimate(key)
        if known is not None:
            fresh = known["made"] + self._context.settings.estimating.retry_failed_after > self._context.clock()
            if known["upper"] is not None or fresh:
                return known["upper"], f"{known['note']} (kept from before)", key
        return None, None, key

    def _gpus(self) -> list[str]:
        return sorted({device.name for device in self._context.slot_reader.devices()})

    def resume(self) -> None:
        """After a start: what was being estimated is asked again."""
        for job in list(self._store.jobs.values()):
            self._want(job)

    def _want(self, job: JobRecord) -> None:
        if job.estimate_note is not None or job.estimate_key is None or job.state not in WAITING:
            return
        spec = JobSpec.model_validate(job.spec["asked"])
        try:
            env = base_environment(spec, job.uid)
        except InvalidValue as error:
            self.answered(Answer(job.estimate_key, None, f"not estimated: {error}", 0.0))
            return
        self.estimates.want(
            Wanted(
                job.estimate_key, self._estimator(spec), questions_of(spec), self._gpus(), env, spec.folder,
                rights(job.uid, job.gid),
            )
        )  # fmt: skip

    def _estimator(self, spec: JobSpec) -> str:
        return spec.estimator or self._context.settings.estimating.estimator

    def answered(self, answer: Answer) -> None:
        """An estimate is there: keep it, and let all jobs with that content go on."""
        self._late.append(answer)
        self.write_answers()

    def write_answers(self) -> None:
        """Write down what came and could not be written before, as the disk was full."""
        try:
            while self._late:
                self._write(self._late[0])
                self._late.pop(0)
        except StoreFull as error:
            self._context.say(str(error))

    def _write(self, answer: Answer) -> None:
        with self._store.transaction():
            self._store.keep_estimate(answer.key, answer.upper, answer.note, answer.seconds)
            for job in list(self._store.jobs.values()):
                if job.estimate_key != answer.key or job.estimate_note is not None:
                    continue
                job = self._store.update(job, need=answer.upper, estimate_note=answer.note)
                if job.state is State.ESTIMATING:
                    self._store.move(job, "estimated", State.QUEUED, answer.note)
            crash_point("estimated-before-commit")
        crash_point("estimated")


def _of_index(spec: JobSpec, index: int | None) -> JobSpec:
    """A part of an array: `{index}` in its command is its index."""
    if index is None:
        return spec
    return spec.model_copy(update={"command": [word.replace("{index}", str(index)) for word in spec.command]})
