"""Estimate an unmodified script that trains on "cuda", in its own process."""

import base64
import dataclasses
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.result import Estimate
from ullage.estimation.scripts.failures import is_launcher_missing, is_own, message, missing_package, only_pytorch
from ullage.estimation.scripts.frameworks import other_framework
from ullage.estimation.scripts.request import GRACE, ScriptRequest, unpacked
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest, Script
from ullage.jobs.kinds import check_script
from ullage.jobs.ranks import MPI, SLURM, TORCHRUN, Rank
from ullage.performance.step import StepCalls
from ullage.sandbox.environment import environment
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.interpreter import Interpreter, environment_with, find_interpreter
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import Outcome, run
from ullage.sandbox.worker_pool import WorkerPool
from ullage.units import GIB

_PATIENCE = 30.0  # seconds more for a script that does not let itself be stopped
_LIMITS = {"processes": 512, "written": 4 * GIB}  # of a script; the workers of its loaders are such processes
_PRELOAD = ("ullage.estimation.asking", "ullage.estimation.scripts.child")  # of a process that others are forked from
_OF_RANKS = "torch._dynamo"  # which torch.distributed imports with the first process group
TAIL = 20  # lines of the script's output that are shown when it fails


def estimate_script(request: JobRequest, gpu: GPU, seen: "SeenOfRanks | None" = None) -> Estimate:
    """Estimate a script on `gpu`, without a GPU.

    The script runs as `python path args...` would (`python -m path args...` with `module`), in this folder, in its own
    process and on a virtual GPU. It is followed until its training has settled, for at least `steps` optimizer steps,
    and a little further for validation and checkpoints; `steps=None` lets it run to its end. Its output goes to
    standard error with `show_output`; the last lines are shown if it fails. If it runs out of memory, it runs again
    without a limit. Its writes are discarded, and it reaches no other machine unless `network` allows that. As a rank
    of many it has the variables of its launcher; `accelerate launch` itself says how it starts the script. `seen`
    describes other ranks, and gets this one.

    Not covered (`ScriptFailed`): a process that uses several GPUs, and compiled code other than operators with fakes.
    """
    first = _first_run(request, gpu, traced=request.trace is not None, received=seen.sent if seen else {})
    last, answer = _followed(first)
    if seen is not None:
        seen.see(answer)
    if request.trace is not None:
        request.trace.read(base64.b64decode(answer["trace"]))
    figures = answer["estimate"] | {"notes": [*last.notes, *answer["estimate"]["notes"]], "source": first.shown}
    if last.out_of_memory is not None:
        figures |= {"out_of_memory": last.out_of_memory, "fits": False}
    calls = StepCalls(**unpacked(answer["calls"]) | {"interconnect": request.ranks.interconnect})
    return Estimate.from_dict(figures).with_utilization(calls, gpu)


@dataclasses.dataclass
class SeenOfRanks:
    """Messages of a rank to others (`sent`, which only they read), and the ranks (`apart`) that exchange such messages:
    they may have other parts of the model."""

    sent: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    apart: list[int] = dataclasses.field(default_factory=list)

    def see(self, answer: dict[str, Any]) -> None:
        """Keep the answer of the first rank that was followed."""
        self.sent = self.sent or answer.get("sent", {})
        self.apart = self.apart or answer.get("apart", [])


def convolutions_of_script(path: str | os.PathLike[str], args: Sequence[str] = ()) -> list[list[Any]]:
    """Return the fields of each `ConvolutionProblem` that a script passes to cuDNN on an H200."""
    request = JobRequest(Script(os.fspath(path), args))
    _, answer = _followed(_first_run(request, find_gpu("H200"), convolutions=True))
    convolutions: list[list[Any]] = answer["convolutions"]
    return convolutions


def step_of_script(request: JobRequest, gpu: GPU) -> dict[str, Any]:
    """Return the operator calls of a script's training step: `OperatorCalls.step()`."""
    _, answer = _followed(_first_run(request, gpu))
    return unpacked(answer["calls"])


def _first_run(job: JobRequest, gpu: GPU, **more: Any) -> "Run":
    script, rank = job.script, job.ranks.first
    assert script is not None
    python = find_interpreter(sys.executable if script.python is None else os.fspath(script.python))
    if job.steps is not None and job.steps < 1:
        raise InvalidValue(f"steps must be at least 1, got {job.steps}")
    if not script.timeout > 0:
        raise InvalidValue(f"timeout must be more than 0 seconds, got {script.timeout}")
    request = ScriptRequest(
        path=str(script.path),
        args=list(script.args),
        module=script.module,
        gpu=gpu,
        steps=job.steps,
        timeout=script.timeout,
        limited=True,
        config=job.allocator,
        launcher=_launcher_words(job.ranks.launcher),
        **more,
    )
    return Run(
        request=request,
        python=_started_as(rank, python),
        rank=rank,
        network=script.network,
        show_output=script.show_output,
        progress=job.progress,
    )


def _started_as(rank: Rank | None, python: Interpreter) -> Interpreter:
    return python if rank is None else python._replace(env=python.env | rank.environment)


def _launcher_words(launcher: str) -> list[str]:
    """Return the words of `accelerate launch`; for other launchers, whose variables Ullage knows, no words."""
    words = shlex.split(launcher)
    if words[:2] == ["accelerate", "launch"]:
        return words
    if words[:1] == ["accelerate"] or len(words) != 1:
        raise InvalidValue(f"launcher must be accelerate launch, {MPI}, {SLURM} or {TORCHRUN}, got {launcher!r}")
    return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a script in a child process; a rule that wants another run changes the last one.

    `before` is the answer if this run gives none. `follower` is the run of another rank that waits for messages of this
    one, the first rank.
    """

    request: ScriptRequest
    python: Interpreter
    rank: Rank | None = None
    network: bool = False
    show_output: bool = False
    progress: Callable[[str], None] | None = None
    notes: tuple[str, ...] = ()
    out_of_memory: str | None = None
    before: dict[str, Any] | None = None
    follower: "Run | None" = None

    @property
    def shown(self) -> str:
        """The script as its user typed it."""
        return f"-m {self.request.path}" if self.request.module else self.request.path

    def answer(self) -> dict[str, Any]:
        """Run the script in a child process and return its answer, with the end of the script's output."""
        many = _many[-1] if _many else None
        outcome = run(
            "ullage.estimation.scripts.child:run_script",
            dataclasses.asdict(self.request),
            limits=Limits(seconds=self.request.timeout + GRACE + _PATIENCE, **_LIMITS),
            env=_environment(self.python, self.network),
            cwd=os.getcwd(),
            private=Sandbox(network=self.network),
            python=None if self.python.is_ours else self.python.path,
            show=_show if self.show_output else None,
            progress=self.progress,
            warm=many.warm if many else None,
            stop=many.stop if many else None,
        )
        kind = "refused" if outcome.reason == "error" else "died"
        answer = outcome.answer or _seen_before(outcome) or {"status": "failed", "kind": kind, "how": outcome.failure}
        if self.before is not None and answer["status"] != "estimated":
            return self.before
        return {**answer, "output": outcome.last_lines(TAIL)}

    def anew(self, **changes: Any) -> "Run":
        """Return this run with a changed request, without results of an earlier run."""
        return dataclasses.replace(self, request=dataclasses.replace(self.request, sizes={}, **changes), before=None)

    def with_note(self, note: str) -> "Run":
        return dataclasses.replace(self, notes=(*self.notes, note))


def follow(run: Run) -> tuple[Run, dict[str, Any]]:
    """Run a script until no rule wants another run; return the last run and its answer."""
    used = [0] * len(_RULES)
    while True:
        answer = run.answer()
        for place, (rule, most) in enumerate(_RULES):
            changed = rule(run, answer) if used[place] < most else None
            if changed is not None:
                run, used[: place + 1] = changed, [*[0] * place, used[place] + 1]
                break
        else:
            return run, answer


def _ask_cudnn(run: Run, answer: dict[str, Any]) -> Run | None:
    """Ask the cuDNN of this machine's GPU about unknown convolutions, in a process with the real GPU."""
    if not answer.get("unanswered"):
        return None
    from ullage.virtual.cudnn.cudnn_query import HIDDEN, asking  # which imports PyTorch
    from ullage.virtual.cudnn.formulas import ConvolutionProblem

    say = run.progress or (lambda text: None)
    say("asking cuDNN on this card")
    with asking(run.request.gpu, answer["cudnn"], None if run.python.is_ours else run.python) as answers:
        if answers is not None:
            answers.find_out([ConvolutionProblem.of(values) for values in answer["unanswered"]])
    say("")
    problem = HIDDEN if answers is None else answers.words if answers.failed else None
    if problem and "estimate" in answer:
        answer["estimate"]["notes"].append(problem)
    return None if problem else run


def _use_sizes(run: Run, answer: dict[str, Any]) -> Run | None:
    """Run again with the sizes that the script's own shapes revealed, after more had been assumed."""
    if not answer.get("sizes"):
        return None
    return dataclasses.replace(run, request=dataclasses.replace(run.request, sizes=answer["sizes"]), before=answer)


def _be_torchrun(run: Run, answer: dict[str, Any]) -> Run | None:
    """Run again with the variables that torchrun sets, if the script expects them."""
    if not is_launcher_missing(answer):
        return None
    whom = f"the ranks that {run.rank.launcher} starts" if run.rank else "a single process"
    python = _started_as(dataclasses.replace(run.rank or Rank(), launcher=TORCHRUN), run.python)
    note = f"the script wants to be started by torchrun: it was given what torchrun gives to {whom}"
    return dataclasses.replace(run.anew().with_note(note), python=python)


def _hear_first_rank(run: Run, answer: dict[str, Any]) -> Run | None:
    """Run the first rank if the script waits for its messages, then this one with them."""
    if run.follower is not None:
        return run.follower.anew(received=answer.get("sent", {}))
    if not answer.get("waits") or run.rank is None or not run.rank.number or run.request.received:
        return None
    python = _started_as(dataclasses.replace(run.rank, number=0), run.python)
    return dataclasses.replace(run.anew(), python=python, show_output=False, follower=run)


def _lift_limit(run: Run, answer: dict[str, Any]) -> Run | None:
    """Run again without a limit after running out of memory."""
    if answer["status"] != "failed" or answer.get("out_of_memory") is None:
        return None
    again = run.anew(limited=False).with_note("ran out of memory; the figures assume a card without a memory limit")
    return dataclasses.replace(again, out_of_memory=answer["out_of_memory"])


# Each rule sees an answer and may change the run for another one, at most this often after any rule below it did.
_RULES: tuple[tuple[Callable[[Run, dict[str, Any]], Run | None], int], ...] = (
    (_ask_cudnn, 2),  # with cuDNN's answers a script may go further than before
    (_use_sizes, 1),
    (_be_torchrun, 1),
    (_hear_first_rank, 2),  # once to the first rank, once back
    (_lift_limit, 1),
)


def _followed(run: Run) -> tuple[Run, dict[str, Any]]:
    """Check a script and follow it; return its last run and the answer, or raise `ScriptFailed`."""
    path, module = run.request.path, run.request.module
    if run.python.is_ours or not module:  # only another Python itself knows its modules
        check_script(path, module)
    if framework := other_framework(path, module):
        raise ScriptFailed(only_pytorch(run.shown, framework))
    if not run.python.is_ours:
        run = run.with_note(f"the script ran in {run.python.path}")
    run, answer = follow(run)
    if answer["status"] == "failed":
        answer |= _where_missing_package_is(answer, path) | {"launched": run.rank is not None}
        text = message(answer, run.shown, run.request.timeout, run.network)
        raise ScriptFailed(text, answer["output"], is_own(answer))
    return run, answer


def _where_missing_package_is(failure: dict[str, Any], path: str) -> dict[str, Any]:
    missing = missing_package(failure)
    if not missing:
        return {}
    return {"elsewhere": environment_with(missing, path), "around": _folder_with(missing, path)}


def _folder_with(package: str, path: str) -> str | None:
    """Return the working folder, or one above the script, if it has the package: Python does not look there."""
    script = Path(path).resolve()
    for folder in (Path.cwd(), *script.parents[1:4]):
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            return str(folder)
    return None


class _ManyRuns(NamedTuple):
    warm: WorkerPool
    stop: threading.Event


_many: list[_ManyRuns] = []


@contextmanager
def many_runs(of_ranks: bool = False, warm: WorkerPool | None = None) -> Iterator[threading.Event]:
    """Fork the processes of scripts from a worker inside this `with`, if possible: for a search that runs a script
    again and again, `of_ranks` as one rank of many. It uses the workers of `warm`, or those of an enclosing `with`. The
    yielded event ends the runs of all other threads."""
    if warm is None and not _many:
        preload = [*_PRELOAD, *([_OF_RANKS] if of_ranks else [])]
        made = WorkerPool(preload, limits=Limits(processes=_LIMITS["processes"]))
        with closing(made), many_runs(warm=made) as stop:
            yield stop
        return
    here = _ManyRuns(warm or _many[-1].warm, threading.Event())
    _many.append(here)
    try:
        yield here.stop
    finally:
        _many.pop()


def _seen_before(outcome: Outcome) -> dict[str, Any] | None:
    """Return the last provisional answer of a process that ended without a final one."""
    if outcome.so_far is None:
        return None
    values = outcome.so_far["estimate"]
    entry = outcome.so_far.pop("interrupted")
    values["notes"].append(f"the process {outcome.failure}: later code is not in these figures")
    values["left_out"].append(entry)
    for bounds in (values, values.get("without_trials") or {"upper": 0}):
        bounds["upper"] += entry["adds"]
    return outcome.so_far


def _environment(python: Interpreter, network: bool) -> dict[str, str]:
    """Return the variables of a script. Trackers are off; without the network, so is the Hugging Face Hub."""
    alone = {} if network else {"HF_HUB_OFFLINE": "1"}
    own = environment(python.env, ours=python.is_ours)
    return {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", **own, **alone}


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
