"""Processes of an attempt: found by the mark in their environment or the lock that they hold, and signalled surely."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ullage.manager import supervisor
from ullage.virtual.living import Process, is_alive, start_of


def processes_of(token: str) -> list[Process]:
    """The living processes that were started with an attempt's token in their environment."""
    mark = f"{supervisor.TOKEN}={token}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            start = start_of(int(name))
            with contextlib.suppress(OSError):
                if start is not None and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(Process(int(name), start))
    return found


def holders_of(lock: Path) -> list[Process]:
    """The living processes that have a lock's file open, this one aside."""
    wanted, found = lock.stat(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        start = start_of(int(name))
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{name}/fd"):
                opened = os.stat(f"/proc/{name}/fd/{number}")
                if start is not None and (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(Process(int(name), start))
                    break
    return found


def signal_process(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly that process, never to another one that got its pid."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):  # asked after the descriptor was opened, which stays with the process
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
