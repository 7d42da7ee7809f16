"""Processes, started with a request, with a user's rights or by a fork, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, Protocol

from ullage.sandbox import recording, waiting
from ullage.sandbox.environment import HOME
from ullage.sandbox.guard import BOOT, Order
from ullage.sandbox.protocol import encode

Rights = Mapping[str, int | str]  # `uid`, `gid` and `user`

_LOOK = 0.005  # seconds between two looks at a guard that is about to end
_PATIENCE = 5.0  # seconds for a guard to end what it guards


class Started(Protocol):
    """What is needed of a process, whoever started it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> Any: ...


def _as_user(rights: Rights | None) -> dict[str, Any]:
    if not rights:
        return {}
    groups = os.getgrouplist(str(rights["user"]), int(rights["gid"]))
    return {"user": rights["uid"], "group": rights["gid"], "extra_groups": groups}


def start_guard(
    order: Order, stdin: IO[bytes], output: int, env: Mapping[str, str], passed: list[int], rights: Rights | None
) -> subprocess.Popen[bytes]:
    """Start the guard of a child, with the rights of the child's user."""
    command = [sys.executable, "-I", "-S", "-c", BOOT, HOME, order.to_text()]
    return started(command, stdin, output, env, passed, "/", **_as_user(rights))


def end_guard(guard: Started) -> None:
    """Tell a guard to end what it guards, and itself, and wait until it has, or for a while."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(guard.pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while guard.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK)


def kill_group(process: Started) -> None:
    """Kill a process and its group, if they have not ended by themselves, and take leave of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:  # it had not come to be a group of its own, or is about to be gone
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    process.wait()


def started(
    command: list[str], stdin: IO[bytes], output: int, env: Mapping[str, str], passed: list[int], cwd: str | None,
    **user: Any,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a program that leads a group and a session of its own."""
    with recording.paused():
        return subprocess.Popen(
            command, stdin=stdin, stdout=output, stderr=output, pass_fds=passed, start_new_session=True, cwd=cwd,
            env=env, **user,
        )  # fmt: skip


@contextlib.contextmanager
def as_file(request: dict[str, Any]) -> Iterator[IO[bytes]]:
    """A request for a child to read; a pipe would block on a long one."""
    content = encode(request)
    with recording.paused():
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.write(content)
        file.seek(0)
    with file:
        yield file


class Forked:
    """A child that is forked from this process."""

    def __init__(
        self, entry: str, channel: int, told: dict[str, Any], standard: list[int], env: Mapping[str, str],
        cwd: str | None, ours: list[int],
    ) -> None:  # fmt: skip
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in ours:
                os.close(descriptor)
            waiting.be_child(entry, channel, told, standard, env, cwd)

    def poll(self) -> int | None:
        """How it ended, if it has."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> None:
        """Wait until it has ended."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
