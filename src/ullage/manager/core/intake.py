"""Accepts jobs with a promise that was requested or measured in earlier runs, requests estimates, and revises the
promises of waiting and running jobs by them.

Of an array, only the first job, the last one and a few evenly spaced between them are estimated: needs that grow with
the index are largest at an end. If these estimates agree and read the same files, they hold for the other jobs.
"""

import dataclasses
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from ullage.errors import DiskFull, InvalidValue
from ullage.estimation.estimators.registry import check_name
from ullage.estimation.jobs.command import script_of
from ullage.jobs.job_files import JobSpec
from ullage.jobs.kinds import is_summary
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.dependencies import Dependencies
from ullage.manager.core.estimates import EstimateAnswer, EstimateRequest, Estimates, key_of, questions_of, reason_of
from ullage.manager.core.limits import UserLimits, share_of
from ullage.manager.core.notifications import check_notifications
from ullage.manager.core.works import BY_CLASS, OF_A_RUN
from ullage.manager.fault_injection import crash_point
from ullage.manager.identity import Caller, rights
from ullage.manager.placement import by_slot
from ullage.manager.running.environment import estimate_environment
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, JobRecord, Need, State, new_job
from ullage.units import format_bytes

NOBODY, OWN = "none", "ullage"
Commit = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in its own transaction (`GroupCommit.do`)."""
_MOST_ASKED = 50  # open estimate requests per user
Part = tuple[dict[str, Any], tuple[Need, ...]]
"""The fields in which a job of a submission differs from the others, and its dependencies."""


class InitialPromise(NamedTuple):
    """The promise of a new job on each GPU, in bytes, before any attempt."""

    promise: int | None  # None: unknown, or not estimated yet
    note: str | None  # its source; None if nothing is known before the estimate
    estimate_key: str | None = None  # cache key of the pending estimate


class Intake:
    """Turns submissions into jobs, and requests their estimates."""

    answer_question: Callable[[str, EstimateAnswer], None]
    """Stores the answer to a question without a job; set by `Questions`."""

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self._dependencies = Dependencies(context.store)
        self._late: list[Callable[[], Any]] = []  # functions that store answers
        self._backlog: dict[int, deque[int]] = {}  # by user: jobs whose estimates are not requested yet
        self._samples: dict[int, ArraySamples] = {}  # by array job that waits for the estimates of others
        self.limits = UserLimits(context)
        self.estimates = Estimates(context.settings.estimating, self.answered, context.service.wake)

    @property
    def _store(self) -> JobStore:
        return self._context.store

    def submit(self, caller: Caller, spec: JobSpec, key: str) -> Generator[None, None, list[JobRecord]]:
        """Make the jobs of a submission. The same key returns the same jobs."""
        known = self._store.of_submission(key)
        if known:
            if known[0].uid != caller.uid:
                raise InvalidValue("this submission's key is in use by another user; submit again")
            return known
        self.check(caller, spec, new=len(spec.array or [0]))
        parts = yield from self._parts(caller, spec)
        common = self._common(caller, spec) | {"submission": key}
        made = yield from self._store.submit(common, parts, spec.throttle)
        self._store.afterwards(partial(crash_point, "submit-before-answer"))
        self._store.afterwards(partial(self.want, made))
        return made

    def _parts(self, caller: Caller, spec: JobSpec) -> Generator[None, None, list[Part]]:
        needs = self._dependencies.finder(caller, spec.after, spec.array is not None)
        promises: dict[tuple[str, ...], InitialPromise] = {}  # jobs with the same command get the same promise
        parts: list[Part] = []
        for part, index in enumerate([None] if spec.array is None else spec.array):
            each = _of_index(spec, index)
            command = tuple(each.command)
            if command not in promises:
                promises[command] = self._initial_promise(caller.uid, each)
            state = State.HELD if spec.hold else State.QUEUED
            own = {
                "part": part,
                "array_index": index,
                "name": each.title,
                "state": state,
                **_promised(promises[command]),
            }
            parts.append((own, needs(index)))
            yield
        return parts

    def try_out(
        self, caller: Caller, spec: JobSpec, count: int
    ) -> Generator[None, None, list[tuple[JobRecord, tuple[Need, ...]]]]:
        """Return the jobs that a submission would make, with their dependencies; store nothing."""
        self.check(caller, spec, new=count)
        parts = yield from self._parts(caller, spec)
        common, first = self._common(caller, spec) | {"submission": ""}, self._store.next_number
        array = None if spec.array is None else first
        return [
            (new_job({**common, **own, "id": first + number, "array_id": array}), needs)
            for number, (own, needs) in enumerate(parts)
        ]

    def check(self, caller: Caller, spec: JobSpec, new: int = 0) -> None:
        """Refuse impossible requests; `new` is the number of jobs to add to the queue."""
        _ = spec.folder  # refused where there is none
        self.check_room(caller, new)
        if spec.estimator not in (None, NOBODY):
            check_name(spec.estimator)
        check_notifications(spec, self._context.settings.notify)
        devices = self._context.slot_reader.devices()
        if spec.gpus > len(devices):
            raise InvalidValue(f"the job asks for {spec.gpus} GPUs; there are {len(devices)}")
        share, host = share_of(spec.model_dump(), self._context.settings.host), self._context.ledger.host
        if host is not None and not host.holds(share):
            raise InvalidValue(f"the job asks for {share.text}; jobs have {host.text or 'none of either'} here")
        largest = max((device.total or 0 for device in devices), default=0)
        if spec.memory is not None and largest and spec.memory > largest:
            request = f"the job asks for {format_bytes(spec.memory)} of GPU memory"
            raise InvalidValue(f"{request}; the largest GPU has {format_bytes(largest)}")
        self.limits.check(caller, spec, new)

    def check_room(self, caller: Caller, new: int) -> None:
        limit = self._context.settings.access.queue_limit
        if new and self._store.number_of() + new > limit:
            raise InvalidValue(f"the queue is full: {limit} jobs are its limit (access.queue_limit in the settings)")
        self.limits.check_number(caller, new)

    def _common(self, caller: Caller, spec: JobSpec) -> dict[str, Any]:
        return {
            "user": caller.user,
            "uid": caller.uid,
            "gid": caller.gid,
            "submitted": self._context.clock(),
            "priority": spec.priority,
            "exclusive": spec.exclusive,
            "spec": self.stored_spec(spec, caller.limits),
        }

    def stored_spec(self, spec: JobSpec, limits: Any) -> dict[str, Any]:
        request = spec.model_dump(exclude={"array", "throttle", "after", "hold"})
        return {"asked": request, "gpus": spec.gpus, "time_limit": spec.time_limit, "limits": limits}

    def promised(self, job: JobRecord, spec: JobSpec) -> dict[str, Any]:
        return _promised(self._initial_promise(job.uid, _of_index(spec, job.array_index)))

    def _initial_promise(self, uid: int, spec: JobSpec) -> InitialPromise:
        if spec.gpus == 0:
            return InitialPromise(0, "it uses no GPU")
        if spec.memory is not None:
            return InitialPromise(spec.memory, "as its submitter says")
        estimator = self._estimator(spec)
        if estimator == NOBODY:
            known = InitialPromise(
                None, f"not estimated: {'its submitter' if spec.estimator else 'this site'} wants none"
            )
        elif spec.estimator is None and estimator in spec.recorded:
            return InitialPromise(spec.recorded[estimator], f"recorded by {estimator} in its job file")
        elif not questions_of(spec):
            known = InitialPromise(None, "not estimated: no Python script or model in it (--memory tells how much)")
        else:
            how = " ".join(filter(None, (estimator, self._context.settings.estimating.activity)))
            known = InitialPromise(None, None, key_of(spec, uid, how, self._gpus()))
        earlier = self._context.works.earlier_runs(uid, spec.model_dump(include=OF_A_RUN))
        if earlier is None or earlier.promise > self._context.largest:  # with the margin, it needs more than a GPU has
            return known
        return known._replace(promise=earlier.promise, note=earlier.note)

    def _gpus(self) -> list[str]:
        return sorted({device.name for device in self._context.slot_reader.devices()})

    def resume(self) -> None:
        """After a restart, request estimates that were under way again."""
        self.want(self._store.jobs.values())

    def want(self, jobs: Iterable[JobRecord]) -> None:
        """Request missing estimates; of an array, only those of a few jobs at first."""
        count = self._context.settings.estimating.array_samples
        arrays: dict[int, list[JobRecord]] = {}
        for job in list(jobs):
            if not _needs_estimate(job):
                continue
            if count and job.array_id is not None:
                arrays.setdefault(job.array_id, []).append(job)
            else:
                self._backlog.setdefault(job.uid, deque()).append(job.id)
        for elements in arrays.values():
            self._sample(elements)
        self._ask_more()

    def _ask_more(self) -> None:
        """Request more estimates. Requests are large, so each user has only a few open at a time."""
        for uid, numbers in self._backlog.items():
            while numbers and self.estimates.of_user(uid) < _MOST_ASKED:
                job = self._store.jobs.get(numbers.popleft())
                if _needs_estimate(job):
                    self._want_one(job)

    def _sample(self, elements: Sequence[JobRecord]) -> None:
        """Request the estimates of a few jobs of an array. Edited jobs leave their old group."""
        left = set()
        for job in elements:
            before = self._samples.pop(job.id, None)
            if before is not None:
                before.take(job.id, None)
                left.add(before)
        count = self._context.settings.estimating.array_samples
        samples = ArraySamples({job.id: job.array_index or 0 for job in elements}, count)
        self._samples |= dict.fromkeys(samples.rest, samples)
        for number in samples.ask():
            self._want_one(self._store.job(number))
        for before in left:
            self._conclude(before)

    def _want_one(self, job: JobRecord) -> None:
        assert job.estimate_key is not None
        with self._context.handled.now(job.id):
            spec = JobSpec.model_validate(job.request)
            request = EstimateRequest(
                key=job.estimate_key,
                uid=job.uid,
                estimator=self._estimator(spec),
                questions=questions_of(spec),
                gpus=self._gpus(),
                env=estimate_environment(spec, job.uid, job.name, job.array_index),
                cwd=spec.folder,
                conda=spec.conda,
                rights=rights(job.uid, job.gid),
            )
            self.ask(job.id, request)

    def ask(self, id: int | str, request: EstimateRequest) -> None:
        """Request an estimate for a job or a question. If cached answers have the same key and variables, a process of
        the user checks whether their files are unchanged."""
        answers = []
        patience = self._context.clock() - self._context.settings.estimating.retry_failed_after
        for made, stored in self._store.kept_estimates(request.key):
            answer = EstimateAnswer.from_dict(stored)
            same = answer.reads is not None and answer.reads.same_variables(request.variables)
            if same and (answer.upper is not None or made > patience):
                answers.append(answer)
        self.estimates.want(id, dataclasses.replace(request, cached=answers))

    def standing(self, job: JobRecord) -> str | None:
        """Return the progress of a job's estimate in words after "its memory", if there is one."""
        progress = self.estimates.standing(job.id)
        if progress is None and job.id in self._samples:
            progress = self._samples[job.id].standing()
        return progress

    def awaits_estimate(self, job: JobRecord) -> str | None:
        """Return why a job must not start yet if its estimate comes first."""
        if job.estimate_key is None:
            return None
        if self._context.settings.estimating.wait or self.reads_summary(job):
            return "starts after its estimate"
        return "has just come" if self.estimates.is_compared(job.id) else None

    def reads_summary(self, job: JobRecord) -> bool:
        """Whether a job is estimated by the summary of its model, which takes no time, and not by its script."""
        estimator = job.option("estimator") or self._context.settings.estimating.estimator
        return estimator != OWN and is_summary(job.option("model") or "")

    def _proceed(self) -> None:
        """Start estimates. Those of jobs that hold a GPU alone because their need is unknown, or of the array jobs that
        stand for them, come first, since they block the most. Jobs that will end before their estimate get none."""
        soon, first, late = self._context.clock() + self.estimates.usual_seconds, set[int](), set[int]()
        for attempt in self._store.attempts.values():
            job = self._store.job(attempt.job)
            if job.estimate_key is None:
                continue
            if self._expected_end(job, attempt) < soon:
                late.add(job.id)
            elif job.promise is None and attempt.exclusive and not self._stays_alone(job):
                first |= self._samples[job.id].pending if job.id in self._samples else {job.id}
        self.estimates.proceed(first, late)

    def _stays_alone(self, job: JobRecord) -> bool:
        """Whether a job gets exclusive GPUs, however little it needs."""
        return job.exclusive or self._context.policy.alone

    def _expected_end(self, job: JobRecord, attempt: AttemptRecord) -> float:
        """Return the expected end of a job, by its time limit and earlier runs; infinite if unknown or if it already
        runs longer than these."""
        limit, earlier = job.spec["time_limit"], self._context.works.earlier_runs(job.uid, job.request)
        began = attempt.started or attempt.placed
        ends = [began + span for span in (limit, earlier and earlier.elapsed) if span is not None]
        return min([end for end in ends if end > self._context.clock()], default=math.inf)

    def _estimator(self, spec: JobSpec) -> str:
        return spec.estimator or self._context.settings.estimating.estimator

    def answered(self, ids: Sequence[int | str], request: EstimateRequest, answer: EstimateAnswer) -> None:
        """Take a finished estimate; the next step stores it."""
        self._late.append(partial(self._write, ids, answer, request.key))
        self._context.service.wake()
        for job in ids:
            if isinstance(job, int):
                self._tell_array(job, answer)

    async def follow(self, commit: Commit) -> None:
        """Cancel estimates that no job needs, request more, and store answers, including those that a full disk
        delayed."""
        gone = [job for job in self.estimates.wanted if not _needs_estimate(self._store.jobs.get(job))]
        self.estimates.give_up(gone)
        for job in gone:
            self._tell_array(job, None)
        self._ask_more()
        self._proceed()
        try:
            while self._late:
                await commit(self._late[0])
                self._late.pop(0)
                crash_point("estimated")
        except DiskFull as error:
            self._context.say(str(error))

    def _tell_array(self, job: int, answer: EstimateAnswer | None) -> None:
        """Give an array the answer for one of its jobs, or `None` if that job no longer needs one."""
        samples = self._samples.pop(job, None)
        if samples is not None:
            samples.take(job, answer)
            self._conclude(samples)

    def _conclude(self, samples: "ArraySamples") -> None:
        """Decide about the other jobs of an array once all answers have arrived."""
        if samples.pending:
            return
        for number in samples.rest:
            self._samples.pop(number, None)
        rest = [self._store.jobs[number] for number in samples.rest if _needs_estimate(self._store.jobs.get(number))]
        if not rest:
            return
        agreed = samples.agreed()
        if agreed is not None:
            self._late.append(partial(self._write, [one.id for one in rest], agreed, None))
        elif samples.is_undecided:
            self._sample(rest)
        else:
            self._backlog.setdefault(rest[0].uid, deque()).extend(one.id for one in rest)

    def _write(self, ids: Sequence[int | str], answer: EstimateAnswer, key: str | None) -> Iterator[None]:
        if key is not None and answer.reads is not None and not answer.cached:
            self._store.keep_estimate(key, answer.upper, answer.seconds, answer.to_dict())
        for number in ids:
            if isinstance(number, str):
                self.answer_question(number, answer)
            elif _needs_estimate(job := self._store.job(number)) and key in (None, job.estimate_key):
                self._write_one(job, answer)
            yield
        crash_point("estimated-before-commit")

    def _write_one(self, job: JobRecord, answer: EstimateAnswer) -> None:
        values: dict[str, Any] = {"estimate_key": None, "estimate_note": answer.text}
        if answer.upper is None:
            if job.estimate_note is not None:
                values["estimate_note"] = f"{job.estimate_note}; {answer.text}"
        elif job.memory_failures:
            values["promise"] = max(answer.upper, job.promise or 0)  # it ran out of memory with less
        else:
            values["promise"] = answer.upper
            if len(answer.by_rank) == job.spec["gpus"]:  # otherwise the GPU of each rank is unknown
                values["promises"] = answer.by_rank
        if answer.breakdown:
            values["breakdown"] = json.dumps(answer.breakdown)
        by_class = {} if answer.smact is None else {BY_CLASS: {"smact": answer.smact}}
        if predicted := answer.utilization or by_class:
            values["work"] = self._context.works.keep(job.uid, what_runs(job), predicted)
        holds = answer.own_failure and self._holds(job)
        if holds:
            values["detail"] = reason_of(answer)
        if holds and job.state is State.QUEUED:
            self._store.move(job, "hold", State.HELD, answer.text, **values)
            return
        job = self._store.update(job, **values)
        self._store.event("estimated", job, answer.text)
        if answer.upper is not None and job.state.is_live:
            self._revise(job, self._store.live_attempt(job.id))

    def _revise(self, job: JobRecord, attempt: AttemptRecord) -> None:
        """Promise a live job the memory of its estimate, and at least what it uses now. A job that was exclusive
        because its need was unknown shares its GPUs from now on, if its promise fits on them."""
        if not attempt.slots or self._stays_alone(job):
            return
        used = self._context.used.get(attempt.token, {})
        needs = by_slot(attempt.slots, job.promise, job.promises)
        memory = {slot: max(need, used.get(slot, 0)) for slot, need in needs.items()}
        if attempt.exclusive and any(memory[slot] > room for slot, room in attempt.memory.items()):
            return
        sizes = tuple(memory.values())
        self._store.revise(
            attempt,
            promise=max(sizes),
            promises=sizes if len(set(sizes)) > 1 else (),
            exclusive=False,
            gpu_part=self._context.gpu_part(memory, exclusive=False),
        )
        before = "a GPU alone" if attempt.exclusive else format_bytes(attempt.promise or 0)
        self._store.event("promised", job, f"{format_bytes(max(sizes))} instead of {before}", attempt.number)
        self._store.afterwards(partial(crash_point, "revised"))
        self._store.afterwards(partial(self._context.ledger.revise, job.id, memory, exclusive=False))
        crash_point("revise-before-commit")

    def _holds(self, job: JobRecord) -> bool:
        """Whether to hold a job whose script fails during the estimate, or whose summary is refused. Running jobs, and
        scripts that may have lacked a second GPU or the output of other jobs, are not held."""
        lacked = job.spec["gpus"] != 1 and not self.reads_summary(job)
        may_be_right = lacked or bool(self._store.dependencies.get(job.id)) or job.state.is_live
        return self._context.settings.estimating.failed == "hold" and not may_be_right


def _needs_estimate(job: JobRecord | None) -> TypeGuard[JobRecord]:
    return job is not None and job.estimate_key is not None and not job.state.is_over


def _promised(initial: InitialPromise) -> dict[str, Any]:
    return {
        "estimate_key": initial.estimate_key,
        "estimate_note": initial.note,
        "promise": initial.promise,
        "work": None,
        "breakdown": None,
        "promises": (),
    }


def _of_index(spec: JobSpec, index: int | None) -> JobSpec:
    """Return the spec of one array job: its index replaces `{index}` in the command."""
    if index is None:
        return spec
    return spec.model_copy(update={"command": [word.replace("{index}", str(index)) for word in spec.command]})


def what_runs(job: JobRecord) -> list[str | None]:
    request = job.request
    script = script_of(request["command"])
    return [request["cwd"], request["model"], None if script is None else script.source]


_NEARLY = 0.02  # answers agree if they differ by at most this share of the largest


def choose(elements: Collection[int], count: int) -> list[int]:
    """Return `count` evenly spaced elements, from the first to the last.

    >>> choose(range(1, 21), 3), choose([5, 7], 3)
    ([1, 11, 20], [5, 7])
    """
    ordered = list(elements)
    if len(ordered) <= max(count, 1):
        return ordered
    if count == 1:
        return ordered[:1]
    return [ordered[round(place * (len(ordered) - 1) / (count - 1))] for place in range(count)]


def agreed(answers: Mapping[int, EstimateAnswer]) -> EstimateAnswer | None:
    """Return the answer for the other elements, from the answers by index; `None` if these do not agree.

    >>> agreed({1: EstimateAnswer(100, "by a"), 9: EstimateAnswer(101, "by a")})
    EstimateAnswer(upper=101, note='by a (as elements 1 and 9: the largest of 2 estimates)', ...)
    >>> agreed({1: EstimateAnswer(100, "by a"), 9: EstimateAnswer(200, "by a")}) is None
    True
    """
    if len({answer.upper is None for answer in answers.values()}) != 1:
        return None
    largest = max(answers.values(), key=lambda answer: answer.upper or 0)
    least = min(answer.upper or 0 for answer in answers.values())
    if (largest.upper or 0) - least > _NEARLY * (largest.upper or 0):
        return None
    if any(answer.own_failure != largest.own_failure for answer in answers.values()):
        return None
    if len({_files(answer) for answer in answers.values()}) > 1:
        return None  # each may read its own configuration, and another one may need more
    which = _listed(sorted(answers))
    of = "" if largest.upper is None else f": the largest of {len(answers)} estimates" if len(answers) > 1 else ""
    note = f"{largest.note} (as {which}{of})"
    return EstimateAnswer(
        largest.upper,
        note,
        own_failure=largest.own_failure,
        utilization=largest.utilization,
        smact=largest.smact,
        breakdown=largest.breakdown,
        by_rank=largest.by_rank,
    )


def _files(answer: EstimateAnswer) -> frozenset[str]:
    files = {} if answer.reads is None else answer.reads.files
    return frozenset(path for path, signature in files.items() if signature.startswith(("sha256:", "large:")))


def _listed(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"element {indices[0]}"
    return f"elements {', '.join(map(str, indices[:-1]))} and {indices[-1]}"


class ArraySamples:
    """The array jobs of one array that wait for an estimate."""

    def __init__(self, index_of: Mapping[int, int], count: int) -> None:
        self._index_of = dict(sorted(index_of.items(), key=lambda item: item[1]))
        self._count = count
        self._answers: dict[int, EstimateAnswer] = {}
        self.pending: set[int] = set()

    def ask(self) -> list[int]:
        chosen = choose(self._index_of, self._count)
        self.pending = set(chosen)
        return chosen

    def take(self, job: int, answer: EstimateAnswer | None) -> None:
        self.pending.discard(job)
        index = self._index_of.pop(job)
        if answer is not None:
            self._answers[index] = answer

    @property
    def rest(self) -> list[int]:
        return list(self._index_of)

    @property
    def is_undecided(self) -> bool:
        """Whether no answer came, so that other jobs must be estimated."""
        return not self._answers

    def agreed(self) -> EstimateAnswer | None:
        """Return the answer for the other jobs; `None` if each needs its own."""
        return agreed(self._answers) if self._answers else None

    def standing(self) -> str:
        """Return what the other jobs wait for, as words that follow "the job"."""
        waits = sorted(self._index_of[job] for job in self.pending)
        return f"waits for the estimate of {_listed(waits)} of its array"
