"""Start processes with a request, with a user's rights or by a fork, and end them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, Protocol

from ullage.sandbox import child, recording
from ullage.sandbox.boot import HELLO
from ullage.sandbox.environment import HOME
from ullage.sandbox.guard import BOOT, Order, enter
from ullage.sandbox.protocol import Channel, encode

Rights = Mapping[str, int | str]  # `uid`, `gid` and `user`

_LOOK = 0.005  # seconds between checks of a guard that is about to end
_PATIENCE = 5.0  # seconds for a guard to end what it guards
_is_fork = False  # whether this process is a child that `run_child` made


class ProcessHandle(Protocol):
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
    return start_process(command, stdin, output, env, passed, "/", **_as_user(rights))


def end_guard(guard: ProcessHandle) -> None:
    """Tell a guard to end its child and itself, and wait for it for a while."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(guard.pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while guard.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK)


def signal_group(process: ProcessHandle, number: signal.Signals) -> None:
    """Send a signal to a process and its group, if they still run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    if process.poll() is None:  # it has no group of its own yet, or is about to exit
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def kill_group(process: ProcessHandle) -> None:
    """Kill a process and its group, and wait for it."""
    signal_group(process, signal.SIGKILL)
    process.wait()


def start_process(
    command: list[str],
    stdin: IO[bytes],
    output: int,
    env: Mapping[str, str],
    passed: list[int],
    cwd: str | None,
    **user: Any,
) -> subprocess.Popen[bytes]:
    """Start a program as the leader of its own group and session."""
    user |= {"cwd": cwd, "env": env, "pass_fds": passed}
    with recording.paused():
        return subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, start_new_session=True, **user)


@contextlib.contextmanager
def request_file(request: dict[str, Any]) -> Iterator[IO[bytes]]:
    """Open a file with a request for a child; a long request would block a pipe."""
    content = encode(request)
    with recording.paused():
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.write(content)
        file.seek(0)
    with file:
        yield file


class ForkedProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> None:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_child(
    entry: str,
    channel: int,
    options: dict[str, Any],
    standard: list[int],
    env: Mapping[str, str],
    cwd: str | None,
    ours: list[int],
) -> ForkedProcess:
    """Fork a child from this process, which must have one thread (`can_fork`)."""
    pid = os.fork()
    if pid == 0:
        for descriptor in ours:
            os.close(descriptor)
        run_child(entry, channel, options, standard, env, cwd)
    return ForkedProcess(pid)


def can_fork() -> bool:
    """Return whether this process was forked for a request, and can be forked for a child of its own."""
    return _is_fork and count_threads() == 1


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def run_child(
    entry: str, channel: int, options: dict[str, Any], standard: list[int], env: Mapping[str, str], cwd: str | None
) -> None:
    """Continue as a child in a forked process; never returns."""
    global _is_fork
    code = 1
    try:
        os.setsid()
        for stream, file in enumerate(standard):
            os.dup2(file, stream)
        for file in set(standard) - {0, 1, 2}:
            os.close(file)
        with recording.paused():
            os.environ.clear()
            os.environ.update(env)
            if options["record"] is None:
                recording.leave()
        tempfile.tempdir = None
        sys.argv[1:] = [entry, str(channel), json.dumps(options)]
        _is_fork = True
        Channel(channel).at(HELLO)
        enter(cwd, channel)
        child.main(*sys.argv[1:])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        child.end(code)
