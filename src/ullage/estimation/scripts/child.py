"""Run a script on a virtual GPU, inside its child process, which `estimate_script` starts.

The answer is given once: when the script has been followed far enough, has ended, has failed, or its time is over. A
provisional answer is sent every few seconds, and when training has settled: it counts if the process is killed or
hangs. The script's output stays on this process's standard output and error.
"""

import base64
import faulthandler
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ullage.estimation.from_virtual_gpu import figures_of
from ullage.estimation.scripts.driver import install_driver
from ullage.estimation.scripts.failures import as_user_sees, describe, where_now
from ullage.estimation.scripts.loops import compiled
from ullage.estimation.scripts.processes import Launching, Processes
from ullage.estimation.scripts.request import GRACE, SLOW_PACKAGES, ScriptRequest, packed
from ullage.estimation.scripts.stand_ins import install_stand_ins
from ullage.estimation.scripts.weights import Weights
from ullage.estimation.scripts.when_to_stop import RunWatcher
from ullage.sandbox.child import give_answer, give_so_far, say_doing
from ullage.units import format_duration
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.cudnn.cudnn_query import Answers, may_ask, used
from ullage.virtual.distributed.groups import Groups
from ullage.virtual.gpu import VirtualGPU, follow_allocator_settings
from ullage.virtual.torch_cuda.safetensors import install_safetensors
from ullage.virtual.upper_bound import LEFT_OUT, meanings_of
from ullage.virtual.watching.convergence import MemoryConverged

if TYPE_CHECKING:
    from ullage.estimation.timeline.trace import Trace

FIRST_LOOK, LATER_LOOKS, LEAST_WORK = 2.0, 1.5, 20  # first pause in seconds, its growth, least multiple of a look


def run_script(values: dict[str, Any]) -> None:
    """Run the script of a request; exit by `os._exit` if the script cannot be stopped otherwise."""
    faulthandler.enable()  # a crash shows the line of the script
    request = ScriptRequest.from_values(values)
    run = ScriptRun(request, give_answer, give_so_far)
    run.card.doing = say_doing
    _watch(request.timeout, run)
    code = run.run()
    leave_after(GRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _watch(seconds: float, run: "ScriptRun") -> None:
    """Send provisional answers, and answer when the time is over."""
    end, pause = time.monotonic() + seconds, FIRST_LOOK

    def wait() -> None:
        nonlocal pause
        next_look = time.monotonic() + pause
        while (left := min(end, run.watcher.look_until) - time.monotonic()) > 0:
            time.sleep(min(left, FIRST_LOOK))
            begin = time.monotonic()
            if begin >= next_look:
                run.say_so_far()
                pause = max(pause * LATER_LOOKS, LEAST_WORK * (time.monotonic() - begin))
                next_look = time.monotonic() + pause
        try:
            run.time_is_over()
        finally:
            os._exit(0)

    threading.Thread(target=wait, daemon=True, name="ullage-timeout").start()


def leave_after(seconds: float) -> None:
    """Exit after a time, because threads and exit handlers of a stopped script may run for ever."""

    def wait() -> None:
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="ullage-exit").start()


def _import_from(folder: str) -> None:
    """Let imports look into the script's folder first, also for packages that a worker has imported before."""
    sys.path.insert(0, folder)
    for package in {name.partition(".")[0] for name in SLOW_PACKAGES}.intersection(sys.modules):
        if any(Path(folder, file).exists() for file in (f"{package}.py", f"{package}/__init__.py")):
            for name in [each for each in sys.modules if each.partition(".")[0] == package]:
                del sys.modules[name]


SIZES_MATTER = 0.01  # of the peak: if wrongly assumed sizes make up this share, the script is run again
Give = Callable[[dict[str, Any]], None]


class ScriptRun:
    """Runs a script as `python` would, follows it and gives one answer."""

    def __init__(
        self,
        request: ScriptRequest,
        give: Give,
        give_so_far: Give = lambda answer: None,
        leave: Callable[[float], None] = leave_after,
    ) -> None:
        self._request, self._give, self._give_so_far, self._leave = request, give, give_so_far, leave
        self.card = VirtualGPU(request.gpu, request.config, limited=request.limited)
        self.card.assumed_sizes.known = request.sizes
        self.watcher = RunWatcher(self.card, request.steps, self._stop, self.say_so_far)
        self.processes = Processes(
            self.card.note,
            self._failed,
            joined=lambda: self._groups is not None and self._groups.made > 0,
            used=lambda: bool(self.card.memory.requests),
        )
        self.launching = Launching(self.card.note)
        self.weights = Weights(self.card.note)
        self._trace: Trace | None = None
        if request.traced:
            from ullage.estimation.timeline import trace  # needs NumPy, which this Python may not have

            self._trace = trace.Trace()
            self._trace.watch(self.card)
        self._begin = time.perf_counter()
        self._stopped = 0
        self._groups: Groups | None = None
        self._cut_short = False  # by an error, after training had settled
        self._answers = Answers(request.gpu) if may_ask(request.gpu) else None  # the parent asks for unknown ones

    def run(self) -> int:
        """Run the script to its end or until it is stopped; return the exit code of the process."""
        replacements = Replacements()
        with used(self._answers) if self._answers else nullcontext(), self.card:
            self._receive()
            self.watcher.install(replacements)
            self.processes.install(replacements)
            self.launching.install(replacements)
            self.weights.install(replacements)
            install_stand_ins(self.card.note, replacements)
            install_driver(self.card, replacements)
            if self._request.config is None:  # a script may set PYTORCH_ALLOC_CONF before it first uses the GPU
                replacements.on_undo(follow_allocator_settings(self.card))
            install_safetensors(replacements)
            try:
                self._launch()
            except MemoryConverged:
                pass
            except SystemExit as error:
                return self._exited(error.code)
            except BaseException as error:
                return self._failed(error)
            finally:
                replacements.undo()
                self.card.host.forget()
            self._ended()
        return 0

    def _receive(self) -> None:
        self._groups = self.card.part(Groups)
        if self._groups is not None:
            self._groups.messages.received = {
                what: [base64.b64decode(each) for each in sent] for what, sent in self._request.received.items()
            }

    def _launch(self) -> None:
        request = self._request
        if request.launcher:
            module = ["-m"] if request.module else []
            self.launching.run(request.launcher, [*module, request.path, *request.args], self._execute)
        else:
            self._execute()
        self.processes.wait()

    def _execute(self) -> None:
        request = self._request
        sys.argv = [request.path, *request.args]
        if request.module:
            _import_from(os.getcwd())
            runpy.run_module(request.path, run_name="__main__", alter_sys=True)
        elif Path(request.path).is_dir():
            _import_from(request.path)
            runpy.run_path(request.path, run_name="__main__")
        else:
            _import_from(str(Path(request.path).resolve().parent))
            main = ModuleType("__main__")
            main.__dict__.update(__file__=request.path, __builtins__=__builtins__, __cached__=None)
            sys.modules["__main__"] = main
            exec(compiled(Path(request.path).read_bytes(), request.path), main.__dict__)

    # The ways in which a run ends.

    def _stop(self) -> None:
        """Answer, then leave the script from inside its step."""
        self._give_estimate()
        self._stopped += 1
        if self._stopped == 1:
            self._leave(GRACE)
        elif self._stopped > 3:  # the script catches whatever is raised, and goes on
            os._exit(0)
        if threading.current_thread() is not threading.main_thread():
            self._leave(0.0)  # the main thread may wait for ever
        raise MemoryConverged

    def _ended(self) -> None:
        if not self._stopped and self._request.steps is not None and not self.watcher.settled:
            self.card.note("ended", self._short_run())
        self._give_estimate()

    def _exited(self, code: Any) -> int:
        if self._stopped or code in (None, 0) or self.watcher.settled:
            self._ended()
            return 0
        message = code if isinstance(code, str) else ""
        self._give_failure({"kind": "exit", "code": 1 if message else code, "message": message})
        if message:
            print(message, file=sys.stderr)
        return code if isinstance(code, int) else 1

    def _failed(self, error: BaseException) -> int:
        if self._stopped:
            return 0  # the answer is given; errors of the script's own cleanup do not matter
        failure, settled = describe(error), self.watcher.settled
        if not isinstance(error, torch.OutOfMemoryError) and (settled or self._may_want_data(failure)):
            what = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:200]
            steps = self.watcher.steps
            after = "its training had settled" if settled else f"{steps} optimizer step{'s' if steps != 1 else ''}"
            why = "" if settled else ", perhaps because data was missing"
            self.card.note("failed", f"after {after} the script failed{why} ({what}): later parts are missing")
            self._cut_short = True
            self._give_estimate()
            return 0
        self._give_failure(failure)
        error = as_user_sees(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1

    def _may_want_data(self, failure: dict[str, Any]) -> bool:
        """Return whether it trained, then read assumed values, and code outside PyTorch failed."""
        return self._made_up() and bool(self.watcher.steps) and failure.get("of_script", False)

    def _made_up(self) -> bool:
        """Return whether values or shapes were assumed that may have misled the script."""
        return any(kind in ("values", "readings", "shapes", "unbounded shapes", "data") for kind, _ in self.card.noted)

    def time_is_over(self) -> None:
        """Answer when the time limit is over; called by another thread."""
        if not self.card.memory.requests:
            self._give_failure({"kind": "timeout", "passes": self.watcher.backward.count, **where_now()})
            return
        steps = self.watcher.steps
        reached = f"after {steps} optimizer step{'s' if steps != 1 else ''}" if steps else "before the first step"
        settled = "" if self.watcher.settled else ", before the requests repeated" if steps else " of training"
        now = time.monotonic()
        whose = "to follow it" if now > self.watcher.look_until else f"of {format_duration(self._request.timeout)}"
        self.card.note("timeout", f"the time {whose} ended {reached}{settled}: later code is not in these figures")
        self._give_estimate()

    def say_so_far(self) -> None:
        """Send a provisional answer, once the script has trained."""
        if self.watcher.steps and self.card.memory.requests and not self._stopped:
            interrupted = meanings_of({("interrupted", ""): 1}, LEFT_OUT, self.card.peak_reserved, 0)
            self._give_so_far({**self._answer(), "interrupted": interrupted[0]})

    # The content of the answer.

    def _short_run(self) -> str:
        steps = self.watcher.steps
        if not steps:
            return "the script ended without a backward pass or an optimizer step: the figures are those so far"
        return f"the script ended after {steps} optimizer step{'s' if steps > 1 else ''}, before the requests repeated"

    def _give_failure(self, failure: dict[str, Any]) -> None:
        self._give(
            {
                "status": "failed",
                **failure,
                **self._unanswered(),
                "out_of_memory": self.card.memory.out_of_memory,
                "refused": self.card.refused,
                "not_cached": self.weights.missing,
                "made_up": self._made_up(),
                "steps": self.watcher.steps,
                "waits": self._groups is not None and self._groups.messages.waits,
                "python": sys.executable,
            }
        )

    def _unanswered(self) -> dict[str, Any]:
        """Return convolutions to ask this machine's cuDNN about, and the version that runs them."""
        if self._answers is None or not self._answers.unanswered:
            return {}
        return {"unanswered": list(self._answers.unanswered), "cudnn": self._answers.cudnn}

    def _give_estimate(self) -> None:
        card = self.card
        if card.memory.out_of_memory is not None and not self.watcher.settled:
            self._give_failure({"kind": "out of memory"})
            return
        if not card.memory.requests:
            self._give_failure({"kind": "no gpu", "commands": self.processes.commands})
            return
        if card.memory.out_of_memory is not None:
            card.note("memory", "the script ran out of memory, caught the error and continued")
        self._give(self._answer())

    def _answer(self) -> dict[str, Any]:
        card = self.card
        with card.memory.at_rest():
            if self._answers and self._answers.words:
                card.note_instead("asked", self._answers.words)
            loaders = self.watcher.loaders
            figures = figures_of(card, time.perf_counter() - self._begin)
            figures["phases"] = self.watcher.phases.peaks(has_trained=self.watcher.backward.count > 0)
            figures |= {"steps": self.watcher.steps, "epoch_samples": loaders.epoch_samples}
            largest = loaders.about_longest()
            figures["notes"] = [*figures["notes"], *largest]
            calls = packed(card.calls.step() | {"largest": bool(largest), "data_ranks": loaders.replicas})
            answer: dict[str, Any] = {"status": "estimated", "estimate": figures, "calls": calls}
            if self._groups is not None:
                messages = self._groups.messages
                answer["apart"], answer["waits"] = self._groups.apart, messages.waits and self._cut_short
                answer["sent"] = {
                    what: [base64.b64encode(each).decode() for each in sent] for what, sent in messages.sent.items()
                }
            if self._trace is not None:
                self._trace.fill(card)
                answer["trace"] = base64.b64encode(self._trace.to_bytes()).decode()
            answer |= self._unanswered()
            if card.assumed_sizes.saved > SIZES_MATTER * card.peak_reserved:
                answer["sizes"] = card.assumed_sizes.learned()
            if self._request.convolutions:
                answer["convolutions"] = list(card.uncertainty.convolutions)
        return answer
