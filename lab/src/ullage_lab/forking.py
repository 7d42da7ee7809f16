"""Forks children, because importing PyTorch takes seconds.

`start_from_server` forks from a server process that has imported the modules that children need. `ForkedHere` forks
this process, which must have one thread and must not have used CUDA; it can pause a child at chosen places.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ullage.sandbox import kernel
from ullage.sandbox.child import answer, end_with, function_named
from ullage.sandbox.parent import Child, Outcome, outcome_of
from ullage.sandbox.process_identity import Process, this_process
from ullage.sandbox.protocol import Channel, Messages
from ullage.sandbox.spawn import ForkedProcess, kill_group, signal_group


def start_from_server(entry: str, request: dict[str, Any], *, preload: Sequence[str] = ()) -> Child:
    """Start a child for a function (`MODULE:FUNCTION`) by forking the server, which starts on first use.

    The server imports the modules of the first `preload`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ullage_lab.forking", *preload])
    answers, child_answers = context.Pipe(duplex=False)
    output, child_output = context.Pipe(duplex=False)
    with answers, child_answers, output, child_output:
        process = context.Process(
            target=_forked_from_server, args=(child_answers, child_output, entry, request, this_process()), daemon=True
        )
        process.start()
        return Child(_FromServer(process), os.dup(answers.fileno()), os.dup(output.fileno()))


class _FromServer:
    """A process of the standard library's fork server, as a `ProcessHandle`."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, int(process.pid)

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self) -> None:
        self._process.join()


def _forked_from_server(
    answers: Connection, output: Connection, entry: str, request: dict[str, Any], parent: Process
) -> None:
    os.setsid()
    end_with(parent)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    answer(Channel(answers.fileno()), lambda: function_named(entry)(request))


class Pause(Protocol):
    """Called by a child at a named place, with its answer so far; returns the line given to `go_on`."""

    def __call__(self, place: str, so_far: dict[str, Any] | None = None) -> str: ...


_open: set[int] = set()  # our ends of the pipes to children: a child must not keep those of its siblings


class ForkedHere:
    """A child forked from this process. `work(pause)` runs in it and returns its answer.

    `pause(NAME)` in the child waits for `go_on()` and returns its line. With `stay`, the child also waits after its
    answer. Call `read` when `select` reports input. Output goes to the file `log`, or is discarded.
    """

    def __init__(self, work: Callable[[Pause], dict[str, Any]], *, log: Path | None = None, stay: bool = False) -> None:
        self._answers, child_answers = os.pipe()
        child_leave, self._leave = os.pipe()
        self._messages = Messages()
        self.is_silent = False  # it has closed its channel: it has ended or is about to
        _open.update((self._answers, self._leave))
        sys.stdout.flush()
        sys.stderr.flush()
        parent = this_process()
        self._process = ForkedProcess(os.fork())
        if self._process.pid == 0:
            for descriptor in _open:
                os.close(descriptor)
            _forked_here(work, child_answers, child_leave, log, stay, parent)
        os.close(child_answers)
        os.close(child_leave)

    def fileno(self) -> int:
        return self._answers

    @property
    def at(self) -> str | None:
        return self._messages.at

    @property
    def so_far(self) -> dict[str, Any] | None:
        return self._messages.so_far

    @property
    def has_answered(self) -> bool:
        return self._messages.final

    def read(self) -> None:
        part = os.read(self._answers, 1 << 20)
        self._messages.add(part)
        self.is_silent = not part

    def go_on(self, line: str = "") -> None:
        with suppress(BrokenPipeError):  # it has been killed
            rest = line.encode() + b"\n"
            while rest:
                rest = rest[os.write(self._leave, rest) :]

    def kill(self) -> None:
        """Kill the child and its descendants."""
        signal_group(self._process, signal.SIGKILL)

    def set_suspended(self, suspended: bool = True) -> None:
        """Stop the child and its descendants, or let them continue."""
        if self._process.poll() is None:
            signal_group(self._process, signal.SIGSTOP if suspended else signal.SIGCONT)

    def has_ended(self) -> bool:
        """Return whether the process has ended; only then does the driver free its memory."""
        return self._process.poll() is not None

    def close(self) -> Outcome:
        """Kill the child and its descendants, and return the outcome."""
        kill_group(self._process)
        for descriptor in (self._answers, self._leave):
            os.close(descriptor)
            _open.discard(descriptor)
        return outcome_of(self._messages, self._process.poll())


def _forked_here(
    work: Callable[[Pause], dict[str, Any]], answers: int, leave: int, log: Path | None, stay: bool, parent: Process
) -> None:
    """Run the child; never returns."""
    try:
        os.setsid()
        end_with(parent)
        with suppress(OSError):
            kernel.die_with_parent(signal.SIGCONT)  # a stopped child would not get another signal
        output = os.open(log if log is not None else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        channel, end_signal = Channel(answers), os.fdopen(leave, "rb")

        def pause(place: str, so_far: dict[str, Any] | None = None) -> str:
            if so_far is not None:
                channel.so_far(so_far)
            channel.at(place)
            line = end_signal.readline()
            if not line:
                os._exit(1)  # the parent is gone
            return line.decode().rstrip("\n")

        answer(channel, lambda: work(pause))
        sys.stdout.flush()
        if stay:
            end_signal.readline()
    finally:
        os._exit(0)  # the child must not close or flush anything of the parent's
