"""Starts a child process that calls one function, watches it, and says in one sentence how it ended.

    outcome = run("ullage.measuring.runs:estimate_here", {"gpu": "T4"}, limits=Limits(seconds=300))
    print(outcome.answer or outcome.failure)

The function gets the request (plain values) and returns the answer (a dict of plain values). What it prints is kept
apart: the last part of it is in the outcome. When the wait is over, for whatever reason, the child is gone and its
whole process group with it.
"""

import codecs
import io
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

from ullage.sandbox import boot, recording, redirection
from ullage.sandbox.environment import environment, is_guest
from ullage.sandbox.guard import Order, Sandbox
from ullage.sandbox.limits import MOST_WRITTEN, NO_LIMITS, Limits, Watch
from ullage.sandbox.overlay import is_private
from ullage.sandbox.process_identity import signal_name, this_process
from ullage.sandbox.protocol import Exceeded, LimitKind, Messages
from ullage.sandbox.recording import Reads, reads_of
from ullage.sandbox.spawn import (
    ProcessHandle,
    Rights,
    can_fork,
    end_guard,
    fork_child,
    kill_group,
    request_file,
    start_guard,
    start_process,
)
from ullage.sandbox.worker_pool import WorkerPool
from ullage.units import format_bytes

_LOOK, _LAST_LOOK = 0.05, 0.005  # seconds between checks of a child, and of one that has closed its channel
_CHUNK = 1 << 16
_KEPT = 1 << 16  # bytes of a child's output, the last ones
_MOST_NOTED = 1 << 28  # bytes
_PIPE = 1 << 20  # bytes: the most that a pipe holds


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A child's answer, or the reason it has none.

    `failure` continues "the process" ("was ended by SIGKILL"), except for an `"error"` that the function raised
    ("ValueError: no such layer"). `private` is "overlays" or "redirection": how the sandbox keeps files. `reads` are
    the recorded dependencies of the run. `so_far` is the last provisional answer of a child without an answer.
    """

    answer: dict[str, Any] | None = None
    failure: str | None = None
    reason: Literal["error", "died"] | LimitKind | None = None
    output: str = ""
    private: str | None = None
    reads: Reads | None = None
    so_far: dict[str, Any] | None = None

    def last_lines(self, count: int) -> str:
        """Return the last nonempty lines of the output."""
        lines = self.output.replace("\r", "\n").splitlines()
        return "\n".join([line for line in lines if line.strip()][-count:])


class _Started(TypedDict, total=False):
    """The options of `start` that `run` passes on."""

    env: Mapping[str, str] | None
    cwd: str | None
    rights: Rights | None
    private: Sandbox | None
    record: bool
    python: str | None
    warm: WorkerPool | None


def run(
    entry: str,
    request: dict[str, Any],
    *,
    limits: Limits = NO_LIMITS,
    show: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    **options: Unpack[_Started],
) -> Outcome:
    """Call a function (`MODULE:FUNCTION`) in a new process and wait for its answer; see `start` and `Child.wait`."""
    child = start(entry, request, written=limits.written, **options)
    return child.wait(limits, show=show, progress=progress, stop=stop)


def start(
    entry: str,
    request: dict[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    rights: Rights | None = None,
    private: Sandbox | None = None,
    written: int | None = None,
    record: bool = False,
    python: str | None = None,
    warm: WorkerPool | None = None,
) -> "Child":
    """Start a new process for a function. `env` defaults to `environment()`.

    `rights` (`uid`, `gid` and `user`) makes it another user's process, which requires root; it has these rights before
    it enters `cwd`. `private` is its sandbox, in which it may write `written` bytes; children of a process in a sandbox
    share that one. With `record` the outcome has the dependencies of the run. `python` is another Python, which has
    PyTorch but not necessarily Ullage. With `warm` a worker that has already imported PyTorch forks the child, if
    possible.
    """
    inside = redirection.current()
    if inside is not None or private is not None and is_private():
        private = None
    given = environment() if env is None else dict(env)
    answers, child_answers = os.pipe()
    output, child_output = os.pipe()
    noted = tempfile.TemporaryFile(buffering=0) if record else None  # noqa: SIM115
    here = recording.descriptor() if noted is None else noted.fileno()
    parent = this_process()
    options = {
        "parent": None if private else parent,
        "record": here,
        "redirect": inside and inside.folder,
        "network": inside and inside.network,
    }
    python = sys.executable if python is None and is_guest() else python
    program = [sys.executable, "-P", "-m", "ullage.sandbox"] if python is None else [python, boot.__file__]
    command = [*program, entry, str(child_answers)]
    folder = os.path.join(tempfile.gettempdir(), f"ullage-{uuid.uuid4().hex}")
    passed = [child_answers, *([] if here is None else [here])]
    pool = None
    process: ProcessHandle
    try:
        with request_file(request) as file:
            if private is not None or rights:
                if warm is not None and private is not None:
                    pool = warm.channel(program, given, cwd, rights, private.network)
                order = Order(
                    command=command,
                    options=options,
                    channel=child_answers,
                    parent=parent,
                    cwd=os.getcwd() if cwd is None and not rights else cwd,
                    private=private,
                    written=written or MOST_WRITTEN,
                    folder=folder,
                    pool=None if pool is None else pool.fileno(),
                )
                passed += [] if pool is None else [pool.fileno()]
                process = start_guard(order, file, child_output, given, passed, rights)
            elif python in (None, sys.executable) and can_fork():
                standard = [file.fileno(), child_output, child_output]
                process = fork_child(entry, child_answers, options, standard, given, cwd, [answers, output])
            else:
                process = start_process([*command, json.dumps(options)], file, child_output, given, passed, cwd)
    except BaseException:
        os.close(answers)
        os.close(output)
        if noted is not None:
            noted.close()
        raise
    finally:
        os.close(child_answers)
        os.close(child_output)
        if pool is not None:
            pool.close()
    child = Child(process, answers, output, is_guarded=private is not None, python=python)
    child.folder = folder if private is not None and not rights else None
    child.noted = None if noted is None else (noted, given)
    return child


class Child:
    def __init__(
        self,
        process: ProcessHandle,
        answers: int,
        output: int,
        *,
        is_guarded: bool = False,
        python: str | None = None,
    ) -> None:
        self.pid = process.pid
        self._is_guarded, self._python = is_guarded, python
        self.folder: str | None = None  # of its writes, to be removed at its end
        self.noted: tuple[io.FileIO, Mapping[str, str]] | None = None  # the record of its reads, and its variables
        self._process, self._answers, self._output = process, answers, output
        self._messages, self._printed = Messages(), bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def wait(
        self,
        limits: Limits = NO_LIMITS,
        *,
        show: Callable[[str], None] | None = None,
        progress: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Wait for the child's end, or end it at a limit or when another thread sets `stop`.

        `show` gets its output, and `progress` its long operations: an empty text when one is done.
        """
        watch = Watch(self.pid, limits)
        exceeded, doing = None, ""
        try:
            try:
                with selectors.DefaultSelector() as selector:
                    for descriptor in (self._answers, self._output):
                        os.set_blocking(descriptor, False)
                        selector.register(descriptor, selectors.EVENT_READ)
                    while self._process.poll() is None and exceeded is None and not (stop and stop.is_set()):
                        self._listen(selector, show)
                        if progress is not None and self._messages.doing != doing:
                            doing = self._messages.doing
                            progress(doing)
                        exceeded = watch.exceeded(self._messages.pending) or self._noted_too_much()
            finally:
                self._end()
            for descriptor in (self._answers, self._output):
                self._read_rest(descriptor, show)
        finally:
            os.close(self._answers)
            os.close(self._output)
            reads = self._reads()
        outcome = outcome_of(self._messages, self._process.poll(), exceeded, self._printed.decode(errors="replace"))
        if self._python is not None and outcome.reason == "died" and self._messages.at != boot.HELLO:
            failure = f"{self._python} must be Python {boot.dotted(boot.OLDEST_PYTHON)} or newer"
            outcome = replace(outcome, reason="error", failure=failure, output="")
        return replace(outcome, reads=reads)

    def _noted_too_much(self) -> Exceeded | None:
        """Return the limit that a record of reads exceeded, which only happens if the child writes to it itself."""
        if self.noted is None or os.fstat(self.noted[0].fileno()).st_size <= _MOST_NOTED:
            return None
        return Exceeded("written", f"wrote more than {format_bytes(_MOST_NOTED)} about what it read")

    def _reads(self) -> Reads | None:
        if self.noted is None:
            return None
        with self.noted[0] as file:
            return reads_of(file.fileno(), self.noted[1])

    def _end(self) -> None:
        """End the process and its group. A guard ends its child first."""
        if self._is_guarded:
            end_guard(self._process)
        kill_group(self._process)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self, selector: selectors.BaseSelector, show: Callable[[str], None] | None) -> None:
        """Read for a moment. A child with a closed channel is about to end; its worker processes may keep it open."""
        for key, _ in selector.select(_LOOK if self._answers in selector.get_map() else _LAST_LOOK):
            if self._read(key.fd, show) == b"":
                selector.unregister(key.fd)

    def _read(self, descriptor: int, show: Callable[[str], None] | None) -> bytes | None:
        """Read the available bytes: `None` if there are none now, no bytes at the end of the pipe."""
        try:
            part = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return None
        if descriptor == self._answers:
            self._messages.add(part)
            return part
        self._printed += part
        del self._printed[:-_KEPT]
        if show is not None and (text := self._decoder.decode(part)):
            show(text)
        return part

    def _read_rest(self, descriptor: int, show: Callable[[str], None] | None) -> None:
        """Read the rest of a pipe, and no more: a process that left its group may write for ever."""
        for _ in range(_PIPE // _CHUNK):
            if not self._read(descriptor, show):
                return


def outcome_of(messages: Messages, code: int | None, exceeded: Exceeded | None = None, output: str = "") -> Outcome:
    """Return the outcome of an ended child; an answer counts, however the process ended."""
    common: dict[str, Any] = {"output": output, "private": messages.private}
    if messages.answer is not None:
        return Outcome(answer=messages.answer, **common)
    common["so_far"] = messages.so_far
    if messages.error is not None:
        return Outcome(failure=messages.error, reason="error", **common)
    if messages.limit is not None:
        exceeded = messages.limit
    if exceeded is not None:
        return Outcome(failure=exceeded.message, reason=exceeded.kind, **common)
    return Outcome(failure=how_it_ended(code, output), reason="died", **common)


def how_it_ended(code: int | None, output: str = "") -> str:
    """Describe the end of a process without an answer, to continue "the process"."""
    if code is not None and code < 0:
        return f"was ended by {signal_name(-code)}" + (" (was memory short?)" if code == -signal.SIGKILL else "")
    last = Outcome(output=output).last_lines(1)[:400]
    return f"ended without an answer, with exit code {code}" + (f": {last}" if last else "")
