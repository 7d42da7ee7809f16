"""All orders to a daemon: one method for each verb.

Each takes the caller and checked arguments, and returns plain values, ready for JSON. `VERBS` says how `Daemon.call`
runs it: changes in a `GroupCommit`, yielding between thousands of jobs; long answers in a thread that only reads.
"""

import dataclasses
import inspect
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

import ullage
from ullage.errors import DiskFull, InvalidValue, JobNotFound, NotAllowed, StoreDamaged, UllageError
from ullage.jobs.estimate_spec import EstimateSpec
from ullage.jobs.job_files import JobSpec
from ullage.jobs.schedules import parse_array
from ullage.manager import verbs
from ullage.manager.core.attempts import AttemptTracker
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.drains import Drains
from ullage.manager.core.editing import JobEditor
from ullage.manager.core.export import trace
from ullage.manager.core.intake import Intake
from ullage.manager.core.questions import Questions
from ullage.manager.core.report import report
from ullage.manager.core.scheduler import Scheduler
from ullage.manager.core.trials import DryRuns
from ullage.manager.core.views import JobViews, attempt_shown, folded, gpu_shown
from ullage.manager.identity import Caller, check_submitter, number_of_user
from ullage.manager.placement.recovery import more_memory
from ullage.manager.running.cgroups import Cgroups
from ullage.manager.running.environment import output_paths
from ullage.manager.running.launcher import STDERR, STDOUT
from ullage.manager.running.output import end_of, read_piece
from ullage.manager.running.supervisor import TERMINAL
from ullage.manager.storage.records import WAITING, AttemptRecord, JobRecord, State
from ullage.manager.storage.tokens import TokenRecord, TokenStore
from ullage.manager.transport import PROTOCOL
from ullage.text import plain
from ullage.units import format_bytes


def _token_shown(token: TokenRecord) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(token).items() if name != "hash"}


_T = TypeVar("_T")
Answers = Generator[None, None, _T]
MOST_TOKENS = 100
MOST_LOG = 256 << 10
_AT_A_TIME = 100  # finished jobs read from the disk at a time
_OUTPUTS = {"stdout": STDOUT, "stderr": STDERR}

# Types of arguments, with limits for all users.
Offset = Annotated[int, Field(ge=0, le=2**60, description="without the first ones")]
Moment = Annotated[float | None, Field(ge=0, le=1e11, description="seconds since 1970")]


class Orders:
    """A method for each verb of `VERBS`. `api` is the address of the REST API, and the daemon's own token.

    A reference to jobs is a number (`17`), a place in an array (`12_3`), some places of it (`12_[1-5,8]`), all of it
    (`12_all`), or the name of the caller's own jobs.
    """

    def __init__(
        self,
        context: ManagerContext,
        intake: Intake,
        attempts: AttemptTracker,
        scheduler: Scheduler,
        cgroups: Cgroups,
        tokens: TokenStore,
        questions: Questions,
        api: tuple[str, str] | None,
    ) -> None:
        self._context, self._store, self._service = context, context.store, context.service
        self._intake, self._attempts, self._cgroups, self._tokens, self._api = intake, attempts, cgroups, tokens, api
        self._editor, self._trials = JobEditor(context, intake, attempts), DryRuns(context, intake, scheduler)
        self._drains, self._questions = Drains(context), questions
        self._views = JobViews(context, intake)

    def ping(self, caller: Caller) -> dict[str, Any]:
        """Check that the daemon answers, and return what it is."""
        who = {"you": caller.user, "uid": caller.uid, "operator": caller.operator, "scope": caller.scope}
        return self.about() | who

    def about(self) -> dict[str, Any]:
        """Return this daemon's version, policy and numbers."""
        settings, service = self._context.settings, self._service
        return {
            "version": ullage.__version__,
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "since": service.began,
            "policy": self._context.policy.name,
            "sharing": settings.sharing,
            "estimator": settings.estimating.estimator,
            "virtual": settings.virtual,
            "gpus": len(self._context.slots),
            "host": self._host(),
            "jobs": self._store.history.counts(),
            "last_event": self._store.last_event,
            "estimates_pending": self._intake.estimates.pending,
            "trouble": service.trouble,
            "disk_full": service.disk_full,
            "damaged": {str(job): reason for job, reason in sorted(self._store.history.damaged.items())},
        }

    def _host(self) -> dict[str, int] | None:
        total, free = self._context.ledger.host, self._context.ledger.free_on_host()
        if total is None or free is None:
            return None
        return {"cores": total.cores, "memory": total.memory, "free_cores": free.cores, "free_memory": free.memory}

    def submit(
        self,
        caller: Caller,
        job: JobSpec,
        key: Annotated[str | None, Field(min_length=8, max_length=200)] = None,
    ) -> Answers[dict[str, Any]]:
        """Submit jobs, which are on disk when the answer comes. `key` is any text that the submitter uses once: the
        same key again (after a lost answer) returns the same jobs."""
        check_submitter(caller)
        made = yield from self._intake.submit(caller, job, key or secrets.token_hex(16))
        self._store.afterwards(self._service.wake)
        waited_for = self._store.several([each.job for each in job.after if isinstance(each.job, int)])
        heads = [one.id for one in waited_for if one.array_id == one.id]
        notes = [f"{head} is one job of its array; {head}_all means all of them" for head in heads]
        if job.host_memory is not None and not self._cgroups.available:
            notes.append(f"its limit of host memory cannot be kept here: {self._cgroups.why}")
        if job.min_speed is not None and not self._context.policy.predicts:
            notes.append(f"min_speed is not heeded here: the policy is {self._context.policy.name}, not ullage")
        return {
            "jobs": [one.id for one in made],
            "array": made[0].array_id,
            "state": made[0].state.value,
            "estimate": made[0].estimate_note,
            "estimating": self._views.estimating(made[0]),
            "promise": made[0].promise,
            "notes": notes,
        }

    def dry_run(self, caller: Caller, job: JobSpec, estimate: str | None = None) -> Answers[dict[str, Any]]:
        """Return whether and where a submission would start now; store and start nothing. With the id of an `estimate`
        of its command, that gives its memory and speed."""
        check_submitter(caller)
        expected = None if estimate is None else self._questions.expected(caller, estimate)
        return self._trials.of(caller, job, expected)

    def estimate(self, caller: Caller, question: EstimateSpec) -> dict[str, Any]:
        """Request an estimate without a job. The answer has an id, with which `estimated` returns the result."""
        check_submitter(caller)
        return self._questions.ask(caller, question)

    def cancel_estimate(self, caller: Caller, estimate: str) -> dict[str, Any]:
        """Cancel a requested estimate that is not finished."""
        return self._questions.cancel(caller, estimate)

    def estimated(self, caller: Caller, estimate: str) -> dict[str, Any]:
        """Return the question with an id, and its answer once there is one."""
        return self._questions.one(caller, estimate)

    def estimates(self, caller: Caller, limit: verbs.Rows = 50) -> list[dict[str, Any]]:
        """List the caller's questions, newest first, without their answers."""
        return self._questions.asked_by(caller, limit)

    def queue(
        self, caller: Caller, user: verbs.User = None, limit: verbs.Rows | None = None, offset: Offset = 0
    ) -> list[dict[str, Any]]:
        """Return all unfinished jobs, or a page of them, by number, with the reasons why they wait."""
        jobs = self._not_over(user)
        return [self._views.shown(caller, job) for job in jobs[offset:][:limit]]

    def folded_queue(
        self,
        caller: Caller,
        user: verbs.User = None,
        limit: verbs.Rows | None = None,
        offset: Offset = 0,
        live: bool = False,
    ) -> dict[str, Any]:
        """Return the queue in fewer rows, in which jobs of an array that wait in the same state share one, and the
        number of jobs. With `live`, return only the rows of jobs that hold GPUs now."""
        jobs = self._not_over(user)
        rows = folded(jobs)
        wanted = [row for row in rows if row[0].id in self._store.attempts] if live else rows
        return {
            "rows": [self._views.folded(caller, row) for row in wanted[offset:][:limit]],
            "all_rows": len(rows),
            "jobs": len(jobs),
            "states": Counter(job.state.value for job in jobs),
        }

    def _not_over(self, user: str | None) -> list[JobRecord]:
        """Return unfinished jobs in the order of their numbers."""
        return [job for _, job in sorted(self._store.jobs.items()) if user is None or job.user == user]

    def status(self, caller: Caller, job: verbs.JobReference) -> list[dict[str, Any]]:
        """Return all details of jobs: estimate, promise, and attempts with their causes."""
        jobs = self._store.several(self.resolve(caller, job))
        attempts = self._store.history.attempts(one.id for one in jobs)
        shown = []
        for one in jobs:
            mine = caller.may_change(one.uid)
            own = attempts.get(one.id, ())
            more = {"attempts": [attempt_shown(each, mine) for each in own], "more_memory": self._more_memory(one, own)}
            shown.append(self._views.shown(caller, one, whole=True) | more)
        return shown

    def _more_memory(self, job: JobRecord, attempts: Sequence[AttemptRecord]) -> int | None:
        if not job.state.is_over or not job.spec["gpus"]:
            return None
        promise = max([job.promise or 0, *(each.promise or 0 for each in attempts if not each.exclusive)])
        used = max((each.used or 0 for each in attempts), default=0)
        return more_memory(promise, used, self._context.largest, self._context.settings.recovering.rules)

    def memory(self, caller: Caller, job: verbs.JobReference) -> dict[str, Any]:
        """Return the memory of a job's attempts over time: from `begin` on, every `step` seconds, the most bytes that
        it held on one GPU; null if not measured."""
        number = self._one(caller, job)
        curves = self._store.history.curves(number)
        live = self._store.attempts.get(number)
        if live is not None and (now := self._context.curves.get(live.token)) is not None:
            curves[live.number] = now.step, list(now.values)
        attempts = self._store.history.attempts([number]).get(number, [])
        return {
            "job": number,
            "attempts": [
                {
                    "number": each.number,
                    "begin": each.started or each.placed,
                    "promise": each.promise,
                    "step": curves[each.number][0],
                    "values": curves[each.number][1],
                }
                for each in attempts
                if each.number in curves
            ],
        }

    def history(self, caller: Caller, limit: verbs.Rows = 50, user: verbs.User = None) -> list[dict[str, Any]]:
        """Return finished jobs, the latest first, with their times of waiting, running and completion."""
        return [self._views.shown(caller, job) for job in self._store.history.over(limit, user)]

    def logs(
        self,
        caller: Caller,
        job: verbs.JobReference,
        attempt: verbs.Attempt = None,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: Offset = 0,
        tail: Annotated[int | None, Field(ge=0, le=2**60, description="only so many of the last bytes")] = None,
    ) -> dict[str, Any]:
        """Return a piece of an output (by default of the newest attempt) from a byte offset on, or with `tail` at most
        that many of its last bytes. `over` means that there will be no more."""
        number = self._one(caller, job)
        record = self._store.job(number)
        self._check_mine(caller, record, "read the output of")
        attempts = self._store.history.attempts([number]).get(number, [])
        chosen = next((each for each in reversed(attempts) if attempt in (None, each.number)), None)
        if chosen is None:
            if attempt is not None:
                raise InvalidValue(f"job {record.reference} has no attempt {attempt}; it has {len(attempts)} attempts")
            return {"job": number, "attempt": None, "offset": 0, "text": "", "over": record.state.is_over, "file": None}
        file = self._context.attempt_folder(chosen) / _OUTPUTS[stream]
        if tail is not None:
            offset = max(0, end_of(str(file)) - min(tail, MOST_LOG))
        text, end = _read(file, offset)
        newer = attempts[-1].number > chosen.number
        over = chosen.state == "over" and (newer or record.state.is_over or attempt is not None)
        return {
            "job": number,
            "attempt": chosen.number,
            "offset": end,
            "text": text,
            "over": over and end == offset,
            "file": self._named_file(record, chosen, stream),
        }

    def attach(self, caller: Caller, job: verbs.JobReference) -> dict[str, Any]:
        """Return the socket of a running interactive job's terminal; only its user and root can connect."""
        number = self._one(caller, job)
        record = self._store.job(number)
        self._check_mine(caller, record, "attach to")
        if not record.option("interactive"):
            raise InvalidValue(f"job {record.reference} has no terminal; 'ullage submit --interactive' gives one")
        attempt = self._store.attempts.get(number)
        file = None if attempt is None else self._context.attempt_folder(attempt) / TERMINAL
        return {
            "job": number,
            "reference": record.reference,
            "state": record.state.value,
            "reason": self._views.shown(caller, record)["reason"],
            "detail": record.detail,
            "exit_code": record.exit_code,
            "socket": str(file) if file is not None and record.state is State.RUNNING else None,
        }

    def _named_file(self, job: JobRecord, attempt: AttemptRecord, stream: str) -> str | None:
        """Return the output file that the job's user named, which the daemon does not open."""
        spec = JobSpec.model_validate(job.request)
        path = output_paths(job, spec, attempt)["output" if stream == "stdout" else "error"]
        return None if path is None else os.path.join(spec.folder, path)

    def cancel(self, caller: Caller, jobs: list[verbs.JobReference]) -> Answers[list[dict[str, Any]]]:
        """Take jobs out of the queue, or stop them if they run."""
        return self._each(caller, jobs, "cancel", self._cancel)

    def _cancel(self, job: JobRecord) -> str:
        if job.state in WAITING:
            self._store.move(job, "withdraw", State.CANCELLED, "cancelled", detail="cancelled", cause="cancelled")
            return "cancelled"
        if job.state.is_over:
            return f"is already over: {job.state}"
        self._attempts.stop(job, "cancelled", "cancelled")
        return "is being stopped"

    def hold(self, caller: Caller, jobs: list[verbs.JobReference]) -> Answers[list[dict[str, Any]]]:
        """Keep waiting jobs from starting."""

        def hold(job: JobRecord) -> str:
            if job.state is State.HELD:
                return "is already held"
            self._store.move(job, "hold", State.HELD)
            return "is held"

        return self._each(caller, jobs, "hold", hold)

    def release(self, caller: Caller, jobs: list[verbs.JobReference]) -> Answers[list[dict[str, Any]]]:
        """Let held jobs start."""

        def release(job: JobRecord) -> str:
            self._store.move(job, "release", State.QUEUED, detail=None)
            return "is released"

        return self._each(caller, jobs, "release", release)

    def edit(
        self, caller: Caller, jobs: list[verbs.JobReference], changes: dict[str, Any]
    ) -> Answers[list[dict[str, Any]]]:
        """Change values of waiting jobs, by the names of a job file."""
        return self._each(caller, jobs, "edit", self._editor.editing(caller, changes))

    def requeue(
        self,
        caller: Caller,
        jobs: list[verbs.JobReference],
        hold: bool = False,
        env: dict[str, str] | None = None,
        memory: Annotated[int | None, Field(gt=0, le=2**50, description="bytes on each GPU")] = None,
    ) -> Answers[list[dict[str, Any]]]:
        """Requeue jobs; running ones are stopped first. Jobs whose environment is no longer stored get `env`. With
        `memory`, allowed for finished jobs only, they request that much from now on."""
        return self._each(caller, jobs, "requeue", self._editor.requeueing(caller, hold, env, memory))

    def drain(
        self,
        caller: Caller,
        gpu: verbs.GPUReference,
        reason: verbs.Reason = "",
        begin: Moment = None,
        until: Moment = None,
        allow: verbs.Allowed = None,
    ) -> dict[str, Any]:
        """Keep new jobs off a GPU (index or UUID), except those of some users and groups (`@NAME`); running jobs go on.
        With times, jobs that might still run at `begin` do not start before it."""
        self._check_operator(caller, "drain or resume a GPU")
        return self._drains.drain(gpu, reason, begin, until, allow or [])

    def resume(self, caller: Caller, gpu: verbs.GPUReference, later: verbs.Later = False) -> dict[str, Any]:
        """Let a GPU take new jobs again; with `later`, also remove its future drains."""
        self._check_operator(caller, "drain or resume a GPU")
        return self._drains.resume(gpu, later)

    def gpus(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the GPUs as they are now: used, promised and free memory, and the jobs that hold it."""
        drained = self._context.drained
        latest = self._context.slot_reader.monitor.latest
        return [
            gpu_shown(slot, self._context.ledger, drained.get(slot.id), latest(slot.id)) for slot in self._context.slots
        ]

    def events(
        self,
        caller: Caller,
        since: Annotated[int, Field(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Field(ge=1, le=10_000)] = 1000,
    ) -> dict[str, Any]:
        """Return the events after number `since`; `last` is the `since` of the next request."""
        events = self._store.history.events(since, limit)
        for event in events:
            uid = event.pop("uid")
            if uid is not None and not caller.may_change(uid):
                event["text"] = ""  # it may quote the job's output
        return {"events": events, "last": events[-1]["id"] if events else self._store.last_event}

    def report(
        self,
        caller: Caller,
        by: Annotated[list[str] | None, Field(description="what rows are for: user, day, name, gpu")] = None,
        since: Moment = None,
        until: Moment = None,
        user: verbs.User = None,
    ) -> dict[str, Any]:
        """Return the resources that jobs used between two times (the last seven days), by user, day, name and GPU."""
        return report(self._context, caller, by, since, until, user)

    def trace(
        self,
        caller: Caller,
        since: Moment = None,
        until: Moment = None,
        user: verbs.User = None,
        there: bool = False,
    ) -> dict[str, Any]:
        """Return the jobs submitted between two times (by default the last seven days), with all that a simulation
        needs; with `there`, also earlier jobs that had not finished."""
        return trace(self._context, caller, since, until, user, there)

    def api(self, caller: Caller) -> dict[str, Any]:
        """Return the address of the REST API, and to the daemon's own user the token in `run/api-token`."""
        if self._api is None:
            raise InvalidValue("this daemon has no API; start it with `ullage serve --api 8600`")
        url, token = self._api
        return {"url": url, "token": token if caller.uid == os.getuid() else None}

    def tokens(self, caller: Caller, everybody: verbs.Everybody = False) -> list[dict[str, Any]]:
        """List the tokens of the caller, or of all users."""
        if everybody:
            self._check_operator(caller, "see the tokens of others")
        return [_token_shown(each) for each in self._tokens.records(None if everybody else caller.uid)]

    def token_create(
        self,
        caller: Caller,
        name: verbs.TokenName = "",
        scope: verbs.TokenScope = "submit",
        lasts: Annotated[float | None, Field(gt=0, lt=3.2e9, description="seconds until it expires")] = None,
        user: verbs.Owner = None,
    ) -> dict[str, Any]:
        """Make a token for the caller or another user; only this answer shows it."""
        uid, owner = caller.uid, caller.user
        if user is not None and user != caller.user:
            self._check_operator(caller, "make tokens for others")
            uid, owner = number_of_user(user), user
        if sum(each.revoked is None for each in self._tokens.records(uid)) >= MOST_TOKENS:
            raise InvalidValue(f"{owner} has {MOST_TOKENS} tokens; revoke one first (ullage admin token revoke)")
        token, record = self._tokens.make(uid, owner, scope, plain(name), lasts)
        return {"token": token} | _token_shown(record)

    def token_revoke(self, caller: Caller, token: Annotated[int, Field(ge=1, le=2**62)]) -> dict[str, Any]:
        """Revoke a token."""
        record = self._tokens.one(token)
        if not caller.may_change(record.uid):
            raise NotAllowed(f"{caller.user} may not revoke a token of {record.user}; operators may")
        if record.revoked is None:
            self._tokens.revoke(record)
        return _token_shown(record)

    def figures(self, caller: Caller) -> dict[str, Any]:
        """Return the figures for `GET /metrics`."""
        waiting = [job.submitted for job in self._store.jobs.values() if job.state in WAITING]
        return {
            "about": self.about(),
            "gpus": self.gpus(caller),
            "attempts": self._store.history.causes(),
            "oldest_waiting": max(0.0, self._context.clock() - min(waiting)) if waiting else None,
        }

    def stop_serving(self, caller: Caller) -> dict[str, Any]:
        """End the daemon; jobs go on, and the next daemon adopts them."""
        self._check_operator(caller, "stop the daemon")
        self._service.end()
        return {"running": len(self._store.attempts)}

    def resolve(self, caller: Caller, reference: str | int) -> list[int]:
        """Return the numbers of the jobs that a reference means."""
        text = str(reference)
        match = re.fullmatch(r"(\d{1,18})(?:_(\d{1,9}|all|\[[\d,:-]{1,4096}\]))?", text)
        if match is None:
            mine = self._store.history.named(text, caller.uid)
            if not mine:
                raise JobNotFound(repr(text[:80]))
            return mine
        if match[2] is None:
            return [self._store.job(int(match[1])).id]
        indices = [] if match[2] == "all" else parse_array(match[2].strip("[]"))
        chosen = self._store.history.of_array(int(match[1]), *indices)
        if not chosen:
            raise JobNotFound(text[:80])
        return chosen

    def _one(self, caller: Caller, reference: str | int) -> int:
        numbers = self.resolve(caller, reference)
        if len(numbers) > 1:
            raise InvalidValue(f"{reference} must name one job, got {len(numbers)} ({numbers[0]} to {numbers[-1]})")
        return numbers[0]

    def _each(
        self, caller: Caller, jobs: list[verbs.JobReference], doing: str, do: Callable[[JobRecord], str]
    ) -> Answers[list[dict[str, Any]]]:
        """Apply a change to several jobs; a refusal for one does not stop the others."""
        if not jobs:
            raise InvalidValue(f"the jobs to {doing} must be given, by number or name")
        numbers = list(dict.fromkeys(number for one in jobs for number in self.resolve(caller, one)))
        records: list[JobRecord] = []
        for first in range(0, len(numbers), _AT_A_TIME):
            records += self._store.several(numbers[first : first + _AT_A_TIME])
            yield
        for record in records:
            self._check_mine(caller, record, doing)
        answers = []
        for record in records:
            try:
                answers.append({"job": record.id, "reference": record.reference, "done": True, "text": do(record)})
            except (DiskFull, StoreDamaged):
                raise
            except UllageError as error:
                answers.append({"job": record.id, "reference": record.reference, "done": False, "text": str(error)})
            yield
        self._store.afterwards(self._service.wake)
        return answers

    def _check_mine(self, caller: Caller, job: JobRecord, doing: str) -> None:
        if not caller.may_change(job.uid):
            raise NotAllowed(f"{caller.user} may not {doing} job {job.reference}, which is {job.user}'s; operators may")

    def _check_operator(self, caller: Caller, doing: str) -> None:
        if not caller.operator:
            raise NotAllowed(f"{caller.user} may not {doing}; operators may (access.operators in the settings)")


def parameters_of(verb: str) -> dict[str, tuple[Any, Any]]:
    """Return a verb's arguments: type and default (`...`: required) by name."""
    method = getattr(Orders, verb)
    hints, empty = get_type_hints(method, include_extras=True), inspect.Parameter.empty
    given = list(inspect.signature(method).parameters.items())[2:]
    return {name: (hints[name], ... if each.default is empty else each.default) for name, each in given}


def arguments_model(name: str, arguments: dict[str, tuple[Any, Any]]) -> type[BaseModel]:
    fields: dict[str, Any] = {**arguments}
    return create_model(f"{name}_request", __config__=ConfigDict(extra="forbid"), **fields)


def _read(file: Path, offset: int) -> tuple[str, int]:
    """Read a piece of an output up to a whole character; return it and the offset of its end."""
    data, end, missing = read_piece(str(file), min(offset, 1 << 60), MOST_LOG)
    gone = f"\n[{format_bytes(missing)} of the output are not kept]\n" if missing else ""
    for cut in range(min(3, max(0, len(data) - 1)) + 1):
        try:
            return gone + data[: len(data) - cut].decode(), end - cut
        except UnicodeDecodeError:
            continue
    return gone + data.decode(errors="replace"), end
