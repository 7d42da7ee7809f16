"""`ullage attach`, also for `ullage submit --interactive`: connects to the terminal of a job."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.options import argument
from ullage.errors import InvalidValue
from ullage.manager.client import Client
from ullage.text import plain

DETACH, _END_OF_INPUT = b"\x1d", b"\x04"  # Ctrl-] and Ctrl-D
_LOOK = 1.0  # seconds
_CHUNK = 1 << 14


def attach(job: Annotated[str, argument("Job number or name.", "JOB", completion.jobs)]) -> None:
    """Connect to the terminal of an interactive job.

    Waits until the job runs. Ctrl-] detaches. Exits with the job's exit code.

    Example:

      ullage attach 17
    """
    raise typer.Exit(connect_terminal(Client(), job))


def connect_terminal(manager: Client, job: str, cancel: bool = False) -> int:
    """Connect this terminal to a job once it runs, and return its exit code. With `cancel`, Ctrl-C cancels a waiting
    job."""
    try:
        attached = _once_it_runs(manager, job)
    except KeyboardInterrupt:
        if cancel:
            manager.cancel(job)
            _say(f"job {job} left the queue")
        return 130
    if attached["socket"] is None:
        _say(f"job {attached['reference']} is {attached['state']}: {attached['detail']}")
        return int(attached["exit_code"] or (attached["state"] != "done"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        _connect(line, Path(attached["socket"]), attached["reference"])
        return _Session(line, attached["reference"]).until_the_end()


def _once_it_runs(manager: Client, job: str) -> dict[str, Any]:
    last_words = None
    last = int(manager.ping()["last_event"])
    while True:
        answer: dict[str, Any] = manager.call("attach", job=job)
        if answer["socket"] is not None or answer["state"] in ("done", "failed", "cancelled"):
            return answer
        words = f"job {answer['reference']} is {answer['state']}" + (
            f": {answer['reason']}" if answer["reason"] else ""
        )
        if words != last_words:
            _say(words)
            last_words = words
        last = int(manager.call("events", since=last, wait=_LOOK)["last"])


def _connect(line: socket.socket, file: Path, job: str) -> None:
    from ullage.manager.transport import reachable

    try:
        line.connect(reachable(file))
    except PermissionError:
        raise InvalidValue(f"only its user and root can connect to the terminal of job {job}") from None
    except OSError as error:
        raise InvalidValue(f"the terminal of job {job} cannot be reached: {error.strerror}") from None


class _Session:
    def __init__(self, line: socket.socket, job: str) -> None:
        self._line, self._job = line, job
        self._typing = True  # until the end of the input

    def until_the_end(self) -> int:
        """Pass on input and output until the job ends or the user detaches; return the exit code."""
        by_hand = sys.stdin.isatty()
        with _raw() if by_hand else contextlib.nullcontext(), self._following_the_window():
            if by_hand:
                _say(f"connected to job {self._job}; Ctrl-] leaves it running", end="\r\n")
            ended = self._pass_on(by_hand)
        if ended is None:
            _say(f"left job {self._job} running; 'ullage attach {self._job}' comes back to it")
            return 0
        return int(ended["code"] if ended["code"] is not None else 128 + (ended["signal"] or 0))

    def _pass_on(self, by_hand: bool) -> dict[str, Any] | None:
        """Return the end of the job, or `None` if the user detached."""
        from ullage.manager.running.terminal import ENDED, PRINTED, frames

        arrived = bytearray()
        while True:
            sources = [self._line, sys.stdin.fileno()] if self._typing else [self._line]
            ready, _, _ = select.select(sources, [], [], None if self._typing else _LOOK)
            if not ready:
                self._type(b"", by_hand)  # repeat the end of input for a shell that was not ready for it
            if self._line in ready:
                data = self._line.recv(_CHUNK)
                if not data:
                    raise InvalidValue(f"the connection to job {self._job} was lost; 'ullage status' tells more")
                arrived += data
                for kind, content in frames(arrived):
                    if kind == PRINTED:
                        os.write(sys.stdout.fileno(), content)
                    elif kind == ENDED:
                        return dict(json.loads(content))
            if sys.stdin.fileno() in ready and not self._type(os.read(sys.stdin.fileno(), _CHUNK), by_hand):
                return None

    def _type(self, data: bytes, by_hand: bool) -> bool:
        """Send typed input; return false if it contains the key to detach. At the end of a file, send Ctrl-D."""
        from ullage.manager.running.terminal import TYPED, frame

        before, leave, _ = data.partition(DETACH) if by_hand else (data, b"", b"")
        self._typing = bool(data)
        self._line.sendall(frame(TYPED, before if data else _END_OF_INPUT))
        return not leave

    @contextlib.contextmanager
    def _following_the_window(self) -> Iterator[None]:
        from ullage.manager.running.terminal import WINDOW, frame, window

        def tell(number: int, at: FrameType | None) -> None:
            try:
                size = os.get_terminal_size(sys.stdin.fileno())  # not COLUMNS, which may be outdated
            except OSError:
                size = shutil.get_terminal_size()
            self._line.sendall(frame(WINDOW, window(size.lines, size.columns)))

        before = signal.signal(signal.SIGWINCH, tell)
        tell(signal.SIGWINCH, None)
        try:
            yield
        finally:
            signal.signal(signal.SIGWINCH, before)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Send every key to the job, including Ctrl-C, inside the `with`."""
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin, termios.TCSADRAIN)  # keeps input that was already typed
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        print()


def umask_now() -> int:
    """Return the umask of this process, for the files of its jobs."""
    now = os.umask(0o077)
    os.umask(now)
    return now


def _say(words: str, end: str = "\n") -> None:
    print(f"ullage: {plain(words)}", file=sys.stderr, end=end, flush=True)
