"""`ullage.Client`: submit jobs and follow them from Python, through the daemon's socket or its API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ullage import errors
from ullage.errors import InvalidValue, NoDaemon, UllageError
from ullage.home import home

# Speaks to the daemon of this home; what the command line uses, and anybody else may.

SOCKET = "ullage.sock"
_LONGEST_PATH = 100  # of a Unix socket, in bytes
LARGEST_REQUEST, _LARGEST_ANSWER = 4 << 20, 256 << 20  # bytes


def socket_file(folder: Path | None = None) -> Path:
    """Where the daemon of a home listens."""
    return (folder or home()) / "run" / SOCKET


class SocketClient:
    """One connection, made when it is needed. A verb of `ullage.manager.core.orders.Orders` is a method call away:

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


# The REST API from the other end: an order becomes a request, an answer what the daemon meant. No more than Python.

_LARGEST_ANSWER = 256 << 20
# By order: method, path, which arguments are in the query.
_ROUTES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ping": ("GET", "/v1/ping", ()),
    "submit": ("POST", "/v1/jobs", ()),
    "queue": ("GET", "/v1/jobs", ("user",)),
    "status": ("GET", "/v1/jobs/{job}", ()),
    "logs": ("GET", "/v1/jobs/{job}/logs", ("attempt", "stream", "offset")),
    "cancel": ("POST", "/v1/jobs/{job}/cancel", ()),
    "hold": ("POST", "/v1/jobs/{job}/hold", ()),
    "release": ("POST", "/v1/jobs/{job}/release", ()),
    "history": ("GET", "/v1/history", ("limit", "user")),
    "gpus": ("GET", "/v1/gpus", ()),
    "drain": ("POST", "/v1/gpus/{gpu}/drain", ()),
    "resume": ("POST", "/v1/gpus/{gpu}/resume", ()),
    "events": ("GET", "/v1/events", ("since", "limit", "wait")),
}


class HttpClient:
    """Does orders over HTTP, as `ullage.manager.client.Client` does over the socket.

        HttpLine("http://127.0.0.1:8600", token).call("status", job=17)

    Not covered: proxies.
    """

    def __init__(self, url: str, token: str, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not token.isprintable():
            raise InvalidValue(f"needed a URL such as http://127.0.0.1:8600 and a token; found {url[:80]!r}")
        self._parts, self._token, self._timeout = parts, token.strip(), timeout

    def call(self, verb: str, wait: float = 0.0, **arguments: Any) -> Any:
        """Ask, and give what was answered."""
        if verb not in _ROUTES:
            raise InvalidValue(f"the API has no {verb!r}; it has {', '.join(_ROUTES)}")
        if verb in ("cancel", "hold", "release"):
            return [done for job in arguments["jobs"] for done in self._one(verb, {"job": job}, 0.0)]
        return self._one(verb, arguments, wait)

    def close(self) -> None:
        """Nothing is held open."""

    def _one(self, verb: str, arguments: dict[str, Any], wait: float) -> Any:
        method, path, in_query = _ROUTES[verb]
        given = {**arguments, **({"wait": wait} if wait else {})}
        query = {name: given.pop(name) for name in in_query if given.get(name) is not None}
        for name in [name for name in given if f"{{{name}}}" in path]:
            path = path.replace(f"{{{name}}}", quote(str(given.pop(name)), safe=""))
        body = json.dumps(given).encode() if method == "POST" and verb not in ("cancel", "hold", "release") else None
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
            raise error_of(str(found.get("error")), str(found.get("message")))
        return found


_OVER = ("done", "failed", "cancelled")
_PATIENCE = 20.0  # seconds that one question about events may wait


class Client:
    """Speaks to the daemon of this home, of another one, or with `url` and `token` to any that serves its API.

        with ullage.Client() as manager:
            [job] = manager.submit(["python", "train.py"], memory="12GiB")
            print(manager.wait(job)["state"], manager.logs(job))

    What answers look like is in docs/operations.md; errors are `UllageError`s. Not covered: several threads at once.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if (url is None) != (token is None):
            raise InvalidValue("needed both a url and a token for the API, or neither for the daemon's socket")
        self._line: SocketClient | HttpClient
        if url is not None and token is not None:
            self._line = HttpClient(url, token, timeout)
        else:
            self._line = SocketClient(None if home is None else Path(home), timeout)
        self._remote = url is not None

    def submit(
        self,
        what: Sequence[str] | str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Submit a command (a list of words) or a job file (a path); the numbers of the jobs, several for an array.

        Options have the names of docs/job_files.md and come before what the file says. The job gets this process's
        folder (that of the job file, if it is one) and environment (through the API: the least that a program
        expects), unless others are given. The same `key` again gives the same jobs.
        """
        job = self._job(what, options)
        if env is not None or not self._remote:
            job["env"] = {**(os.environ if env is None else env), **job.get("env", {})}
        job.setdefault("cwd", os.getcwd())
        answer = self._line.call("submit", job=job, key=key or secrets.token_hex(16))
        return list(answer["jobs"])

    def _job(self, what: Sequence[str] | str | os.PathLike[str], options: dict[str, Any]) -> dict[str, Any]:
        from ullage.workloads.job_files import make_job, read_job

        said: dict[str, Any] = {}
        if isinstance(what, str | os.PathLike):
            said = {"cwd": os.path.dirname(os.path.abspath(what)), **read_job(what).submission()}
        else:
            options = {"command": list(what), **options}
            if "cwd" in options:
                options["cwd"] = os.path.abspath(options["cwd"])
        if options:
            options.setdefault("command", said.get("command"))
            said |= make_job(options, "the job").submission()
        return said

    def queue(self, user: str | None = None) -> list[dict[str, Any]]:
        """Jobs that are not over."""
        return list(self._line.call("queue", user=user))

    def history(self, limit: int = 50, user: str | None = None) -> list[dict[str, Any]]:
        """Jobs that are over, the last one first."""
        return list(self._line.call("history", limit=limit, user=user))

    def status(self, job: int | str) -> dict[str, Any]:
        """All about one job."""
        found = self._line.call("status", job=job)
        if len(found) != 1:
            raise InvalidValue(f"needed one job; {job} means {len(found)}")
        return dict(found[0])

    def logs(self, job: int | str, stream: str = "stdout", attempt: int | None = None) -> str:
        """What a job has written so far."""
        return "".join(self._pieces(job, stream, attempt, follow=False))

    def follow(self, job: int | str, stream: str = "stdout") -> Iterator[str]:
        """What a job writes, piece by piece, until it is over."""
        return self._pieces(job, stream, None, follow=True)

    def _pieces(self, job: int | str, stream: str, attempt: int | None, follow: bool) -> Iterator[str]:
        offset, known = 0, attempt
        while True:
            piece = self._line.call("logs", job=job, stream=stream, offset=offset, attempt=attempt)
            if attempt is None and known is not None and piece["attempt"] != known:
                offset, known = 0, piece["attempt"]  # another attempt has begun
                continue
            offset, known = piece["offset"], piece["attempt"]
            if piece["text"]:
                yield piece["text"]
            elif piece["over"] or not follow:
                return
            else:
                time.sleep(0.2)

    def wait(self, job: int | str, timeout: float | None = None) -> dict[str, Any]:
        """The job once it is over; `TimeoutError` if that takes longer than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        last = int(self._line.call("ping")["last_event"])
        while True:
            found = self.status(job)
            if found["state"] in _OVER:
                return found
            left = _PATIENCE if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"job {job} is {found['state']} after {timeout:g} s")
            last = int(self._line.call("events", since=last, wait=min(left, _PATIENCE))["last"])

    def events(self, since: int = 0, wait: float = 0.0) -> Iterator[dict[str, Any]]:
        """What happened after event number `since`, as long as there is more within `wait` seconds."""
        while True:
            found = self._line.call("events", since=since, wait=wait)
            if not found["events"]:
                return
            yield from found["events"]
            since = int(found["last"])

    def cancel(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Take jobs out of the queue, or stop them if they run."""
        return list(self._line.call("cancel", jobs=list(jobs)))

    def hold(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Keep waiting jobs from starting."""
        return list(self._line.call("hold", jobs=list(jobs)))

    def release(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Let held jobs go on."""
        return list(self._line.call("release", jobs=list(jobs)))

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs now."""
        return list(self._line.call("gpus"))

    def drain(self, gpu: int | str, reason: str = "") -> dict[str, Any]:
        """No new jobs for a GPU."""
        return dict(self._line.call("drain", gpu=gpu, reason=reason))

    def resume(self, gpu: int | str) -> dict[str, Any]:
        """New jobs for a GPU again."""
        return dict(self._line.call("resume", gpu=gpu))

    def ping(self) -> dict[str, Any]:
        """What the daemon is."""
        return dict(self._line.call("ping"))

    def close(self) -> None:
        """End the connection; the next question makes another one."""
        self._line.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
