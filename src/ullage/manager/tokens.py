"""Tokens for the API: each says who holds it, and only the daemon can make one.

A token is a user's number and a signature of it by a secret that the daemon keeps (mode 600). The daemon writes the one
of its own user to `run/api-token` (mode 600); others get theirs through the Unix socket, where the kernel says who
they are. To make all tokens worthless, remove the secret and start the daemon again.
"""

from __future__ import annotations

import hmac
import os
import pwd
import re
import secrets
from pathlib import Path

from ullage.manager.identity import Who, limits_of, user_name

SECRET, TOKEN_FILE = "api-secret", "api-token"


class Tokens:
    """Makes and checks tokens.

    >>> import tempfile
    >>> tokens = Tokens(Path(tempfile.mkdtemp()), [])
    >>> tokens.who(tokens.token_of(os.getuid())).uid == os.getuid(), tokens.who("ullage-0-" + "0" * 64)
    (True, None)
    """

    def __init__(self, folder: Path, operators: list[str]) -> None:
        self._operators = operators
        self._secret = _secret(folder / SECRET)

    def token_of(self, uid: int) -> str:
        """The token of a user."""
        return f"ullage-{uid}-{self._signature(str(uid))}"

    def who(self, token: str) -> Who | None:
        """Whose token it is; `None` for one that this daemon did not make."""
        match = re.fullmatch(r"ullage-([0-9]{1,10})-([0-9a-f]{64})", token)
        if match is None or not hmac.compare_digest(match[2], self._signature(match[1])):
            return None
        uid = int(match[1])
        user = user_name(uid)
        operator = uid in (0, os.getuid()) or user in self._operators
        limits = limits_of(0) if uid == os.getuid() else {}
        return Who(uid, _group(uid), user, operator, limits)

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()


def write_token(file: Path, token: str) -> None:
    """Write a token so that only the owner of the file can read it, from its first moment on."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as target:
        target.write(f"{token}\n")
    new.replace(file)


def _secret(file: Path) -> bytes:
    try:
        kept = file.read_text().strip()
    except FileNotFoundError:
        kept = ""
    if not re.fullmatch(r"[0-9a-f]{64}", kept):
        kept = secrets.token_hex(32)
        write_token(file, kept)
    return bytes.fromhex(kept)


def _group(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except (KeyError, OverflowError):
        return os.getgid() if uid == os.getuid() else 65534  # nobody's
