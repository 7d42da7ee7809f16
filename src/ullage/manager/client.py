"""Speaks to the daemon of this home; what the command line uses, and anybody else may."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage import errors
from ullage.errors import InvalidValue, NoDaemon, UllageError
from ullage.home import home

SOCKET = "ullage.sock"
_LONGEST_PATH = 100  # of a Unix socket, in bytes
LARGEST_REQUEST, _LARGEST_ANSWER = 4 << 20, 256 << 20  # bytes


def socket_file(folder: Path | None = None) -> Path:
    """Where the daemon of a home listens."""
    return (folder or home()) / "run" / SOCKET


class Client:
    """One connection, made when it is needed. A verb of `ullage.manager.orders.Orders` is a method call away:

        Client().call("status", job=17)

    Errors of the daemon are raised here as the same exceptions.
    """

    def __init__(self, folder: Path | None = None, timeout: float = 60.0) -> None:
        self._file, self._timeout = socket_file(folder), timeout
        self._socket: socket.socket | None = None
        self._rest = b""

    def call(self, verb: str, wait: float = 0.0, **arguments: Any) -> Any:
        """Ask, and give what was answered. With `wait`, events may take that long to come."""
        request: dict[str, Any] = {"verb": verb, "arguments": arguments}
        if wait:
            request["wait"] = wait
        line = json.dumps(request).encode() + b"\n"
        if len(line) > LARGEST_REQUEST:
            raise InvalidValue(f"needed a request of at most {LARGEST_REQUEST} bytes; found {len(line)}")
        try:
            answer = self._exchange(line, wait)
        except BaseException:
            self.close()
            raise
        if not answer.get("ok"):
            raise error_of(str(answer.get("error")), str(answer.get("message")))
        return answer["result"]

    def submit(self, job: dict[str, Any], key: str | None = None, patience: float = 0.0) -> dict[str, Any]:
        """Submit a job; asks again for up to `patience` seconds where no answer came, which makes no second job."""
        key = key or secrets.token_hex(16)
        deadline = time.monotonic() + patience
        while True:
            try:
                answer: dict[str, Any] = self.call("submit", job=job, key=key)
                return answer
            except NoDaemon:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)

    def events(self, since: int, wait: float) -> Iterator[dict[str, Any]]:
        """Events after a number, as long as there are some within `wait` seconds."""
        while True:
            found = self.call("events", since=since, wait=wait)
            if not found["events"]:
                return
            yield from found["events"]
            since = found["last"]

    def close(self) -> None:
        """End the connection; the next call makes another one."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._rest = None, b""

    def _exchange(self, line: bytes, wait: float) -> dict[str, Any]:
        try:
            connection = self._connected()
            connection.settimeout(self._timeout + wait)
            connection.sendall(line)
            answer: dict[str, Any] = json.loads(self._line(connection))
            return answer
        except TimeoutError:
            raise NoDaemon(f"the daemon did not answer within {self._timeout + wait:.0f} s ({self._file})") from None
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, PermissionError):
                raise NoDaemon(f"{self._file} is not yours to use: the daemon there is somebody else's") from None
            missing = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            words = "no daemon is running: start it with `ullage serve`"
            raise NoDaemon(words if missing else f"the daemon ended before it answered; {words}") from None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(self._timeout)
            self._socket.connect(reachable(self._file))
        return self._socket

    def _line(self, connection: socket.socket) -> bytes:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            piece = connection.recv(1 << 20)
            if not piece or size > _LARGEST_ANSWER:
                raise EOFError
            parts.append(piece)
            size += len(piece)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line


def reachable(file: Path) -> str:
    """The path by which a socket can be bound or reached: a long one only relative to where we are."""
    text = str(file)
    if len(os.fsencode(text)) <= _LONGEST_PATH:
        return text
    short = os.path.relpath(text)
    if len(os.fsencode(short)) <= _LONGEST_PATH:
        return short
    raise InvalidValue(f"needed a shorter ULLAGE_HOME: a socket's path has {_LONGEST_PATH} bytes at most; {text}")


def error_of(kind: str, message: str) -> UllageError:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, UllageError):
        error = found.__new__(found)
        Exception.__init__(error, message)
        return error
    return UllageError(message)
