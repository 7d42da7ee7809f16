"""Reports a daemon's health to systemd, and the job that it was handling to the next daemon."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

MOST_CRASHES = 3  # crashes of the daemon over one job after which the job is held
_BETWEEN = 1.0  # seconds between two reports
_SIZE = 20  # bytes of a job's number in the file


class Watchdog:
    """Reports to systemd (`Type=notify`, `WatchdogSec`), if there is one. Child processes do not inherit its socket."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._next = 0.0

    def ready(self) -> None:
        self._tell("READY=1")

    def well(self) -> None:
        """Report a successful step. Without reports for `WatchdogSec`, systemd restarts the daemon."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _BETWEEN
            self._tell("WATCHDOG=1")

    def ending(self) -> None:
        self._tell("STOPPING=1")

    def _tell(self, words: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(words.encode(), self._address)


class CrashMarker:
    """Stores the number of the job that the daemon is starting or estimating, so that after a crash the next daemon
    knows it."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "handled", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def left(self) -> int | None:
        """Return the job that the last daemon was handling when it crashed, once."""
        text = os.pread(self._file, _SIZE, 0).strip(b"\0 \n")
        self._write(0)
        return int(text) if text.isdigit() and int(text) else None

    @contextlib.contextmanager
    def now(self, job: int) -> Iterator[None]:
        self._write(job)
        try:
            yield
        finally:
            self._write(0)

    def _write(self, job: int) -> None:
        os.pwrite(self._file, b"%-*d" % (_SIZE, job), 0)

    def close(self) -> None:
        os.close(self._file)
