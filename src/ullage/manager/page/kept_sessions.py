"""Sessions that outlive their process, a file each. A file is encrypted with the number in the browser's cookie, which
is stored nowhere else."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

_LARGEST = 4096  # bytes


class KeptSession(NamedTuple):
    """A session's token, its end in seconds since 1970, and whether the page's own user opened it by link."""

    token: str
    ends: float
    own: bool


class KeptSessions:
    """The sessions in a folder, by their numbers. `of` names the daemon, since a token must not reach another one.

    >>> import tempfile
    >>> kept = KeptSessions(Path(tempfile.mkdtemp()))
    >>> kept.keep("number of a session", "token", ends=time.time() + 60, own=False)
    >>> kept.find("number of a session").token, kept.find("another number")
    ('token', None)
    >>> kept.drop("number of a session"); kept.find("number of a session") is None
    True
    """

    def __init__(self, folder: Path, of: str = "") -> None:
        self._folder, self._of = folder, of
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in folder.iterdir():
                if file.stat().st_mtime < time.time():  # the time of a file is when its session ends
                    file.unlink()

    def keep(self, number: str, token: str, ends: float, own: bool) -> None:
        """Store a session; if that fails, it ends with this process."""
        sealed = _mixed(number, json.dumps([token, ends, own]).encode())
        file = self._file(number)
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as target:
                target.write(_tag(number, sealed) + sealed)
            os.utime(file, (ends, ends))

    def find(self, number: str) -> KeptSession | None:
        """Return a session that has not ended, or `None`."""
        try:
            with self._file(number).open("rb") as source:
                tag, sealed = source.read(32), source.read(_LARGEST)
        except OSError:
            return None
        if not hmac.compare_digest(tag, _tag(number, sealed)):
            return None
        found = KeptSession(*json.loads(_mixed(number, sealed)))
        return found if found.ends > time.time() else None

    def drop(self, number: str) -> None:
        with contextlib.suppress(OSError):
            self._file(number).unlink()

    def _file(self, number: str) -> Path:
        return self._folder / hashlib.sha256(f"name {self._of} {number}".encode()).hexdigest()


def _mixed(number: str, text: bytes) -> bytes:
    """Encrypt or decrypt a text. A number is random and used for one text."""
    stream = hashlib.shake_256(b"seal" + number.encode()).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, stream, strict=True))


def _tag(number: str, sealed: bytes) -> bytes:
    return hmac.new(b"tag" + number.encode(), sealed, "sha256").digest()
