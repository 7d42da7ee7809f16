"""Starts, finds and stops attempts. An attempt is alive if the lock of its folder is held, whatever its pid.

A folder is used once. Its files record the attempt's progress:

    order.json            command and terms, written before anything starts
    lock                  held while the supervisor or the job lives
    started.json          the supervisor has the lock and has created the job's process
    stop.json             an order to end it
    revoked               it will never start (written and checked under the lock)
    exit.json             how it ended
    stdout, stderr        its output
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ullage.manager.fault_injection import crash_point
from ullage.manager.running import supervisor
from ullage.manager.running.output import read_end
from ullage.manager.running.process_tree import kill_cgroup, read_record, remove_cgroup, signal_if
from ullage.manager.storage.database import sync
from ullage.sandbox.process_identity import Process, is_alive, start_of


def processes_of(token: str) -> list[Process]:
    """Return the living processes with an attempt's token in their environment."""
    mark = f"{supervisor.TOKEN}={token}".encode()
    processes = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            start = start_of(int(name))
            with contextlib.suppress(OSError):
                if start is not None and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    processes.append(Process(int(name), start))
    return processes


def holders_of(lock: Path) -> list[Process]:
    """Return the other living processes that have a lock's file open."""
    wanted, holders = lock.stat(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        start = start_of(int(name))
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{name}/fd"):
                opened = os.stat(f"/proc/{name}/fd/{number}")
                if start is not None and (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
                    holders.append(Process(int(name), start))
                    break
    return holders


STDOUT, STDERR, LOG = "stdout", "stderr", "supervisor.log"


@dataclass(frozen=True)
class AttemptStatus:
    """The state of a folder: "starting" (its supervisor is starting), "absent" (never begun), "alive", "ended" (with
    its record), "orphaned" (processes live without their supervisor), or "lost" (no process and no record)."""

    state: str
    started: dict[str, Any] | None = None
    record: dict[str, Any] | None = None


class Launcher:
    """The attempts of one daemon, in folders `jobs/JOB/ATTEMPT` below its own."""

    def __init__(self, folder: Path, wake: Path) -> None:
        self._folder, self._wake = folder / "jobs", wake
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._failures: dict[Path, str] = {}

    def folder(self, job: int, number: int) -> Path:
        return self._folder / str(job) / str(number)

    def start(self, folder: Path, order: dict[str, Any]) -> None:
        """Start the supervisor of a recorded attempt. `failure` returns errors."""
        try:
            self._start(folder, order)
        except OSError as error:
            self._failures[folder] = f"{error.strerror}: {error.filename}" if error.filename else str(error)

    def jobs(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._folder) if name.isdigit()}
        except OSError:
            return set()

    def _start(self, folder: Path, order: dict[str, Any]) -> None:
        if any((folder / name).exists() for name in (supervisor.STARTED, supervisor.EXIT)):
            return  # the database is an older copy: this attempt was started before, and its folder has its state
        folder.mkdir(parents=True, mode=0o755, exist_ok=True)
        crash_point("folder-made")
        order = {**order, "stdout": str(folder / STDOUT), "stderr": str(folder / STDERR), "wake": str(self._wake)}
        write_whole(folder / supervisor.ORDER, order, mode=0o600)
        crash_point("order-written")
        with (folder / LOG).open("ab") as log:
            command = [sys.executable, "-I", "-S", supervisor.__file__, str(folder)]
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        self._children[order["token"]] = child
        crash_point("supervisor-started")

    def look(self, folder: Path, token: str) -> AttemptStatus:
        """Return the status of an attempt. Children of this process need no lock."""
        started = read_record(folder / supervisor.STARTED)
        record, state = read_record(folder / supervisor.EXIT), "ended"
        if record is None:
            child = self._children.get(token)
            if child is not None and child.poll() is None:
                return AttemptStatus("alive" if started else "starting", started)
            record, state = self._by_lock(folder)
            if state == "alive" and started is not None and not is_alive(_process(started, "supervisor")):
                state = "orphaned"
        return AttemptStatus(state, started, record)

    def reap(self) -> None:
        for token in [token for token, child in self._children.items() if child.poll() is not None]:
            self._children.pop(token)

    def _by_lock(self, folder: Path) -> tuple[dict[str, Any] | None, str]:
        if not folder.exists():
            return None, "absent"
        with locked(folder) as mine:
            if not mine:
                return None, "alive"
            record = read_record(folder / supervisor.EXIT)  # it may have ended meanwhile
            if record is not None:
                return record, "ended"
            return None, "lost" if (folder / supervisor.STARTED).exists() else "absent"

    def revoke(self, folder: Path) -> bool:
        """Prevent an attempt from beginning; return false if it has begun."""
        if not folder.exists():
            return True
        with locked(folder) as mine:
            if not mine or (folder / supervisor.STARTED).exists() or (folder / supervisor.EXIT).exists():
                return False
            (folder / supervisor.REVOKED).touch()
            sync(folder)
            return True

    def stop(self, folder: Path, reason: str, grace: float, checkpoint: float | None = None) -> None:
        """Order the supervisor to end the job: SIGTERM, then SIGKILL after `grace` seconds; with `checkpoint`, the job
        first gets that many seconds to save a checkpoint."""
        order = {"reason": reason, "grace": grace} | ({} if checkpoint is None else {"checkpoint": checkpoint})
        write_whole(folder / supervisor.STOP, order)
        crash_point("stop-written")
        started = read_record(folder / supervisor.STARTED)
        if started is not None:
            _signal(_process(started, "supervisor"), signal.SIGUSR2)
        crash_point("stop-sent")

    def sweep(self, folder: Path, token: str) -> int:
        started = read_record(folder / supervisor.STARTED) or {}
        in_group = kill_cgroup(started["cgroup"]) if started.get("cgroup") else 0
        left = {*processes_of(token), *holders_of(folder / supervisor.LOCK)} - {_process(started, "guardian")}
        return in_group + len([process for process in left if _signal(process, signal.SIGKILL)])

    def tidy(self, folder: Path) -> None:
        """Delete the order, which holds all variables, and the cgroup of a finished attempt."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            order = json.loads((folder / supervisor.ORDER).read_text())
            (folder / supervisor.ORDER).unlink()
            remove_cgroup(order["cgroup"] or "")

    def running_for(self, folder: Path) -> float | None:
        """Return the monotonic seconds since an attempt's supervisor started; `None` before its start."""
        started = read_record(folder / supervisor.STARTED)
        if started is None:
            return None
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started["supervisor_start"]) / os.sysconf("SC_CLK_TCK")

    def failure(self, folder: Path) -> str:
        """Return why an attempt could not begin, from an error here or its supervisor's log."""
        if folder in self._failures:
            return self._failures.pop(folder)
        lines = read_end(str(folder / LOG), 4096).decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it left no word"

    def remove(self, job: int) -> None:
        shutil.rmtree(self._folder / str(job), ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Try to lock an attempt; if the lock was free, hold it inside the `with`."""
    descriptor = os.open(folder / supervisor.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _signal(process: Process, number: signal.Signals) -> bool:
    return signal_if(process.pid, number, partial(is_alive, process))


def _process(started: dict[str, Any], kind: str) -> Process:
    return Process(int(started.get(f"{kind}_pid", 0)), int(started.get(f"{kind}_start", 0)))


def write_whole(file: Path, record: dict[str, Any], mode: int = 0o644) -> None:
    """Write a record atomically and durably."""
    new = file.with_name(file.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "w") as target:
        json.dump(record, target)
        target.flush()
        os.fsync(target.fileno())
    new.rename(file)
    sync(file.parent)
