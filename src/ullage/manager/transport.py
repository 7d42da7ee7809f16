"""A client's connection to a daemon: HTTP/1.1 over a Unix socket, or over TCP with a token. Standard library only."""

import contextlib
import http.client
import json
import os
import re
import select
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ullage import errors
from ullage.errors import InvalidValue, NoDaemon, UllageError, UnknownName
from ullage.home import SYSTEM_HOME, home
from ullage.manager.verbs import VERBS

SOCKET = "ullage.sock"
# The version of orders and answers. Raised when a change would mislead an older client or daemon.
PROTOCOL = 3
PROTOCOL_HEADER = "ullage-protocol"
RESTART = "restart it: systemctl restart ullage, or end it and type: ullage serve"
LONGEST_WAIT = 60.0  # longest `wait` of a caller, in seconds
LARGEST_REQUEST, _LARGEST_ANSWER = 4 << 20, 256 << 20  # bytes
_LONGEST_PATH = 100  # of the path of a Unix socket, in bytes
_NO_DAEMON = "no daemon is running: start it with `ullage serve`"


class Transport:
    """The Unix socket of a home, with one connection, opened on demand."""

    def __init__(self, folder: Path | None, timeout: float) -> None:
        self._file, self._timeout, self._prefix = socket_file(folder), timeout, ""
        self._connection: http.client.HTTPConnection = _UnixConnection(self._file, timeout)
        self._headers = {PROTOCOL_HEADER: str(PROTOCOL)}

    def call(self, verb: str, wait: float, arguments: dict[str, Any]) -> Any:
        """Send an order and return the answer. Raise errors of the daemon as the same exceptions."""
        wait = min(wait, LONGEST_WAIT)
        method, target, body = request_of(verb, arguments, wait)
        if body is not None and len(body) > LARGEST_REQUEST:
            raise InvalidValue(f"a request must have at most {LARGEST_REQUEST} bytes, got {len(body)}")
        try:
            status, answer = self._exchange(method, target, body, wait)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | http.client.HTTPException | ValueError):
                raise self._failure(error, wait) from None
            raise
        if status >= 400:
            raise _error_of(str(answer.get("error")), str(answer.get("message")))
        return answer

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._connection.close()

    def _exchange(self, method: str, target: str, body: bytes | None, wait: float) -> tuple[int, Any]:
        connection = self._connection
        if connection.sock is not None and select.select([connection.sock], [], [], 0)[0]:
            connection.close()  # the daemon closed it, after a restart or to make room
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(self._timeout + wait)
        connection.request(method, self._prefix + target, body, self._headers)
        response = connection.getresponse()
        content = response.read(_LARGEST_ANSWER)
        is_text = response.headers.get_content_maintype() == "text"  # the answer to `figures`
        return response.status, content.decode() if is_text else json.loads(content)

    def _failure(self, error: Exception, wait: float) -> UllageError:
        if isinstance(error, TimeoutError):
            return NoDaemon(f"the daemon did not answer within {self._timeout + wait:.0f} s ({self._file})")
        if isinstance(error, PermissionError):
            return NoDaemon(
                f"{self._file} is not yours to use: the daemon is another user's, or for a group of which you "
                "are not a member (access.group in its settings; log in again after you were added)"
            )
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return NoDaemon(_NO_DAEMON)
        return NoDaemon(f"the daemon ended before it answered; {_NO_DAEMON}")


class RemoteTransport(Transport):
    """The daemon at a URL, with a token and a connection for each request. Proxies are not covered."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not token.isprintable():
            raise InvalidValue(f"the API must be a URL such as http://127.0.0.1:8600 and a token, got {url[:80]!r}")
        super().__init__(None, timeout)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout)
        self._url, self._prefix = parts.geturl(), parts.path.rstrip("/")
        self._headers["Authorization"] = f"Bearer {token.strip()}"

    def call(self, verb: str, wait: float, arguments: dict[str, Any]) -> Any:
        try:
            return super().call(verb, wait, arguments)
        finally:
            self.close()

    def _failure(self, error: Exception, wait: float) -> UllageError:
        return NoDaemon(f"no daemon answers at {self._url}: {error or type(error).__name__}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, file: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._file = file
        self._pieces: list[bytes] = []

    def send(self, data: Any) -> None:
        """Collect headers and body to send them together, so that the daemon wakes up only once."""
        self._pieces.append(data)

    def close(self) -> None:
        self._pieces = []  # parts of a request that Ctrl-C cut off
        super().close()

    def getresponse(self) -> http.client.HTTPResponse:
        pieces, self._pieces = self._pieces, []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the daemon may have sent the reason
            self.sock.sendall(b"".join(pieces))
        return super().getresponse()

    def connect(self) -> None:
        """Connect, and retry when the kernel refuses because too many clients connect at once."""
        deadline = time.monotonic() + (self.timeout or 0.0)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        while True:
            try:
                return self.sock.connect(reachable(self._file))
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.01)


def request_of(verb: str, arguments: dict[str, Any], wait: float = 0.0) -> tuple[str, str, bytes | None]:
    """Return the request for a verb: method, path with query, and body.

    >>> request_of("status", {"job": "12_[1-5,8]"}), request_of("hold", {"jobs": [17, 18]})
    (('GET', '/v1/jobs/12_%5B1-5%2C8%5D', None), ('POST', '/v1/jobs/hold', b'{"jobs": [17, 18]}'))
    """
    if verb not in VERBS:
        raise UnknownName("order", verb[:80], VERBS)
    kind, rest = VERBS[verb], dict(arguments)
    path = kind.path.replace("/{job}", "") if "jobs" in rest else kind.path
    for name in re.findall(r"{(\w+)}", path):
        if name not in rest:
            raise InvalidValue(f"{name} is missing")
        path = path.replace(f"{{{name}}}", quote(str(rest.pop(name)), safe="", errors="surrogatepass"))
    query: dict[str, Any] = {"wait": wait} if wait else {}
    body = None
    if kind.method in ("GET", "DELETE"):
        given = {name: value for name, value in rest.items() if value is not None}
        query |= {
            name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in given.items()
        }
    elif rest:
        body = json.dumps(rest if "jobs" in rest else rest.get(kind.body, rest)).encode()
    return kind.method, path + (f"?{urlencode(query, errors='surrogatepass')}" if query else ""), body


def socket_file(folder: Path | None = None) -> Path:
    """Return the socket of the daemon of a home. Without a home, use the user's daemon or else the system's."""
    own = (folder or home()) / "run" / SOCKET
    of_all = SYSTEM_HOME / "run" / SOCKET
    if folder is None and not os.environ.get("ULLAGE_HOME") and not os.path.exists(own) and os.path.exists(of_all):
        return of_all
    return own


def reachable(file: Path) -> str:
    """Return a path with which a socket can be bound or reached; one that is too long is made relative."""
    text = str(file)
    if len(os.fsencode(text)) <= _LONGEST_PATH:
        return text
    short = os.path.relpath(text)
    if len(os.fsencode(short)) <= _LONGEST_PATH:
        return short
    raise InvalidValue(f"ULLAGE_HOME must be shorter: a socket's path has {_LONGEST_PATH} bytes at most, got {text}")


def _error_of(name: str, message: str) -> UllageError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, UllageError):
        error = kind.__new__(kind)
        Exception.__init__(error, message)
        return error
    return UllageError(message)
