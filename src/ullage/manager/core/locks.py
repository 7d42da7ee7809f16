"""Locks that a daemon holds while it lives: on its home, and on the GPUs of this machine."""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ullage.errors import AlreadyServing, NotAllowed
from ullage.manager.identity import user_name

GPU_LOCKS = (Path("/run/lock"), Path("/tmp"))  # the first folder in which every user may create files


def lock_home(folder: Path) -> int:
    """Lock a home; refuse a second daemon."""
    descriptor = os.open(folder / "serve.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise AlreadyServing(
            f"a daemon is already running in {folder.parent} (process {pid or 'unknown'}); "
            "`ullage queue` speaks to it, and another one needs another ULLAGE_HOME"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def lock_gpus(gpus: Iterable[str], say: Callable[[str], None]) -> list[int]:
    """Lock GPUs by UUID: two daemons would promise the same memory twice. A second daemon is refused, but root is only
    warned of other users' locks, which anyone can take."""
    folder = next(place for place in GPU_LOCKS if place.is_dir() and place.stat().st_mode & 0o002)
    held: list[int] = []
    for gpu in gpus:
        descriptor = _opened(folder / f"ullage-{re.sub(r'[^A-Za-z0-9-]', '-', gpu)}.lock")
        held.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _holder(descriptor)
            owner = _owner(pid)
            who = f"process {pid} of {user_name(owner)}" if pid and owner is not None else "another process"
            text = f"another daemon already serves {gpu} ({who}); two would promise the same memory twice"
            if os.getuid() == 0 and owner not in (0, None):
                say(f"{text}. This one serves it all the same, since it is root's; end the other one")
                continue
            for each in held:
                os.close(each)
            raise AlreadyServing(f"{text}. Use that one, or end it first") from None
    return held


def _opened(file: Path) -> int:
    """Open a lock file. Any user may have created it, so symbolic links are not followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o644)
        return os.open(file, flags)
    except OSError as error:
        raise NotAllowed(
            f"the GPU's lock {file} cannot be opened ({error.strerror}); remove that file and try again"
        ) from None


def _holder(descriptor: int) -> int | None:
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == place and int(words[4]) > 0:
                return int(words[4])
    return None


def _owner(pid: int | None) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid if pid else None
    return None
