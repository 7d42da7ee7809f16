"""The two ways to reach the daemon: its Unix socket, and its REST API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

from ullage import errors
from ullage.errors import InvalidValue, NoDaemon, OtherVersion, UllageError
from ullage.home import SYSTEM_HOME, home
from ullage.manager.verbs import VERBS

SOCKET = "ullage.sock"
# What client and daemon say to each other. One more when an order or an answer changes so that an older one is misled.
PROTOCOL = 2
LARGEST_REQUEST, _LARGEST_ANSWER = 4 << 20, 256 << 20  # bytes
_LONGEST_PATH = 100  # of a Unix socket, in bytes
_RESTART = "restart it: systemctl restart ullage, or end it and type: ullage serve"


class Transport(Protocol):
    def call(self, verb: str, wait: float, arguments: dict[str, Any]) -> Any:
        """Send an order and return the answer. Errors of the daemon are raised here as the same exceptions."""

    def close(self) -> None:
        """End the connection."""


class SocketTransport:
    """The daemon's Unix socket: one connection, opened when it is needed."""

    def __init__(self, folder: Path | None, timeout: float) -> None:
        self._file, self._timeout = socket_file(folder), timeout
        self._socket: socket.socket | None = None
        self._rest = b""

    def call(self, verb: str, wait: float, arguments: dict[str, Any]) -> Any:
        request: dict[str, Any] = {"protocol": PROTOCOL, "order": verb, "arguments": arguments}
        if wait:
            request["wait"] = wait
        line = json.dumps(request).encode() + b"\n"
        if len(line) > LARGEST_REQUEST:
            raise InvalidValue(f"a request must have at most {LARGEST_REQUEST} bytes, got {len(line)}")
        try:
            answer = self._exchange(line, wait)
        except BaseException:
            self.close()
            raise
        if not answer.get("ok"):
            raise _error_of(str(answer.get("error")), str(answer.get("message")))
        return answer["result"]

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._rest = None, b""

    def _exchange(self, line: bytes, wait: float) -> dict[str, Any]:
        try:
            connection = self._connected()
            connection.settimeout(self._timeout + wait)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a daemon that hangs up may have said why
                connection.sendall(line)
            answer: dict[str, Any] = json.loads(self._line(connection))
            return answer
        except TimeoutError:
            raise NoDaemon(f"the daemon did not answer within {self._timeout + wait:.0f} s ({self._file})") from None
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, PermissionError):
                raise NoDaemon(
                    f"{self._file} is not yours to use: the daemon there is somebody else's, or for a group of which "
                    "you are no member (access.group in its settings; log in again after you were added)"
                ) from None
            missing = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            words = "no daemon is running: start it with `ullage serve`"
            raise NoDaemon(words if missing else f"the daemon ended before it answered; {words}") from None

    def _connected(self) -> socket.socket:
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self.close()  # closed by the daemon, which was restarted or had no more room for an idle connection
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(self._timeout)
            self._connect(self._socket)
        return self._socket

    def _connect(self, connection: socket.socket) -> None:
        """Where many come at once, the kernel asks to try again."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return connection.connect(reachable(self._file))
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.01)

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


class HttpTransport:
    """The REST API: an order becomes a request. Proxies are not covered."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not token.isprintable():
            raise InvalidValue(f"the API must be a URL such as http://127.0.0.1:8600 and a token, got {url[:80]!r}")
        self._parts, self._token, self._timeout = parts, token.strip(), timeout
        self._understood = False

    def call(self, verb: str, wait: float, arguments: dict[str, Any]) -> Any:
        if verb not in VERBS or not VERBS[verb].path:
            there = ", ".join(name for name, each in VERBS.items() if each.path)
            raise InvalidValue(f"the API has no {verb!r}; it has {there}")
        self._check_protocol()
        if "jobs" in arguments:
            jobs, more = arguments["jobs"], {name: value for name, value in arguments.items() if name != "jobs"}
            return [done for job in jobs for done in self._one(verb, {"job": job, **more}, 0.0)]
        return self._one(verb, arguments, wait)

    def close(self) -> None:
        """Nothing is held open."""

    def _check_protocol(self) -> None:
        """Once, before anything is asked that could do something."""
        if not self._understood:
            about = self._one("ping", {}, 0.0)
            spoken = about.get("protocol", 1)
            if spoken < PROTOCOL:
                raise OtherVersion(f"the daemon (Ullage {about.get('version')}) is older than this client; {_RESTART}")
            if spoken > PROTOCOL:
                raise OtherVersion(
                    f"this client is older than the daemon, which is Ullage {about.get('version')}; "
                    "type: pip install --upgrade ullage"
                )
            self._understood = True

    def _one(self, verb: str, arguments: dict[str, Any], wait: float) -> Any:
        _, _, method, path, in_query, whole = VERBS[verb]
        given = {**arguments, **({"wait": wait} if wait else {})}
        query = {name: given.pop(name) for name in in_query if given.get(name) is not None}
        query = {name: ",".join(value) if isinstance(value, list) else value for name, value in query.items()}
        for name in [name for name in given if f"{{{name}}}" in path]:
            path = path.replace(f"{{{name}}}", quote(str(given.pop(name)), safe=""))
        body = json.dumps(given.get(whole, given)).encode() if method != "GET" and given else None
        return self._request(method, path + (f"?{urlencode(query)}" if query else ""), body, wait)

    def _request(self, method: str, path: str, body: bytes | None, wait: float) -> Any:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout + wait)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            content = answer.read(_LARGEST_ANSWER)
            found = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoDaemon(f"no daemon answers at {self._parts.geturl()}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if answer.status >= 400:
            raise _error_of(str(found.get("error")), str(found.get("message")))
        return found


def socket_file(folder: Path | None = None) -> Path:
    """Where the daemon of a home listens. Where no home is named and the user has no daemon, that of the system."""
    own = (folder or home()) / "run" / SOCKET
    of_all = SYSTEM_HOME / "run" / SOCKET
    if folder is None and not os.environ.get("ULLAGE_HOME") and not os.path.exists(own) and os.path.exists(of_all):
        return of_all
    return own


def reachable(file: Path) -> str:
    """The path by which a socket can be bound or reached: a long one only relative to where we are."""
    text = str(file)
    if len(os.fsencode(text)) <= _LONGEST_PATH:
        return text
    short = os.path.relpath(text)
    if len(os.fsencode(short)) <= _LONGEST_PATH:
        return short
    raise InvalidValue(f"ULLAGE_HOME must be shorter: a socket's path has {_LONGEST_PATH} bytes at most, got {text}")


def _error_of(kind: str, message: str) -> UllageError:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, UllageError):
        error = found.__new__(found)
        Exception.__init__(error, message)
        return error
    return UllageError(message)
