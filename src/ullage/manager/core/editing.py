"""Changes of existing jobs: edits waiting jobs and requeues others."""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ullage.errors import InvalidValue, nearest
from ullage.jobs.job_files import EDITABLE, JobSpec
from ullage.jobs.validation import checked
from ullage.manager.core.attempts import AttemptTracker
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.dependencies import Dependencies
from ullage.manager.core.ends import REQUEUE, REQUEUE_HELD, REQUEUES
from ullage.manager.core.intake import Intake
from ullage.manager.fault_injection import crash_point
from ullage.manager.identity import Caller
from ullage.manager.storage.records import WAITING, JobRecord, Need, State
from ullage.units import format_bytes

_SHOWN = 5  # names in a sentence
_OF_PROMISE = {"memory", "estimator"}  # the fields that decide the promise


class _Terms:
    """The spec of jobs after an edit; its expensive checks run once for all jobs that share it."""

    def __init__(
        self, spec: JobSpec, stored: dict[str, Any], caller: Caller, array: bool, dependencies: Dependencies
    ) -> None:
        self.spec, self.stored, self._names = spec, stored, dependencies.names
        self._find = dependencies.finder(caller, spec.after, array)
        self._reached = functools.cache(dependencies.reached)

    def needs(self, job: JobRecord) -> tuple[Need, ...]:
        needs = self._find(job.array_index)
        if job.id in self._reached(needs):
            raise InvalidValue(f"job {job.reference} would wait for itself, through {self._names(needs[:_SHOWN])}")
        return needs


class JobEditor:
    """Changes jobs within an open transaction."""

    def __init__(self, context: ManagerContext, intake: Intake, attempts: AttemptTracker) -> None:
        self._context, self._store = context, context.store
        self._intake, self._attempts = intake, attempts
        self._dependencies = Dependencies(context.store)

    def editing(self, caller: Caller, changes: Mapping[str, Any]) -> Callable[[JobRecord], str]:
        """Return a function that edits one job and returns what it did, in words; `None` resets a value."""
        for name in changes:
            if name not in EDITABLE:
                near = nearest(name[:80], EDITABLE)
                advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(EDITABLE)}"
                raise InvalidValue(f"cannot edit {name[:80]!r}; {advice}")
        if not changes:
            raise InvalidValue(f"an edit must change at least one of {', '.join(EDITABLE)}")
        specs: dict[int | None, _Terms] = {}  # jobs of an array go on sharing one
        edited: list[JobRecord] = []
        self._store.afterwards(partial(self._done, "edited", edited))

        def edit(job: JobRecord) -> str:
            if job.state not in WAITING:
                stop = f"; 'ullage edit --requeue --hold {job.id}' stops it first" if job.state.is_live else ""
                raise InvalidValue(f"cannot edit: the job must be waiting, but it is {job.state}{stop}")
            if job.spec_id not in specs:
                request = {**job.spec["asked"], **changes}
                values = {name: value for name, value in request.items() if name not in changes or value is not None}
                if "throttle" in changes and job.array_id is None:
                    raise InvalidValue("throttle: only an array has one; this is a single job")
                spec = checked(JobSpec, values | ({"array": [0]} if job.array_id is not None else {}), "the job")
                given = {} if "priority" in changes else {"priority": 0}  # a priority that an operator set stays
                self._intake.check(caller, spec.model_copy(update=given))
                stored = self._intake.stored_spec(spec, job.spec["limits"])
                specs[job.spec_id] = _Terms(spec, stored, caller, job.array_id is not None, self._dependencies)
            edited.append(self._edit(caller, job, changes, specs[job.spec_id]))
            crash_point("edit-before-commit")
            return f"is edited: {', '.join(sorted(changes))}"

        return edit

    def _done(self, point: str, jobs: list[JobRecord]) -> None:
        if jobs:
            crash_point(point)
        self._intake.want(jobs)

    def _edit(self, caller: Caller, job: JobRecord, changes: Mapping[str, Any], terms: _Terms) -> JobRecord:
        spec = terms.spec
        values = {name: getattr(spec, name) for name in ("priority", "exclusive") if name in changes}
        if "name" in changes:
            values["name"] = spec.title
        if not _OF_PROMISE.isdisjoint(changes) or bool(spec.gpus) != bool(job.spec["gpus"]):
            values |= self._intake.promised(job, spec) | {"exclusive": spec.exclusive}
        elif spec.gpus != job.spec["gpus"]:
            values["promises"] = ()  # the ranks have changed
        if "after" in changes:
            self._store.wait_for(job.id, terms.needs(job))
        if "throttle" in changes and job.array_id is not None:
            self._store.throttle(job.array_id, spec.throttle)
        text = f"{', '.join(sorted(changes))}, by {caller.user}"
        return self._store.move(job, "edit", job.state, text, spec=terms.stored, **values)

    def requeueing(
        self, caller: Caller, hold: bool, env: Mapping[str, str] | None, memory: int | None = None
    ) -> Callable[[JobRecord], str]:
        """Return a function that requeues one job under its number and returns what it did, in words."""
        specs: dict[int | None, tuple[JobSpec, dict[str, Any] | None]] = {}
        requeued: list[JobRecord] = []
        self._store.afterwards(partial(self._done, "requeued", requeued))

        def requeue(job: JobRecord) -> str:
            if job.state in WAITING:
                raise InvalidValue(f"cannot requeue: it is already waiting ({job.state})")
            if job.option("requeue") is False:
                raise InvalidValue("cannot requeue: it has --no-requeue; submit it again")
            if not job.state.is_over and memory is not None:
                raise InvalidValue(f"cannot requeue with other memory: the job must be over, but it is {job.state}")
            if not job.state.is_over:
                if job.state is State.STOPPING and job.stop_reason not in REQUEUES:
                    raise InvalidValue(
                        f"cannot requeue: it is being stopped ({job.stop_reason}); wait until it is over"
                    )
                self._attempts.stop(job, REQUEUE_HELD if hold else REQUEUE, f"requeued by {caller.user}")
                return f"is being stopped and {'held' if hold else 'goes into the queue again'}"
            self._intake.check_room(caller, 1)
            if job.spec_id not in specs:
                specs[job.spec_id] = self._spec_again(caller, job, env, memory)
            spec, stored = specs[job.spec_id]
            requeued.append(self._requeue(caller, job, spec, stored, hold))
            crash_point("requeue-before-commit")
            lost = job.option("env") is None
            yours = _of_environment(env or {}, job.spec.get("variables", [])) if lost else ""
            more = "" if memory is None else f" with {format_bytes(memory)}"
            return f"is {'held' if hold else 'in the queue again'}{more}{yours}"

        return requeue

    def _requeue(
        self, caller: Caller, job: JobRecord, spec: JobSpec, stored: dict[str, Any] | None, hold: bool
    ) -> JobRecord:
        needs = self._store.needs([job.id])[job.id]
        for need in needs:
            if self._dependencies.is_over(need) and (failed := self._dependencies.failed(need)):
                raise InvalidValue(f"cannot requeue: {failed}; requeue that first")
        changed = {} if stored is None else {"spec": stored}
        if needs:
            self._store.wait_for(job.id, needs)
        return self._store.move(
            job,
            "requeue",
            State.HELD if hold else State.QUEUED,
            f"by {caller.user}",
            exclusive=spec.exclusive,
            submitted=self._context.clock(),
            started=None,
            ended=None,
            cause=None,
            detail=None,
            exit_code=None,
            ran=0.0,
            recovery=False,
            memory_failures=0,
            other_failures=0,
            own_failures=0,
            crashes=0,
            **changed,
            **self._intake.promised(job, spec),
        )

    def _spec_again(
        self, caller: Caller, job: JobRecord, env: Mapping[str, str] | None, memory: int | None
    ) -> tuple[JobSpec, dict[str, Any] | None]:
        """Return the spec of a finished job, with `memory` and, if its environment is gone, `env`; and its stored form
        if it changed."""
        has_env = job.option("env") is not None
        changes: dict[str, Any] = {} if has_env else {"env": dict(env or {})}
        changes |= {} if memory is None else {"memory": memory}
        spec = checked(JobSpec, job.spec["asked"] | changes, "the job")
        self._intake.check(caller, spec.model_copy(update={"priority": 0}))
        if not changes:
            return spec, None
        if not has_env and caller.uid != job.uid:  # the owner's variables may be secret
            raise InvalidValue(f"cannot requeue: its environment is not kept any more, so only {job.user} can")
        return spec, self._intake.stored_spec(spec, job.spec["limits"])


def _of_environment(env: Mapping[str, str], before: Sequence[str]) -> str:
    """Describe an environment that replaces one with the variables `before`.

    >>> _of_environment({"HOME": "/root"}, ["HOME", "SEED"])
    '; its environment was not kept, so it has yours, without SEED'
    """
    missing = sorted(set(before).difference(env))
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    without = f", without {', '.join(missing[:_SHOWN])}{more}" if missing and env else ""
    return f"; its environment was not kept, so it has {'yours' if env else 'none'}{without}"
