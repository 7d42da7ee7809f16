"""Answers of this machine's cuDNN about convolutions on its own card: the exact version and card.

That needs a real GPU, and an estimate has a virtual one, so another process queries it (`backend.serve`). Answers are
stored in the user's cache folder, in a file for each version of cuDNN and kind of card, in the form of `ullage measure
cudnn`. Without access to cuDNN, tables and trees answer, and a note says why.
"""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ullage.errors import UllageError
from ullage.hardware import GPU
from ullage.home import cache
from ullage.sandbox import boot
from ullage.sandbox.environment import environment
from ullage.sandbox.fd_channel import FdChannel, channel_pair
from ullage.sandbox.interpreter import Interpreter
from ullage.sandbox.process_identity import this_process
from ullage.sandbox.spawn import ProcessHandle, kill_group, request_file, start_process
from ullage.virtual.call.plan import benchmark_limit
from ullage.virtual.cudnn.formulas import (
    ITEM_BYTES,
    CandidatePlan,
    ConvolutionProblem,
    Trial,
    Workspace,
    all_copies,
    terms,
)

ENTRY = "ullage.virtual.cudnn.backend:serve"
_START, _ANSWER = 120.0, 60.0  # seconds: to start, and to answer some questions
_AT_ONCE = 64  # questions

HIDDEN = "cuDNN could not be asked on this card, which is hidden from CUDA: its choices are guessed"

Plans = tuple[CandidatePlan, ...]


class CudnnUnavailable(UllageError):
    """The reason why cuDNN could not be queried."""


class CudnnAsker:
    """A process that queries cuDNN on one card of this machine; the first query starts it. `python` is another Python,
    whose cuDNN is queried, with the variables `env`."""

    def __init__(self, uuid: str, python: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self._uuid, self._python, self._env = uuid, python, env
        self._process: ProcessHandle | None = None
        self._line: FdChannel | None = None
        self.cudnn = 0

    def ask(self, problems: Sequence[ConvolutionProblem]) -> list[Plans | None]:
        """Return the plans for each problem, in the order in which PyTorch tries them; `None` if cuDNN declines."""
        if self._line is None:
            self._start()
        answers: list[Plans | None] = []
        for begin in range(0, len(problems), _AT_ONCE):
            some = problems[begin : begin + _AT_ONCE]
            assert self._line is not None
            try:
                self._line.send({"problems": some})
            except OSError:
                raise CudnnUnavailable("the process that asks has ended") from None
            answers += [_plans(each) for each in self._hear("answers", _ANSWER)]
        return answers

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            kill_group(self._process)
            self._process = None

    def _start(self) -> None:
        self._line, theirs = channel_pair()
        number, ours = theirs.fileno(), self._python is None
        program = [sys.executable, "-P", "-m", "ullage.sandbox"] if ours else [str(self._python), boot.__file__]
        settings = {"parent": this_process(), "record": None, "redirect": None, "network": None}
        env = environment(self._env, ours=ours) | {"CUDA_VISIBLE_DEVICES": self._uuid}
        try:
            with request_file({"line": number}) as file:
                command = [*program, ENTRY, str(number), json.dumps(settings)]
                self._process = start_process(command, file, subprocess.DEVNULL, env, [number], None)
        except OSError as error:
            raise CudnnUnavailable(f"the process that asks did not start: {error.strerror}") from None
        finally:
            theirs.close()
        self.cudnn = int(self._hear("cudnn", _START))

    def _hear(self, name: str, seconds: float) -> Any:
        assert self._line is not None
        while select.select([self._line], [], [], seconds)[0]:
            message = self._line.receive()
            if message is None:
                raise CudnnUnavailable("the process that asks has ended")
            if "error" in message[0]:
                raise CudnnUnavailable(message[0]["error"])
            if name in message[0]:
                return message[0][name]
        raise CudnnUnavailable(f"the process that asks gave no answer in {seconds:.0f} s")


def _plans(values: Any) -> Plans | None:
    return None if values is None else tuple(CandidatePlan(*each) for each in values)


def installed_cudnn() -> int | None:
    """Return the version of cuDNN of this Python's PyTorch, such as 91900; `None` without one."""
    if torch.version.cuda is None:
        return None
    library: Any = getattr(torch._C, "_cudnn", None)
    return None if library is None else int(library.getVersionInt())


def dotted(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}" if cudnn >= 90000 else f"{cudnn // 1000}.{cudnn // 100 % 10}"


class Answers:
    """cuDNN's answers about convolutions on a card: known ones, and those of an `asker`. Without one, `unanswered`
    collects the unknown problems."""

    def __init__(self, card: GPU, asker: CudnnAsker | None = None, cudnn: int | None = None) -> None:
        self.card, self.failed = card, ""
        self.unanswered: dict[ConvolutionProblem, None] = {}
        self.used = 0  # answers that were given
        self._asker, self._cudnn, self._lock = asker, cudnn, threading.Lock()
        self._known: dict[ConvolutionProblem, Plans | None] | None = None

    @property
    def cudnn(self) -> int | None:
        """The version of cuDNN that gave these answers."""
        if self._cudnn is None:
            self._cudnn = installed_cudnn()
        return self._cudnn

    @property
    def path(self) -> Path:
        kind = re.sub(r"[^a-z0-9]+", "-", f"{self.card.device_name}-{self.card.sms or 0}".casefold()).strip("-")
        return cache() / "cudnn" / f"{kind}-{self.cudnn}.jsonl"

    def of(self, problem: ConvolutionProblem) -> Plans | None:
        """Return the plans for a problem; `None` if they are unknown and cuDNN could not be queried."""
        if self.cudnn is None:
            return None
        with self._lock:
            known = self._remembered()
            if problem not in known and self._asker is not None and not self.failed:
                self._ask([problem])
            if problem not in known:
                self.unanswered[problem] = None
                return None
            self.used += 1
            return known[problem] or None

    def find_out(self, problems: Sequence[ConvolutionProblem]) -> None:
        """Query problems and store the answers for another process; `failed` is the reason of a failure."""
        with self._lock:
            known = self._remembered()
            unknown = [problem for problem in problems if problem not in known]
            if unknown and not self.failed and not self._ask(unknown):
                self.failed = self.failed or f"the answers cannot be kept in {self.path}"

    def _ask(self, problems: Sequence[ConvolutionProblem]) -> bool:
        assert self._asker is not None and self._known is not None
        try:
            answers = self._asker.ask(problems)
            if self._asker.cudnn != self.cudnn:
                raise CudnnUnavailable(f"cuDNN must be {self.cudnn}, got {self._asker.cudnn} in the process that asks")
        except CudnnUnavailable as error:
            self.failed = str(error)
            return False
        self._known |= zip(problems, answers, strict=True)
        about = {"gpu": self.card.device_name, "cudnn": self.cudnn}
        rows = [
            {**about, "problem": problem, **({"declined": ""} if plans is None else {"candidates": plans})}
            for problem, plans in zip(problems, answers, strict=True)
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        except OSError:  # the next estimate queries cuDNN again
            return False
        return True

    def learn(self, row: Mapping[str, Any]) -> None:
        """Add an answer from a row of `ullage measure cudnn`."""
        self._remembered()[ConvolutionProblem.of(row["problem"])] = _plans(row.get("candidates"))

    def _remembered(self) -> dict[ConvolutionProblem, Plans | None]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError):
                for line in self.path.read_text().splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill cut off
                        self.learn(json.loads(line))
        return self._known

    @property
    def words(self) -> str | None:
        """The report's text about the answers; `None` without a question."""
        if self.cudnn is None:
            return None
        if self.failed:
            return (
                f"cuDNN {dotted(self.cudnn)} could not be asked on this card ({self.failed}): its choices are guessed"
            )
        return f"convolution workspaces were asked of cuDNN {dotted(self.cudnn)} on this card" if self.used else None


_in_use: list[Answers] = []


def in_use(card: GPU) -> Answers | None:
    return _in_use[-1] if _in_use and card.uuid is not None and _in_use[-1].card.uuid == card.uuid else None


def may_ask(card: GPU) -> bool:
    """Check for a card of this machine that is not hidden from CUDA."""
    return card.uuid is not None and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


@contextlib.contextmanager
def used(answers: Answers) -> Iterator[Answers]:
    _in_use.append(answers)
    try:
        yield answers
    finally:
        _in_use.remove(answers)


@contextlib.contextmanager
def asking(card: GPU, cudnn: int | None = None, python: Interpreter | None = None) -> Iterator[Answers | None]:
    """Return a context in which one process asks this machine's cuDNN about convolutions on a card. `cudnn` is the
    expected version, by default that of this Python; `python` another Python that has it."""
    before = in_use(card) if python is None else None
    if before is not None or not may_ask(card):
        yield before
        return
    assert card.uuid is not None
    asker = CudnnAsker(card.uuid) if python is None else CudnnAsker(card.uuid, python.path, python.env)
    with contextlib.closing(asker), used(Answers(card, asker, cudnn)) as answers:
        yield answers


# The memory of plans.


def first(plans: Plans, problem: ConvolutionProblem, tf32: bool, deterministic: bool) -> Workspace | None:
    """Return the workspace that PyTorch takes without `cudnn.benchmark`: that of the first allowed plan."""
    for plan in plans:
        if plan.allowed(problem.kind, tf32, deterministic):
            return Workspace(plan.workspace, plan.workspace)
    return None


def trial(plans: Plans, problem: ConvolutionProblem, tf32: bool, deterministic: bool) -> Trial | None:
    """Return the plans that `cudnn.benchmark` tries: all of them. The fastest is assumed to be the first of those that
    it times (`torch.backends.cudnn.benchmark_limit`; 0 means all)."""
    sizes = [plan.workspace for plan in plans if plan.allowed(problem.kind, tf32, deterministic)]
    if not sizes:
        return None
    largest = max(sizes[: benchmark_limit() or None])
    if problem.kind in ITEM_BYTES:
        largest = max(sizes[0], min(largest, all_copies(terms(problem))))
    winner = Workspace(sizes[0], largest, guessed=largest > sizes[0])
    return Trial(tuple(sorted(set(sizes) - {0}, reverse=True)), max(sizes), winner, guessed=False)
