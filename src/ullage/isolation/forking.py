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
from typing import Any

from ullage.isolation.child import answer, end_with, function_named
from ullage.isolation.parent import Child, Outcome, how_it_ended
from ullage.isolation.process_identity import Process, this_process
from ullage.isolation.protocol import Channel, Messages


def start_from_server(entry: str, request: dict[str, Any], *, preload: Sequence[str] = ()) -> Child:
    """Start a child for a function (`MODULE:FUNCTION`) by forking the server, which is started when it is first needed.

    The server imports the modules of `preload` once; those of its first child count.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ullage.isolation.forking", *preload])
    answers, child_answers = context.Pipe(duplex=False)
    output, child_output = context.Pipe(duplex=False)
    with answers, child_answers, output, child_output:
        process = context.Process(
            target=_forked_from_server, args=(child_answers, child_output, entry, request, this_process()), daemon=True
        )
        process.start()
        return Child(_FromServer(process), os.dup(answers.fileno()), os.dup(output.fileno()))


class _FromServer:
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


Pause = Callable[[str], None]  # called by a child at a place that it names: returns when it may go on

_open: set[int] = set()  # this process's ends of the pipes to its children: a child must not keep those of its siblings


class ForkedHere:
    """A child forked from this process. `work(pause)` runs in it and returns its answer.

    `pause(NAME)` in the child waits until `go_on()`; with `stay` it also waits so when it has answered. Read from it
    when `select` says that there is something to read. Its output goes to the file `log`, or nowhere.
    """

    def __init__(self, work: Callable[[Pause], dict[str, Any]], *, log: Path | None = None, stay: bool = False) -> None:
        self._answers, child_answers = os.pipe()
        child_leave, self._leave = os.pipe()
        self._messages = Messages()
        self._code: int | None = None
        self.is_silent = False  # it has closed its channel: it has ended or is about to
        _open.update((self._answers, self._leave))
        sys.stdout.flush()
        sys.stderr.flush()
        parent = this_process()
        self.pid = os.fork()
        if self.pid == 0:
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
    def has_answered(self) -> bool:
        """Whether it has given its answer or error."""
        return self._messages.final

    def read(self) -> None:
        """Take what it said; waits until it says something."""
        part = os.read(self._answers, 1 << 20)
        self._messages.add(part)
        self.is_silent = not part

    def go_on(self) -> None:
        """Let it leave the place at which it pauses."""
        with suppress(BrokenPipeError):  # it has been killed
            os.write(self._leave, b"g")

    def kill(self) -> None:
        """End it, with what it has started."""
        for kill in (os.killpg, os.kill):  # it may not have come to be a group of its own
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether its process is gone; only then the driver has taken its memory back."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def close(self) -> Outcome:
        """End it if it has not ended, and say what came of it."""
        if self._code is None:
            self.kill()
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for descriptor in (self._answers, self._leave):
            os.close(descriptor)
            _open.discard(descriptor)
        if self._messages.answer is not None:
            return Outcome(answer=self._messages.answer)
        if self._messages.error is not None:
            return Outcome(failure=self._messages.error, reason="error")
        return Outcome(failure=how_it_ended(self._code), reason="died")


def _forked_here(
    work: Callable[[Pause], dict[str, Any]], answers: int, leave: int, log: Path | None, stay: bool, parent: Process
) -> None:
    """The life of the child; it never returns."""
    try:
        os.setsid()
        end_with(parent)
        output = os.open(log if log is not None else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        channel = Channel(answers)

        def pause(place: str) -> None:
            channel.at(place)
            if not os.read(leave, 1):
                os._exit(1)  # the parent is gone

        answer(channel, lambda: work(pause))
        sys.stdout.flush()
        if stay:
            os.read(leave, 1)
    finally:
        os._exit(0)  # nothing of the parent's is to be closed or written a second time
