"""Children that are forked and not started, since importing PyTorch takes seconds and a fork none.

`start_from_server` forks from a server process that has imported what every child needs; any process may ask it.
`ForkedHere` forks this very process, which then must have one thread and must never have touched CUDA; it can hold a
child at chosen places until it is told to go on.
"""

from __future__ import annotations

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
    """Start a child for a function (`MODULE:FUNCTION`) by forking the server, which is started when it is first needed.

    The server imports the modules of `preload` once; those of its first child count.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ullage.sandbox.forking", *preload])
    answers, child_answers = context.Pipe(duplex=False)
    output, child_output = context.Pipe(duplex=False)
    with answers, child_answers, output, child_output:
        process = context.Process(
            target=_forked_from_server, args=(child_answers, child_output, entry, request, this_process()), daemon=True
        )
        process.start()
        return Child(_FromServer(process), os.dup(answers.fileno()), os.dup(output.fileno()))


class _FromServer:
    """A process of the standard library's fork server, as `Child` wants it."""

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
    """Called by a child at a place that it names, with what its answer is so far: returns what `go_on` was given."""

    def __call__(self, place: str, so_far: dict[str, Any] | None = None) -> str: ...


_open: set[int] = set()  # this process's ends of the pipes to its children: a child must not keep those of its siblings


class ForkedHere:
    """A child forked from this process. `work(pause)` runs in it and returns its answer.

    `pause(NAME)` in the child waits until `go_on()`, and returns the line that it was given; with `stay` it also waits
    so when it has answered. Read from it when `select` says that there is something to read. Its output goes to the
    file `log`, or nowhere.
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
        """For `select`."""
        return self._answers

    @property
    def at(self) -> str | None:
        """The place at which it paused last."""
        return self._messages.at

    @property
    def so_far(self) -> dict[str, Any] | None:
        """The answer that it gave at a pause, the last."""
        return self._messages.so_far

    @property
    def has_answered(self) -> bool:
        """Whether it has given its answer or error."""
        return self._messages.final

    def read(self) -> None:
        """Take what it said; waits until it says something."""
        part = os.read(self._answers, 1 << 20)
        self._messages.add(part)
        self.is_silent = not part

    def go_on(self, line: str = "") -> None:
        """Let it leave the place at which it pauses, and tell it a line."""
        with suppress(BrokenPipeError):  # it has been killed
            rest = line.encode() + b"\n"
            while rest:
                rest = rest[os.write(self._leave, rest) :]

    def kill(self) -> None:
        """End it, with what it has started."""
        signal_group(self._process, signal.SIGKILL)

    def set_suspended(self, suspended: bool = True) -> None:
        """Stop it, with what it has started, wherever it is; or let it go on from there."""
        if self._process.poll() is None:
            signal_group(self._process, signal.SIGSTOP if suspended else signal.SIGCONT)

    def has_ended(self) -> bool:
        """Whether its process is gone; only then the driver has taken its memory back."""
        return self._process.poll() is not None

    def close(self) -> Outcome:
        """End it, with what it has started, and say what came of it."""
        kill_group(self._process)
        for descriptor in (self._answers, self._leave):
            os.close(descriptor)
            _open.discard(descriptor)
        return outcome_of(self._messages, self._process.poll())


def _forked_here(
    work: Callable[[Pause], dict[str, Any]], answers: int, leave: int, log: Path | None, stay: bool, parent: Process
) -> None:
    """The life of the child; it never returns."""
    try:
        os.setsid()
        end_with(parent)
        with suppress(OSError):
            kernel.die_with_parent(signal.SIGCONT)  # one that is held still would not see it
        output = os.open(log if log is not None else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        channel, told = Channel(answers), os.fdopen(leave, "rb")

        def pause(place: str, so_far: dict[str, Any] | None = None) -> str:
            if so_far is not None:
                channel.so_far(so_far)
            channel.at(place)
            line = told.readline()
            if not line:
                os._exit(1)  # the parent is gone
            return line.decode().rstrip("\n")

        answer(channel, lambda: work(pause))
        sys.stdout.flush()
        if stay:
            told.readline()
    finally:
        os._exit(0)  # nothing of the parent's is to be closed or written a second time
