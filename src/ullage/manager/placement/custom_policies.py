"""Custom policies: a function that chooses GPUs for each job.

    def choose(job, gpus, now):
        return max(gpus, key=lambda gpu: gpu.free)

The function gets the job (`promise` None: unknown), the GPUs that may take it, and the time. It returns one GPU,
several (best first), or None to let the job wait. All GPUs that it gets have room for the job by ledger and rules, so a
bad choice is never unsafe.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ullage.errors import InvalidValue, PolicyFailed
from ullage.manager.placement.fairness import came
from ullage.manager.placement.gpus import Gpu
from ullage.manager.placement.policies import Policy, by_index
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Job, Slot

TRAITS = {"oracle": False, "alone": False, "backfills": True, "predicts": True}
"""The attributes that a function can have (`choose.backfills = False`), and their defaults."""

Choice = Callable[[Job, Sequence["GpuView"], float], Any]
"""A custom policy: a function that chooses GPUs."""


class GpuView:
    """A GPU or MIG instance for a custom policy, read-only. `total` and `free` (not promised) are in bytes. `count` is
    the number of jobs, `jobs` are the known ones, and `load` is the expected SM activity (None: unknown)."""

    __slots__ = ("_gpu", "_rules", "load")

    def __init__(self, gpu: Gpu, rules: Rules, load: float | None) -> None:
        self._gpu, self._rules, self.load = gpu, rules, load

    index = property(attrgetter("_gpu.slot.index"))
    name = property(attrgetter("_gpu.slot.name"))
    total = property(attrgetter("_gpu.slot.total"))
    free = property(attrgetter("_gpu.free"))
    count = property(attrgetter("_gpu.job_count"))

    @property
    def idle(self) -> bool:
        """Whether the GPU has no job, and others use hardly any memory."""
        return self._gpu.is_idle(self._rules)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Return the jobs there whose description is known."""
        return tuple([_view(job, job.promise, job.exclusive) for job in self._gpu.jobs])

    def speeds(self, *more: Job) -> list[float] | None:
        """Return the predicted share of its speed alone, 0 to 1, of each of `jobs`, then `more`. None if one is
        unknown."""
        here = [*self._gpu.jobs, *more]
        works = [job.work for job in here if job.work is not None]
        if self._gpu.job_count != len(self._gpu.jobs) or len(works) < len(here) or self._rules.predict is None:
            return None
        if len(works) < 2:
            return [1.0] * len(works)
        speeds = self._rules.predict(works, self._gpu.slot)
        return None if speeds is None else list(speeds.shares)

    def __repr__(self) -> str:
        slot: Slot = self._gpu.slot
        return f"GpuView(index={slot.index}, name={slot.name!r}, free={self.free}, count={self.count})"


def custom_policy(name: str, function: Choice) -> Policy:
    """Return a policy that calls a function. The first line of its docstring is the summary."""
    given = {trait: value for trait, value in vars(function).items() if not trait.startswith("_")}
    for trait, value in given.items():
        if trait not in TRAITS or not isinstance(value, bool):
            valid = ", ".join(TRAITS)
            raise InvalidValue(f"{name} must have True or False for {valid}, got {trait} = {value!r}")
    summary = (function.__doc__ or "").strip().partition("\n")[0] or "a policy of one's own"
    traits = TRAITS | given
    return Policy(name, summary, by_index, choose=_Chooser(name, function, traits["predicts"]), **traits)


def forgiving(policy: Policy, failed: Callable[[PolicyFailed], None]) -> Policy:
    """Return the policy, changed so that a job whose choice fails waits, and the error goes to `failed`."""
    ask = policy.choose
    if ask is None:
        return policy

    def choose(job: Job, request: SlotRequest, suited: Sequence[Gpu], rules: Rules, now: float) -> Sequence[Gpu]:
        try:
            return ask(job, request, suited, rules, now)
        except PolicyFailed as failure:
            failed(failure)
            return ()

    return replace(policy, choose=choose)


class _Chooser:
    """Calls the function, and checks its answer."""

    def __init__(self, name: str, function: Choice, predicts: bool) -> None:
        self._name, self._function, self._predicts = name, function, predicts

    def __call__(self, job: Job, request: SlotRequest, suited: Sequence[Gpu], rules: Rules, now: float) -> list[Gpu]:
        gpus = [GpuView(gpu, rules, gpu.busy_now if self._predicts else gpu.load) for gpu in suited]
        view = _view(job, request.promise if request.known else None, request.alone)
        try:
            answer = self._function(view, tuple(gpus), now)
        except (Exception, SystemExit) as error:  # no error of the function may end the caller
            raise PolicyFailed(self._name, job.id, _error_text(error)) from error
        if answer is None:
            return []
        if isinstance(answer, GpuView) and request.gpus > 1:
            reason = f"it must return a list of GPUs because the job asks for {request.gpus}, got one GPU"
            raise PolicyFailed(self._name, job.id, reason)
        by_view = {id(view): gpu for view, gpu in zip(gpus, suited, strict=True)}
        chosen = list(answer) if isinstance(answer, list | tuple) else [answer]
        targets = [by_view.pop(id(each), None) for each in chosen]
        if None in targets:
            wanted = "one of the GPUs that it was given, a list of them, each once, or None"
            raise PolicyFailed(self._name, job.id, f"it must return {wanted}, got {repr(answer)[:200]}")
        return [gpu for gpu in targets if gpu is not None]


def _view(job: Job, promise: int | None, exclusive: bool) -> Job:
    """Return the job without its true memory, which only oracles may see."""
    return replace(job, promise=promise, promises=(), true=None, exclusive=exclusive, queued=came(job))


def _error_text(error: BaseException) -> str:
    """Return the function's error in one line, with its place in the file."""
    text = " ".join(str(error).split())
    inside = error.__traceback__ and error.__traceback__.tb_next
    own, line = inside and inside.tb_frame.f_code.co_filename, 0
    while inside is not None:
        line = inside.tb_lineno if inside.tb_frame.f_code.co_filename == own else line
        inside = inside.tb_next
    place = f" (line {line} of {own})" if own else ""
    return f"{type(error).__name__}: {text}"[:300] + place
