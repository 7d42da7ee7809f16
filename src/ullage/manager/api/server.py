"""The HTTP server, in the daemon's event loop: on the Unix socket and, with --api, on TCP."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from ullage.errors import InvalidValue, UllageError
from ullage.manager.api.gate import (
    FOR_OPERATORS,
    MOST_CONNECTIONS,
    MOST_LOCAL_CONNECTIONS,
    ConnectionLimit,
    GuardedConnection,
)
from ullage.manager.identity import TOKEN_FILE, Tokens, group_number, write_token
from ullage.manager.settings import AccessSettings
from ullage.manager.transport import reachable

DEFAULT_HOST = "127.0.0.1"
ADDRESS_FILE = "api.json"
_LONGEST_HEADERS = 64 << 10  # bytes
_BACKLOG = 1024
_GRACE = 1.0  # seconds to finish answers when the daemon ends


class Remote:
    """Where the API listens on TCP: `run/api.json` has the URL, `run/api-token` the token of the daemon's own user."""

    def __init__(self, listen: str, run: Path, tokens: Tokens, say: Callable[[str], None]) -> None:
        self.socket = listen_at(listen, "--api", "the API", say)
        self.url, self.tokens = url_of(self.socket), tokens
        write_token(run / TOKEN_FILE, tokens.own())
        self._file = run / ADDRESS_FILE
        self._file.write_text(json.dumps({"url": self.url}) + "\n")

    def close(self) -> None:
        self.socket.close()
        self._file.unlink(missing_ok=True)


class Server:
    """Serves the Unix socket `file`, for the daemon's user and perhaps a group, and `remote`.

    One user may have `each` connections to the Unix socket.
    """

    def __init__(
        self,
        app: ASGIApp,
        file: Path,
        remote: Remote | None,
        access: AccessSettings,
        each: int,
        say: Callable[[str], None],
    ) -> None:
        self._file, self._remote, self._access, self._say = file, remote, access, say
        self._doors = ConnectionLimit(MOST_LOCAL_CONNECTIONS, each, FOR_OPERATORS), ConnectionLimit(MOST_CONNECTIONS)
        self._state = ServerState()
        self._config = Config(
            app,
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            h11_max_incomplete_event_size=_LONGEST_HEADERS,
            http=GuardedConnection,
            ws="none",
            lifespan="off",
            loop="asyncio",
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self._config.load()
        self._local: asyncio.Server | None = None
        self._server: asyncio.Server | None = None  # on TCP
        self._inode: tuple[int, int] | None = None  # of our Unix socket's file

    async def start(self) -> None:
        await self._listen_locally()
        if self._remote is not None:
            self._server = await self._serve(self._remote.socket, self._doors[1])

    async def _listen_locally(self) -> None:
        """Listen, and replace the socket of an earlier daemon, whose lock we hold by now."""
        number = None if self._access.group is None else group_number(self._access.group)
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(reachable(self._file))
        finally:
            os.umask(before)
        if number is not None:
            os.chown(self._file, -1, number)
            os.chmod(self._file, 0o660)
        self._inode = self._on_disk()
        self._local = await self._serve(listening, self._doors[0])

    async def _serve(self, listening: socket.socket, door: ConnectionLimit) -> asyncio.Server:
        connection = partial(GuardedConnection, self._config, self._state, door, self._access.operators)
        listening.setblocking(False)
        return await asyncio.get_running_loop().create_server(connection, sock=listening, backlog=_BACKLOG)

    async def keep_listening(self) -> None:
        if self._local is None or self._on_disk() == self._inode:
            return
        self._local.close()
        try:
            await self._listen_locally()
        except OSError as error:
            self._inode = None
            self._say(f"the socket {self._file} was removed and cannot be made again: {error}")
            return
        self._say(f"the socket {self._file} was removed; it was made again")

    def _on_disk(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    async def stop(self) -> None:
        for server in filter(None, (self._local, self._server)):
            server.close()
        if self._remote is not None:
            self._remote.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_GRACE)
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.abort()
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()


def parse_listen(text: str, option: str = "--api") -> tuple[str, int]:
    """Return host and port of `8600`, `127.0.0.1:8600` or `[::1]:8600`.

    >>> parse_listen("8600"), parse_listen("[::1]:0")
    (('127.0.0.1', 8600), ('::1', 0))
    """
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):)?([0-9]{1,5})", text.strip())
    if match is None or int(match[2]) > 65535:
        raise InvalidValue(f"{option} must be a port such as 8600, or 127.0.0.1:8600, got {text[:80]!r}")
    return (match[1] or DEFAULT_HOST).strip("[]"), int(match[2])


def listen_at(text: str, option: str, what: str, say: Callable[[str], None]) -> socket.socket:
    """Return a socket that listens at `text`, the value of an option, for `what`. Warn if other hosts can reach it."""
    host, port = parse_listen(text, option)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UllageError(f"{what} cannot listen on {host}:{port}: {error.strerror or error}") from None
    if not _is_loopback(host):
        say(f"{what} listens on {host}, where others can reach it, and without encryption: put TLS before it")
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
