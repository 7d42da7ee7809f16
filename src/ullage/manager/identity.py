"""The callers of the daemon, their permissions, the rights of their jobs, and the tokens of the API."""

import grp
import hmac
import os
import pwd
import re
import resource
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ullage.errors import InvalidValue, NotAllowed
from ullage.manager.storage.tokens import TokenRecord

# The resource limits that a job inherits from its submitter.
_LIMITS = {
    "open files": "RLIMIT_NOFILE",
    "locked memory": "RLIMIT_MEMLOCK",
    "processes": "RLIMIT_NPROC",
    "stack size": "RLIMIT_STACK",
    "core file size": "RLIMIT_CORE",
    "file size": "RLIMIT_FSIZE",
    "address space": "RLIMIT_AS",
    "cpu time": "RLIMIT_CPU",
}
_LIMIT_LINE = re.compile(r"Max (.+?)\s+(unlimited|\d+)\s+(unlimited|\d+)\b")


@dataclass(frozen=True)
class Caller:
    """The user behind a request. An `operator` may change all jobs and GPUs; `scope` is that of a token."""

    uid: int
    gid: int
    user: str
    operator: bool = False
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    scope: str = "operate"

    def may_change(self, uid: int) -> bool:
        """Whether the caller may change and read jobs of a user."""
        return self.operator or self.uid == uid


def this_user() -> Caller:
    return Caller(os.getuid(), os.getgid(), user_name(os.getuid()), True, limits_of(os.getpid()))


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if the system has no name for it.

    >>> user_name(4_000_000_000)
    '4000000000'
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def number_of_user(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise InvalidValue(f"this system has no user {name[:80]!r}") from None


def is_operator(uid: int, user: str, operators: list[str]) -> bool:
    return uid in (0, os.getuid()) or user in operators


def caller_of(connection: socket.socket, operators: list[str]) -> Caller:
    """Return the peer of a Unix socket, as the kernel reports it."""
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    user = user_name(uid)
    return Caller(uid, gid, user, is_operator(uid, user, operators), limits_of(pid))


def limits_of(pid: int) -> dict[str, tuple[int, int]]:
    """Return the resource limits of a process, soft and hard; none if it is gone.

    >>> limits_of(os.getpid())["RLIMIT_NOFILE"] == resource.getrlimit(resource.RLIMIT_NOFILE)
    True
    """
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return {}
    limits = {}
    for line in lines:
        match = _LIMIT_LINE.match(line)
        if match and match[1] in _LIMITS:
            limits[_LIMITS[match[1]]] = (_limit(match[2]), _limit(match[3]))
    return limits


def _limit(text: str) -> int:
    return resource.RLIM_INFINITY if text == "unlimited" else int(text)


def check_submitter(caller: Caller) -> None:
    """Refuse users whose jobs this daemon cannot run: without root, all but its own user; with root, unknown ones."""
    if os.getuid() != 0:
        if caller.uid != os.getuid():
            raise NotAllowed(
                f"this daemon runs as {user_name(os.getuid())} and runs only that user's jobs, not {caller.user}'s. "
                "Start one of your own with `ullage serve`, or have root start one for all"
            )
    else:
        try:
            pwd.getpwuid(caller.uid)
        except (KeyError, OverflowError):
            raise NotAllowed(f"this system has no user with the number {caller.uid}") from None


def rights(uid: int, gid: int) -> dict[str, int | str]:
    if os.getuid() != 0 or uid == 0:
        return {}
    return {"uid": uid, "gid": gid, "user": user_name(uid)}


def group_number(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise NotAllowed(f"this system has no group {name!r} for the socket") from None


SECRET, TOKEN_FILE = "api-secret", "api-token"


class Tokens:
    """Finds the user of a token.

    The daemon writes the token of its own user to `run/api-token` (mode 600): that user's number and a secret that the
    daemon keeps (mode 600). To revoke it, remove the secret and restart the daemon. `ullage admin token create` makes
    all other tokens; `find` looks them up.

    >>> import tempfile
    >>> tokens = Tokens(Path(tempfile.mkdtemp()), [])
    >>> tokens.caller(tokens.own()).uid == os.getuid(), tokens.caller("ullage-0-" + "0" * 64)
    (True, None)
    """

    def __init__(
        self, folder: Path, operators: list[str], find: Callable[[str], TokenRecord | None] = lambda token: None
    ) -> None:
        self._operators, self._find = operators, find
        self._secret = _secret(folder / SECRET)

    def own(self) -> str:
        return f"ullage-{os.getuid()}-{self._secret}"

    def caller(self, token: str) -> Caller | None:
        if hmac.compare_digest(token.encode(), self.own().encode()):
            return this_user()
        record = self._find(token)
        if record is None:
            return None
        operator = record.scope == "operate" and is_operator(record.uid, record.user, self._operators)
        return Caller(record.uid, _group(record.uid), record.user, operator, scope=record.scope)


def write_token(file: Path, token: str) -> None:
    """Write a token to a file that only its owner can ever read."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as target:
        target.write(f"{token}\n")
    new.replace(file)


def _secret(file: Path) -> str:
    try:
        secret = file.read_text().strip()
    except FileNotFoundError:
        secret = ""
    if not re.fullmatch(r"[0-9a-f]{64}", secret):
        secret = secrets.token_hex(32)
        write_token(file, secret)
    return secret


def _group(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except (KeyError, OverflowError):
        return os.getgid() if uid == os.getuid() else 65534  # the group of nobody
