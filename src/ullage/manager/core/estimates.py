"""Estimates of submitted jobs: each in a process of its own with limits, several at once, users in turn."""

import asyncio
import functools
import hashlib
import importlib.metadata
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import ullage
from ullage.estimation.jobs.command import ScriptCommand, script_of
from ullage.estimation.scripts.request import SLOW_PACKAGES
from ullage.estimation.words import BREAKDOWN_WORDS
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.works import read_utilization
from ullage.manager.monitor.host import IdleCores
from ullage.manager.settings import EstimateSettings
from ullage.sandbox.environment import environment
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.limits import Limits, room_for
from ullage.sandbox.parent import Outcome, run
from ullage.sandbox.protocol import error_text
from ullage.sandbox.recording import Reads
from ullage.sandbox.worker_pool import WorkerPool
from ullage.text import plain
from ullage.units import GIB, format_duration


@dataclass(frozen=True)
class EstimateQuestion:
    """A script with its arguments, a module, or a model with options, to estimate. `program` and `launcher` are those
    of `ScriptCommand`. Only a process with the user's rights checks the path."""

    source: str
    args: tuple[str, ...] = ()
    module: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    program: str | None = None
    launcher: tuple[str, ...] = ()
    text: str | None = field(default=None, repr=False)  # of a script without a file

    @classmethod
    def of_script(cls, script: ScriptCommand, options: dict[str, Any]) -> "EstimateQuestion":
        return cls(script.source, tuple(script.args), script.module, options, script.program, script.launcher)


def questions_of(spec: JobSpec) -> list[EstimateQuestion]:
    questions = []
    if spec.model is not None:
        sizes = {name: getattr(spec, name) for name in ("batch_size", "sequence_length")}
        options = spec.estimate | {name: size for name, size in sizes.items() if size}
        questions.append(EstimateQuestion(spec.model, options=options))
    script = script_of(spec.command)
    if script is not None:
        questions.append(EstimateQuestion.of_script(script, script.ranks(spec.gpus)))
    return questions


def key_of(
    spec: JobSpec,
    uid: int,
    estimator: str,
    gpus: Sequence[str],
    questions: Sequence[EstimateQuestion] = (),
    advice: bool = False,
) -> str:
    """Return the cache key of a job's estimate, or of other questions about it: user, commands, folder, GPUs and
    versions; the PATH counts if a program is looked for there. The variables and files that the run reads are not known
    before it; they are stored with the answer."""
    questions = questions or questions_of(spec)
    by_path = any(question.program is not None and os.sep not in question.program for question in questions)
    known = {
        "uid": uid,
        "where": [spec.cwd, spec.venv, spec.conda, spec.env.get("PATH") if by_path else None],
        "questions": [asdict(question) for question in questions],
        "gpus": list(gpus),
        "advice": advice,
        "versions": [ullage.__version__, _torch_version(), estimator],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


_ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # no GPU, and one core
NOT_ESTIMATED = "not estimated: "
_ENTRY = "ullage.estimation.jobs.child:estimate_here"
_PRELOAD = ["ullage.estimation.jobs.child", "ullage.estimation.asking", "ullage.estimation.scripts.child"]
_LATER = ["ullage.virtual.cudnn.loaded", *SLOW_PACKAGES]
_COMPARE = "ullage.sandbox.recording:first_that_holds"
_COMPARE_LIMITS = Limits(seconds=30.0, memory=GIB)
_COMPARED_AT_ONCE = 4
_MOST_KNOWN = 1000  # Pythons
_LAST = 20  # estimates
_WARM_AT_LEAST = 2  # processes that wait with PyTorch loaded, each about a quarter of a gigabyte
_LONGEST_ANSWER, _LONGEST_NOTE = 16 << 20, 400  # bytes, characters
_LARGEST_BOUND = 1 << 50  # bytes
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class EstimateAnswer:
    """The result of an estimate: `upper` in bytes, or `None`, and a note on its source or its failure.

    `own_failure`: the script would fail on a real GPU too. `reads` are its inputs; without them the answer is not
    cached.
    """

    upper: int | None
    note: str
    seconds: float = 0.0
    own_failure: bool = False
    utilization: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)  # by GPU
    smact: float | None = None  # the middle of its class, without `utilization`
    reads: Reads | None = None
    breakdown: dict[str, int] = field(default_factory=dict, repr=False)  # of the estimate for the GPU of the note
    cached: bool = False  # from an earlier run
    estimates: list[dict[str, Any]] = field(default_factory=list, repr=False)  # in full, by GPU
    advice: dict[str, Any] | None = None
    by_rank: tuple[int, ...] = ()  # bounds, where ranks differ; `upper` is the largest

    @property
    def text(self) -> str:
        return f"{self.note} (kept from before)" if self.cached else self.note

    def shown(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question (`EstimateSpec`), without the two long parts if it wants no `details`."""
        left_out = () if question.get("details", True) else ("timeline", "layers")
        estimates = [{name: each[name] for name in each if name not in left_out} for each in self.estimates]
        return {"estimates": estimates, "advice": self.advice, "reason": reason_of(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return what the cache stores, ready for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "cached"}
        return values | {"reads": self.reads and self.reads.to_dict()}

    @classmethod
    def from_dict(cls, cached: dict[str, Any]) -> "EstimateAnswer":
        return cls(**{**cached, "reads": Reads.from_dict(cached["reads"]), "by_rank": tuple(cached["by_rank"])})


@dataclass(frozen=True)
class EstimateRequest:
    """A request for an estimate, with its cache key. `env`, `cwd`, `conda` and `rights` are the job's. `cached` are
    cached answers for the same variables: the first whose files are unchanged is the answer."""

    key: str
    uid: int
    estimator: str
    questions: Sequence[EstimateQuestion]
    gpus: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    conda: str | None
    rights: Mapping[str, int | str]
    cached: Sequence[EstimateAnswer] = ()
    advice: bool = False

    @cached_property
    def variables(self) -> dict[str, str]:
        return {**environment(self.env), **_ALONE}

    @cached_property
    def where_its_python_is(self) -> str:
        """Return a key of everything that decides which Python runs the script."""
        scripts = [(each.source, each.module, each.program, each.launcher) for each in self.questions]
        return json.dumps([self.uid, self.cwd, self.conda, self.env.get("PATH"), scripts])

    @cached_property
    def identity(self) -> str:
        """Return the same key for requests with the same answer, unless files change."""
        return hashlib.sha256(json.dumps([self.key, sorted(self.env.items())]).encode()).hexdigest()


Done = Callable[[Sequence[int | str], EstimateRequest, EstimateAnswer], None]
"""Called with the jobs (numbers) and questions (ids) that requested an estimate, the request, and the answer."""


@dataclass(eq=False)
class _Work:
    """One estimate, waiting or under way, and the jobs and questions that want it."""

    request: EstimateRequest
    jobs: dict[int | str, None] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    followers: "list[_Work]" = field(default_factory=list)  # the same request, made after this one began to read
    leader: "_Work | None" = None

    @property
    def is_wanted(self) -> bool:
        return bool(self.jobs) or any(follower.jobs for follower in self.followers)

    def is_wanted_by(self, jobs: Iterable[int]) -> bool:
        """Whether one of these jobs waits for this estimate or one of its followers."""
        return any(job in work.jobs for work in (self, *self.followers) for job in jobs)

    def is_wanted_only_by(self, jobs: Collection[int]) -> bool:
        """Whether only these jobs wait for this estimate or its followers."""
        works = (self, *self.followers)
        return sum(len(work.jobs) for work in works) == sum(job in work.jobs for work in works for job in jobs)


class Estimates:
    """Makes estimates; `done` gets each answer in the event loop's thread.

    A request is compared with cached answers, then waits for its turn. Jobs that are `first` come before others. Then
    the user with the fewest estimates under way is next, then the one served longest ago; nobody has more than
    `per_user` under way. One is made at any time, more only while a core is `idle`. `wake` is called when a request
    that was compared has to be estimated after all.
    """

    def __init__(
        self,
        rules: EstimateSettings,
        done: Done,
        wake: Callable[[], None] = lambda: None,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        self._rules, self._done, self._wake = rules, done, wake
        self._cores = IdleCores()
        self._idle = idle or self._cores.take
        self._first: Collection[int] = ()
        self._late: Collection[int] = ()
        self._took: deque[float] = deque(maxlen=_LAST)  # seconds of the last estimates
        self.at_once, self.per_user = estimates_at_once(rules)
        self._of_job: dict[int | str, _Work] = {}
        self._open: dict[str, _Work] = {}  # by identity: those that have not begun, which another job may join
        self._latest: dict[str, _Work] = {}  # by identity: those that have begun
        self._waiting: dict[int, dict[_Work, None]] = {}  # by user
        self._running: dict[_Work, asyncio.Task[None]] = {}
        self._comparing: dict[_Work, asyncio.Task[None]] = {}
        self._of_user: dict[int, asyncio.Lock] = {}  # a user's comparisons are made one after the other
        self._served: dict[int, int] = {}  # by user: how many estimates had begun when theirs did last
        self._begun = 0
        self._order: dict[_Work, int] | None = None  # place in the queue; None after a change
        self._threads = ThreadPoolExecutor(self.at_once, "estimate")  # one waits for each child
        self._comparers = ThreadPoolExecutor(_COMPARED_AT_ONCE, "compare")
        limits = Limits(memory=rules.memory, processes=rules.processes)
        self._pythons: dict[str, str | None] = {}  # that scripts ran in; `None` is Ullage's own
        self._warm = WorkerPool(_PRELOAD, later=_LATER, most=max(_WARM_AT_LEAST, self.at_once), limits=limits)

    def want(self, job: int | str, request: EstimateRequest) -> None:
        """Request an estimate for a job or a question. Equal requests that have not begun share one; a later one is
        compared with it."""
        known = self._of_job.get(job)
        if known is not None and known.request.identity == request.identity:
            return
        self.give_up([job])  # it was changed since it asked
        work = self._open.get(request.identity)
        if work is None:
            work = self._open[request.identity] = _Work(request)
            before = self._latest.get(request.identity)
            if before is None:
                self._admit(work)
            else:
                before.followers.append(work)
                work.leader = before
        work.jobs[job] = None
        self._of_job[job] = work
        self._begin()

    @property
    def wanted(self) -> list[int]:
        return [job for job in self._of_job if isinstance(job, int)]

    @property
    def pending(self) -> int:
        return len(set(self._of_job.values()))

    def of_user(self, uid: int) -> int:
        return len({work for work in self._of_job.values() if work.request.uid == uid})

    def give_up(self, jobs: Iterable[int | str]) -> None:
        """Drop the requests of jobs. An estimate without requests ends at once."""
        for job in jobs:
            work = self._of_job.pop(job, None)
            if work is None:
                continue
            del work.jobs[job]
            for each in (work, work.leader):
                if each is not None and not each.is_wanted:
                    self._end(each)

    def _end(self, work: _Work) -> None:
        work.stop.set()
        if self._open.get(work.request.identity) is work:
            del self._open[work.request.identity]
        if work in self._waiting.get(work.request.uid, {}):
            del self._waiting[work.request.uid][work]
            self._order = None
            self._leave(work)

    def standing(self, job: int | str) -> str | None:
        """Return the progress of a job's estimate, in words after "the job"; `None` if there is none."""
        work = self._of_job.get(job)
        if work is None:
            return None
        if work in self._running and work.began is not None:
            return f"is being estimated, for {format_duration(round(time.monotonic() - work.began))} now"
        if work in self._comparing:
            return "is being compared with earlier estimates"
        if work not in self._waiting.get(work.request.uid, {}):
            return "waits for the estimate of another job that runs the same"
        if work.is_wanted_only_by(self._late):
            return "is not estimated, since the job will have ended before"
        if self._order is None:
            self._order = {each: place for place, each in enumerate(self._in_order(), 1)}
        return f"waits to be estimated, as number {self._order[work]} of {len(self._order)}"

    def is_compared(self, job: int | str) -> bool:
        """Whether a job's request is being compared with cached answers."""
        return self._of_job.get(job) in self._comparing

    @property
    def usual_seconds(self) -> float:
        """Return the usual seconds of recent estimates; 0 if there was none."""
        return statistics.median(self._took) if self._took else 0.0

    def _in_order(self) -> list[_Work]:
        places = [
            (not work.is_wanted_by(self._first), self._under_way(user) + place, self._served.get(user, 0), work)
            for user, works in self._waiting.items()
            for place, work in enumerate(works)
        ]
        return [work for *_, work in sorted(places, key=lambda each: each[:3])]

    def _next(self) -> _Work | None:
        if len(self._running) >= self.at_once or not any(self._waiting.values()):
            return None
        for work in self._in_order():
            has_room = work.is_wanted_by(self._first) or self._under_way(work.request.uid) < self.per_user
            if has_room and not work.is_wanted_only_by(self._late):
                return work if self._idle() or not self._running else None
        return None

    def _under_way(self, user: int) -> int:
        return sum(work.request.uid == user for work in self._running)

    def _admit(self, work: _Work) -> None:
        if work.request.cached:
            self._no_more_join(work)
            self._comparing[work] = asyncio.get_running_loop().create_task(self._compare(work))
        else:
            self._waiting.setdefault(work.request.uid, {})[work] = None
            self._order = None

    def _no_more_join(self, work: _Work) -> None:
        """Close the estimate to other jobs: they may have changed files that it reads from now on."""
        if self._open.get(work.request.identity) is work:
            del self._open[work.request.identity]
        self._latest[work.request.identity] = work

    async def _compare(self, work: _Work) -> None:
        request, held = work.request, None
        reads = {"reads": [each.reads.to_dict() for each in request.cached if each.reads is not None]}
        ask = partial(
            run,
            _COMPARE,
            reads,
            limits=_COMPARE_LIMITS,
            env=environment({"PATH": os.defpath}),
            cwd="/",
            rights=request.rights,
            stop=work.stop,
        )
        try:
            async with self._of_user.setdefault(request.uid, asyncio.Lock()):
                outcome = await asyncio.get_running_loop().run_in_executor(self._comparers, ask)
            held = (outcome.answer or {}).get("held")
        except Exception:
            pass  # it is estimated again, which reports the error
        finally:
            self._comparing.pop(work, None)
        if not work.is_wanted:
            self._leave(work)
        elif type(held) is not int or not 0 <= held < len(request.cached):
            work.request = replace(request, cached=())
            self._admit(work)
            self._wake()
        else:
            self._answer(work, replace(request.cached[held], cached=True))
        self._begin()

    def proceed(self, first: Collection[int] = (), late: Collection[int] = ()) -> None:
        """Begin what may begin now; to be called every second or so. Jobs that are `first` come before all others. For
        jobs that would be `late`, since they will have ended before, nothing is begun."""
        self._cores.look()
        self._first, self._late, self._order = first, late, None
        self._begin()

    def _begin(self) -> None:
        while (work := self._next()) is not None:
            user = work.request.uid
            del self._waiting[user][work]
            self._begun += 1
            self._served[user], self._order = self._begun, None
            self._no_more_join(work)
            work.began = time.monotonic()
            self._running[work] = asyncio.get_running_loop().create_task(self._make(work))

    async def _make(self, work: _Work) -> None:
        began = time.monotonic()
        try:
            answer = _read(await self._ask(work), work.request, time.monotonic() - began)
        except Exception as error:  # such as no more processes: a job must not wait for ever
            answer = EstimateAnswer(None, _not_estimated(error_text(error)))
        finally:
            self._running.pop(work, None)
        if work.is_wanted:
            self._took.append(time.monotonic() - began)
            self._answer(work, answer)
        else:
            self._leave(work)
        self._begin()

    def _answer(self, work: _Work, answer: EstimateAnswer) -> None:
        """Deliver an answer; requests that came meanwhile are compared with it."""
        jobs = list(work.jobs)
        for job in jobs:
            del self._of_job[job]
        self._leave(work, [answer] if answer.reads is not None else [])
        self._done(jobs, work.request, answer)

    def _leave(self, work: _Work, answers: Sequence[EstimateAnswer] = ()) -> None:
        if self._latest.get(work.request.identity) is work:
            del self._latest[work.request.identity]
        for follower in work.followers:
            follower.leader = None
            if follower.jobs:
                follower.request = replace(follower.request, cached=[*answers, *follower.request.cached])
                self._admit(follower)

    async def _ask(self, work: _Work) -> Outcome:
        wanted, rules = work.request, self._rules
        request = {
            "estimator": wanted.estimator,
            "gpus": list(dict.fromkeys(wanted.gpus)),
            "advice": wanted.advice,
            "timeout": rules.timeout,
            "questions": [asdict(question) for question in wanted.questions],
            "cwd": wanted.cwd,
            "conda": wanted.conda,
            "network": rules.network,
            "activity": rules.activity,
        }
        limits = Limits(
            seconds=rules.timeout,
            memory=rules.memory,
            answer=_LONGEST_ANSWER,
            processes=rules.processes,
            written=rules.written,
        )
        ask = partial(
            run,
            _ENTRY,
            request,
            limits=limits,
            cwd=wanted.cwd,
            rights=wanted.rights,
            private=Sandbox(network=rules.network),
            record=True,
            stop=work.stop,
        )
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask_warm_or_cold, wanted, ask)

    def _ask_warm_or_cold(self, wanted: EstimateRequest, ask: Callable[..., Outcome]) -> Outcome:
        """Use a warm process of the script's Python, or of Ullage's own until the first answer tells which that is."""
        place = wanted.where_its_python_is
        python = self._pythons.get(place)
        env = {**environment(wanted.env, ours=python is None), **_ALONE}
        outcome = ask(env=env, python=python, warm=self._warm if wanted.questions else None)
        if python is not None and outcome.reason in ("error", "died"):
            self._pythons.pop(place, None)
            outcome = ask(env=wanted.variables)
        python = (outcome.answer or {}).get("python", "")
        if len(self._pythons) < _MOST_KNOWN and (python is None or isinstance(python, str) and os.path.isabs(python)):
            self._pythons[place] = python
        return outcome

    async def close(self) -> None:
        tasks = {**self._running, **self._comparing}
        self._waiting.clear()
        for work, task in tasks.items():
            work.stop.set()
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._threads.shutdown()
        self._comparers.shutdown()
        self._warm.close()


def estimates_at_once(rules: EstimateSettings) -> tuple[int, int]:
    """Return how many estimates are made at once, for all users and for one.

    Where nothing is set: as many as there are cores and memory for, and half of them for one user, so that there is
    always room for another. A daemon that is not root's has one user only.

    >>> estimates_at_once(EstimateSettings(at_once=4, per_user=1))
    (4, 1)
    """
    at_once = rules.at_once or min(room_for(rules.memory), _MOST_AT_ONCE)
    return at_once, rules.per_user or (at_once if os.getuid() else (at_once + 1) // 2)


_MOST_AT_ONCE = 64


def _read(outcome: Outcome, wanted: EstimateRequest, seconds: float) -> EstimateAnswer:
    """Read an answer, which comes from a user's process and may be anything."""
    answer, reads = outcome.answer, outcome.reads
    if answer is None:
        reason = outcome.failure if outcome.reason == "error" else f"it {outcome.failure}"
        return EstimateAnswer(None, _not_estimated(reason), seconds)
    if reads is not None and (reads.programs or not reads.whole or not reads.files):
        reads = None  # it has unknown inputs
    if "failed" in answer:
        return EstimateAnswer(None, _not_estimated(answer["failed"]), seconds, answer.get("own") is True, reads=reads)
    estimates, advice = answer.get("estimates", []), answer.get("advice")
    upper, gpu = answer.get("upper"), answer.get("gpu")
    sensible = isinstance(estimates, list) and all(map(_is_estimate, estimates))
    if not sensible or type(upper) is not int or not 0 <= upper <= _LARGEST_BOUND or gpu not in wanted.gpus:
        return EstimateAnswer(None, _not_estimated("its process gave an answer that makes no sense"), seconds)
    if len(estimates) != len(wanted.gpus):
        wrong = f"one estimate for each model of GPU ({len(wanted.gpus)}), got {len(estimates)}"
        return EstimateAnswer(None, _not_estimated(f"its process must answer with {wrong}"), seconds)
    fits = "" if answer.get("fits") else f", which does not fit on {gpu}"
    ranks, number = answer.get("world_size"), answer.get("rank")
    known = type(ranks) is int and type(number) is int and 0 <= number < ranks <= _MOST_RANKS and ranks > 1
    rank = f", as rank {number} of {ranks}" if known else ""
    smact = _read_smact(answer.get("activity"))
    busy = "" if smact is None else f", SMACT about {smact:.0%} by its class"
    note = f"estimated by {wanted.estimator} for {gpu}{rank}{fits}{busy}"
    return EstimateAnswer(
        upper,
        note,
        seconds,
        utilization=read_utilization(answer.get("utilization"), wanted.gpus),
        smact=smact,
        reads=reads,
        breakdown=_read_breakdown(answer.get("breakdown")),
        estimates=estimates,
        advice=advice if _is_advice(advice) else None,
        by_rank=_read_by_rank(answer.get("by_rank"), upper, ranks) if known else (),
    )


def _read_smact(activity: Any) -> float | None:
    """Return the middle of the class of SMACT; `None` if it is not valid.

    >>> _read_smact({"smact": {"least": 0.25, "most": 0.75}}), _read_smact({"smact": {"least": 9}}), _read_smact(None)
    (0.5, None, None)
    """
    known = activity.get("smact") if isinstance(activity, dict) else None
    edges: list[Any] = [known.get("least"), known.get("most")] if isinstance(known, dict) else []
    if not edges or not all(type(edge) in (int, float) and 0 <= edge <= 1 for edge in edges):
        return None
    return float(sum(edges)) / 2


def _read_by_rank(by_rank: Any, upper: int, ranks: Any) -> tuple[int, ...]:
    """Return the bounds of all ranks, the largest of them `upper`; nothing if they are all equal or invalid.

    >>> _read_by_rank([5, 9], 9, ranks=2), _read_by_rank([9, 9], 9, ranks=2), _read_by_rank([5, 10], 9, ranks=2)
    ((5, 9), (), ())
    """
    if not isinstance(by_rank, list) or len(by_rank) != ranks or not all(type(each) is int for each in by_rank):
        return ()
    return tuple(by_rank) if 0 <= min(by_rank) < max(by_rank) == upper else ()


def _read_breakdown(breakdown: Any) -> dict[str, int]:
    """Return the parts with a known name and a valid size.

    >>> _read_breakdown({"parameters": 5, "context": -1, "<b>": 3})
    {'parameters': 5}
    """
    given = breakdown if isinstance(breakdown, dict) else {}
    sizes = {name: given.get(name) for name in BREAKDOWN_WORDS}
    return {name: size for name, size in sizes.items() if type(size) is int and 0 <= size <= _LARGEST_BOUND}


def _is_estimate(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("gpu"), str) and isinstance(value.get("fits"), bool)


def _is_advice(value: Any) -> bool:
    """Whether a value has the form of `estimation.jobs.child.advise`."""
    if not isinstance(value, dict) or not isinstance(value.get("options"), list):
        return False
    kinds = {"change": str, "fits": bool, "takes": int | None, "note": str}
    sensible = all(
        isinstance(each, dict) and all(isinstance(each.get(name), kind) for name, kind in kinds.items())
        for each in value["options"]
    )
    return sensible and isinstance(value.get("largest"), str | None)


def reason_of(answer: EstimateAnswer) -> str | None:
    """Return why there is no estimate; `None` if there is one."""
    return answer.note.removeprefix(NOT_ESTIMATED) if answer.upper is None else None


def _not_estimated(why: Any) -> str:
    return f"{NOT_ESTIMATED}{plain(str(why)[:_LONGEST_NOTE])}"
