"""Who speaks to the daemon, what they may do, and with whose rights their jobs run."""

from __future__ import annotations

import grp
import os
import pwd
import re
import resource
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from ullage.errors import NotAllowed

# What a job takes over from whoever submitted it; the others are no business of a job.
_LIMITS = {
    "open files": "RLIMIT_NOFILE", "locked memory": "RLIMIT_MEMLOCK", "processes": "RLIMIT_NPROC",
    "stack size": "RLIMIT_STACK", "core file size": "RLIMIT_CORE", "file size": "RLIMIT_FSIZE",
    "address space": "RLIMIT_AS", "cpu time": "RLIMIT_CPU",
}  # fmt: skip
_LIMIT_LINE = re.compile(r"Max (.+?)\s+(unlimited|\d+)\s+(unlimited|\d+)\b")


@dataclass(frozen=True)
class Who:
    """A user at the other end; `operator` may change anybody's jobs and the GPUs.

    >>> Who(uid=0, gid=0, user="root", operator=True).may_change(1000)
    True
    """

    uid: int
    gid: int
    user: str
    operator: bool = False
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)

    def may_change(self, uid: int) -> bool:
        """Whether a job of that user is theirs to change and to read."""
        return self.operator or self.uid == uid


def myself() -> Who:
    """The user of this process, who may do everything to a daemon of their own."""
    return Who(os.getuid(), os.getgid(), user_name(os.getuid()), True, limits_of(os.getpid()))


def user_name(uid: int) -> str:
    """The name of a user, or the number where the system has none.

    >>> user_name(4_000_000_000)
    '4000000000'
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def peer(connection: socket.socket, operators: list[str]) -> Who:
    """Who is at the other end of a Unix socket, as the kernel says it."""
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    user = user_name(uid)
    operator = uid in (0, os.getuid()) or user in operators
    return Who(uid, gid, user, operator, limits_of(pid))


def limits_of(pid: int) -> dict[str, tuple[int, int]]:
    """The limits that a process lives under, soft and hard; one that is gone has none.

    >>> limits_of(os.getpid())["RLIMIT_NOFILE"] == resource.getrlimit(resource.RLIMIT_NOFILE)
    True
    """
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        match = _LIMIT_LINE.match(line)
        if match and match[1] in _LIMITS:
            found[_LIMITS[match[1]]] = (_limit(match[2]), _limit(match[3]))
    return found


def _limit(text: str) -> int:
    return resource.RLIM_INFINITY if text == "unlimited" else int(text)


def check_submitter(who: Who) -> None:
    """A daemon that is not root runs its own user's jobs only; one that is needs a user whom the system knows."""
    if os.getuid() != 0:
        if who.uid != os.getuid():
            raise NotAllowed(
                f"this daemon runs as {user_name(os.getuid())} and runs only that user's jobs; found {who.user}. "
                "Start one of your own with `ullage serve`, or have root start one for all"
            )
    else:
        try:
            pwd.getpwuid(who.uid)
        except (KeyError, OverflowError):
            raise NotAllowed(f"needed a user whom this system knows; found the number {who.uid}") from None


def rights(uid: int, gid: int) -> dict[str, int | str]:
    """What a job's order says about whose rights it gets: nothing where it is the daemon's own user."""
    if os.getuid() != 0 or uid == 0:
        return {}
    return {"uid": uid, "gid": gid, "user": user_name(uid)}


def group_number(name: str) -> int:
    """The number of a group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise NotAllowed(f"needed a group of this system for the socket; found no {name!r}") from None
