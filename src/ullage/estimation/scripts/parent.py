"""Estimate a script that trains on "cuda", as it stands, in a process of its own."""

from __future__ import annotations

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

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.result import Estimate
from ullage.estimation.scripts.failures import is_launcher_missing, is_own, message, missing_package, only_pytorch
from ullage.estimation.scripts.frameworks import framework_of, other_framework
from ullage.estimation.scripts.request import GRACE, ScriptRequest, unpacked
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.kinds import check_script
from ullage.jobs.ranks import MPI, SLURM, TORCHRUN, Rank
from ullage.jobs.workload import RunOptions
from ullage.performance.step import StepCalls
from ullage.sandbox.environment import environment
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.interpreter import Interpreter, environment_with, find_interpreter
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import Outcome, run
from ullage.sandbox.worker_pool import WorkerPool
from ullage.units import GIB

DEFAULT_TIMEOUT = 300.0  # seconds
_PATIENCE = 30.0  # seconds more for a script that does not let itself be stopped
_LIMITS = {"processes": 512, "written": 4 * GIB}  # of a script; the workers of its loaders are such processes
_PRELOAD = ("ullage.estimation.asking", "ullage.estimation.scripts.child")  # of a process that others are forked from
_OF_RANKS = "torch._dynamo"  # which torch.distributed imports with the first process group
_ROUNDS = 2  # in which cuDNN is asked: with its answers a script may go further than before
TAIL = 20  # lines of the script's output that are shown when it fails


def estimate_script(
    path: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str | GPU = "H200",
    steps: int | None = 3,
    timeout: float = DEFAULT_TIMEOUT,
    config: AllocatorConfig | None = None,
    trace_file: str | os.PathLike[str] | None = None,
    show_output: bool = False,
    network: bool = False,
    python: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    rank: Rank | None = None,
    interconnect: str | None = None,
    launcher: str = TORCHRUN,
    seen: SeenOfRanks | None = None,
) -> Estimate:
    """How much memory a script will take on `gpu`, found without a GPU.

    The script runs as `python path args...` would (`python -m path args...` with `module`), in this folder and in a
    process of its own, on a virtual GPU. It is followed until its training has settled, at least `steps` optimizer
    steps, and a little further for validation and checkpoints; then it is stopped. `steps=None` lets it run to its end.
    Its output is kept apart: shown on standard error with `show_output`, and its last lines when it fails. If it runs
    out of memory, it is run once more on a card without limit to say how much it would need. What it writes is gone
    with it, and it reaches no other machine, unless `network` allows that. `python` names another Python to run it in:
    the path of one, the folder of an environment, or the name of a conda environment. It needs PyTorch, not Ullage.
    `progress` is called with what takes long, such as "compiling Net.forward", and with nothing when it is done.
    `rank` is the one of many as which it runs, with the variables that its launcher would give to it; `interconnect`
    names the networks by which they reach each other. `launcher` may be `accelerate launch` with its options:
    accelerate itself then says how it starts the script. `seen` is what was seen in other ranks, and is filled with
    what is seen in this one.

        estimate_script("train.py", ["--batch-size", "64"], gpu="A100-40GB").fits

    Not covered: a process that uses several GPUs, and compiled code that is no operator with a fake: `ScriptFailed`.
    """
    interpreter = _started_as(rank, find_interpreter(sys.executable if python is None else os.fspath(python)))
    if steps is not None and steps < 1:
        raise InvalidValue(f"needed at least one step to follow; found {steps}")
    if not timeout > 0:
        raise InvalidValue(f"needed a time limit above zero seconds; found {timeout}")
    request = ScriptRequest(
        path=str(path),
        args=[str(value) for value in args],
        module=module,
        gpu=find_gpu(gpu),
        steps=steps,
        timeout=timeout,
        limited=True,
        config=config,
        traced=trace_file is not None,
        launcher=_asked(launcher),
        received=seen.sent if seen else {},
    )
    answer, notes, out_of_memory = _followed(request, interpreter, network, show_output, progress, rank)
    if seen is not None:
        seen.see(answer)
    if trace_file is not None:
        _write(base64.b64decode(answer["trace"]), trace_file)
    found = _estimate(answer["estimate"], notes, out_of_memory, _shown(request))
    return found.with_utilization(StepCalls(**unpacked(answer["calls"]) | {"interconnect": interconnect}), request.gpu)


@dataclasses.dataclass
class SeenOfRanks:
    """What a rank sends to others (`sent`, which only they read), and the ranks (`apart`) with which it exchanges such
    messages: they may have other parts of the model."""

    sent: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    apart: list[int] = dataclasses.field(default_factory=list)

    def see(self, answer: dict[str, Any]) -> None:
        """Keep what the first rank that was followed says."""
        self.sent = self.sent or answer.get("sent", {})
        self.apart = self.apart or answer.get("apart", [])


def convolutions_of_script(path: str | os.PathLike[str], args: Sequence[str] = ()) -> list[list[Any]]:
    """The fields of each `ConvolutionProblem` that a script gives to cuDNN on an H200, followed as for an estimate."""
    request = ScriptRequest(
        path=str(path),
        args=[str(value) for value in args],
        module=False,
        gpu=find_gpu("H200"),
        steps=3,
        timeout=DEFAULT_TIMEOUT,
        limited=True,
        convolutions=True,
    )
    answer, _, _ = _followed(request, find_interpreter(sys.executable), network=False, show_output=False)
    found: list[list[Any]] = answer["convolutions"]
    return found


def step_of_script(path: str | os.PathLike[str], args: Sequence[str], gpu: GPU, how: RunOptions) -> dict[str, Any]:
    """The operator calls of a training step of a script, followed as for an estimate: `OperatorCalls.step()`."""
    request = ScriptRequest(
        path=str(path),
        args=[str(value) for value in args],
        module=how.module,
        gpu=gpu,
        steps=how.steps,
        timeout=DEFAULT_TIMEOUT if how.timeout is None else how.timeout,
        limited=True,
        config=how.allocator_config,
        launcher=_asked(how.launcher),
    )
    python = find_interpreter(sys.executable if how.python is None else os.fspath(how.python))
    rank = how.as_rank
    answer, _, _ = _followed(request, _started_as(rank, python), how.network, how.show_output, rank=rank)
    return unpacked(answer["calls"])


def _started_as(rank: Rank | None, python: Interpreter) -> Interpreter:
    return python if rank is None else python._replace(env=python.env | rank.environment)


def _asked(launcher: str) -> list[str]:
    """The words of a launcher that is asked itself what it sets; of the others that is known."""
    words = shlex.split(launcher)
    if words[:2] == ["accelerate", "launch"]:
        return words
    if words[:1] == ["accelerate"] or len(words) != 1:
        raise InvalidValue(f"launcher: needed accelerate launch, {MPI}, {SLURM} or {TORCHRUN}; found {launcher!r}")
    return []


def _shown(request: ScriptRequest) -> str:
    return f"-m {request.path}" if request.module else request.path


def _followed(
    request: ScriptRequest,
    interpreter: Interpreter,
    network: bool,
    show_output: bool,
    progress: Callable[[str], None] | None = None,
    rank: Rank | None = None,
) -> tuple[dict[str, Any], list[str], str | None]:
    """The answer for a script, notes on how it was run, and how it ran out of memory, if it did."""
    path, module, shown = request.path, request.module, _shown(request)
    if interpreter.is_ours or not module:  # which modules another Python has only it can say
        check_script(path, module)
    if framework := other_framework(path, module):
        raise ScriptFailed(only_pytorch(shown, framework))
    private = Sandbox(network=network)
    notes = [] if interpreter.is_ours else [f"the script ran in {interpreter.path}"]
    answer = _run(request, interpreter, private, show_output, progress)
    if is_launcher_missing(answer):
        interpreter = _started_as(dataclasses.replace(rank or Rank(), launcher=TORCHRUN), interpreter)
        whom = f"the ranks that {rank.launcher} starts" if rank else "a single process"
        notes.append(f"the script wants to be started by torchrun: it was given what torchrun gives to {whom}")
        answer = _run(request, interpreter, private, show_output, progress)
    if answer.get("waits") and rank is not None and rank.number and not request.received:
        first = _run(request, _started_as(dataclasses.replace(rank, number=0), interpreter), private, False, progress)
        request = dataclasses.replace(request, received=first.get("sent", {}))
        answer = _run(request, interpreter, private, show_output, progress)
    out_of_memory = answer.get("out_of_memory") if answer["status"] == "failed" else None
    if out_of_memory is not None:
        notes.append("ran out of memory; the figures are those of a card without limit")
        answer = _run(dataclasses.replace(request, limited=False), interpreter, private, show_output, progress)
    if answer["status"] == "failed":
        answer |= _circumstances(answer, path, module) | {"launched": rank is not None}
        raise ScriptFailed(message(answer, shown, request.timeout, network), answer["output"], is_own(answer))
    return answer, notes, out_of_memory


def _estimate(values: dict[str, Any], notes: list[str], out_of_memory: str | None, shown: str) -> Estimate:
    values |= {"notes": notes + values["notes"], "source": shown}
    if out_of_memory is not None:
        values |= {"out_of_memory": out_of_memory, "fits": False}
    return Estimate.from_dict(values)


def _circumstances(failure: dict[str, Any], path: str, module: bool) -> dict[str, Any]:
    """What this side knows about a failure: another framework, or where the missing package is."""
    missing = missing_package(failure)
    return {
        "framework": framework_of(path, module, [*failure.get("imported", []), missing]),
        "elsewhere": environment_with(missing, path) if missing else None,
        "around": _folder_with(missing, path) if missing else None,
    }


def _folder_with(package: str, path: str) -> str | None:
    """The working folder, or one above the script, if the package is in it: Python does not look there by itself."""
    script = Path(path).resolve()
    for folder in (Path.cwd(), *script.parents[1:4]):
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            return str(folder)
    return None


def _run(
    request: ScriptRequest,
    python: Interpreter,
    private: Sandbox,
    show_output: bool,
    progress: Callable[[str], None] | None,
) -> dict[str, Any]:
    """Run the script in a child process and read its answer, with the end of the script's output.

    On a card of this machine, cuDNN is asked about convolutions that nothing is known of, and the script runs again. It
    also does where its own shapes have told how much it selects from a tensor, after more had been assumed.
    """

    many = _many[-1] if _many else None

    def once(request: ScriptRequest = request) -> dict[str, Any]:
        outcome = run(
            "ullage.estimation.scripts.child:run_script",
            dataclasses.asdict(request),
            limits=Limits(seconds=request.timeout + GRACE + _PATIENCE, **_LIMITS),
            env=_environment(python, private.network),
            cwd=os.getcwd(),
            private=private,
            python=None if python.is_ours else python.path,
            show=_show if show_output else None,
            progress=progress,
            warm=many.warm if many else None,
            stop=many.stop if many else None,
        )
        kind = "refused" if outcome.reason == "error" else "died"
        found = outcome.answer or _seen_before(outcome) or {"status": "failed", "kind": kind, "how": outcome.failure}
        return {**found, "output": outcome.last_lines(TAIL)}

    found = once()
    for _ in range(_ROUNDS):
        if not found.get("unanswered"):
            break
        if problem := _ask_cudnn(request, python, found, progress):
            if "estimate" in found:
                found["estimate"]["notes"].append(problem)
            break
        found = once()
    if found.get("sizes"):
        again = once(dataclasses.replace(request, sizes=found["sizes"]))
        found = again if again["status"] == "estimated" else found
    return found


def _ask_cudnn(
    request: ScriptRequest, python: Interpreter, found: dict[str, Any], progress: Callable[[str], None] | None
) -> str | None:
    """Have cuDNN's answers about a script's convolutions remembered, by a process with the real card; returns what a
    report says where that failed."""
    from ullage.virtual.kernels.cudnn.asked import HIDDEN, asking  # which imports PyTorch
    from ullage.virtual.kernels.cudnn.formulas import ConvolutionProblem

    if progress is not None:
        progress("asking cuDNN on this card")
    with asking(request.gpu, found["cudnn"], None if python.is_ours else python) as answers:
        if answers is not None:
            answers.find_out([ConvolutionProblem.of(values) for values in found["unanswered"]])
    if progress is not None:
        progress("")
    return HIDDEN if answers is None else answers.words if answers.failed else None


class _ManyRuns(NamedTuple):
    warm: WorkerPool
    stop: threading.Event


_many: list[_ManyRuns] = []


@contextmanager
def many_runs(of_ranks: bool = False, warm: WorkerPool | None = None) -> Iterator[threading.Event]:
    """Inside, the processes of scripts are forked from one that has imported PyTorch, where that is possible: for a
    search that runs a script again and again, `of_ranks` as one rank of many. Processes that are given (`warm`), or
    those of another one around this one, serve. The event that it gives ends all that other threads have under way."""
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
    """What a process that ended without an answer had seen of the script's training."""
    if outcome.so_far is None:
        return None
    values = outcome.so_far["estimate"]
    entry = outcome.so_far.pop("interrupted")
    values["notes"].append(f"the process {outcome.failure}: what comes later is not in these figures")
    values["left_out"].append(entry)
    for bounds in (values, values.get("without_trials") or {"upper": 0}):
        bounds["upper"] += entry["adds"]
    return outcome.so_far


def _write(content: bytes, file: str | os.PathLike[str]) -> None:
    try:
        Path(file).write_bytes(content)
    except OSError as error:
        raise InvalidValue(f"cannot write the trace to {file}: {error.strerror}") from None


def _environment(python: Interpreter, network: bool) -> dict[str, str]:
    """Trackers on the network stay out of it, unless the user wants them. Without a network, the hub is not tried."""
    alone = {} if network else {"HF_HUB_OFFLINE": "1"}
    own = environment(python.env, ours=python.is_ours)
    return {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", **own, **alone}


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
