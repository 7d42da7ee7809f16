"""The API beside the daemon: in a thread of its own, so that slow readers do not hold up the jobs."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn

from ullage.errors import InvalidValue, NoDaemon, UllageError
from ullage.manager.api.gate import guarded
from ullage.manager.api.rest import make_app
from ullage.manager.identity import TOKEN_FILE, Caller, Tokens, write_token

DEFAULT_HOST = "127.0.0.1"
ADDRESS_FILE = "api.json"
_LONGEST_HEADERS = 64 << 10

Call = Callable[[Caller, str, dict[str, Any], float], Awaitable[Any]]


class ApiServer:
    """The server of the REST API. It listens at once, and answers after `start`."""

    def __init__(
        self,
        listen: str,
        run: Path,
        tokens: Tokens,
        call: Call,
        each: int,
        say: Callable[[str], None],
        health: Callable[[], str],
    ) -> None:
        self._call, self._say, self._each, self._health, self.tokens = call, say, each, health, tokens
        self._socket = listen_at(listen, "--api", "the API", say)
        self.url = url_of(self._socket)
        self._ending = threading.Event()
        self._server: uvicorn.Server | None = None  # from `start` on
        self._thread: threading.Thread | None = None
        write_token(run / TOKEN_FILE, tokens.own())
        self._address = run / ADDRESS_FILE
        self._address.write_text(json.dumps({"url": self.url}) + "\n")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to answer; the daemon's loop does the orders."""

        async def ask(caller: Caller, verb: str, arguments: dict[str, Any], wait: float) -> Any:
            if self._ending.is_set():
                raise NoDaemon("the daemon is ending; ask the next one")
            done = asyncio.run_coroutine_threadsafe(_as_coroutine(self._call(caller, verb, arguments, wait)), loop)
            return await asyncio.wrap_future(done)

        app = make_app(ask, self.tokens.caller, self._each, self._ending.is_set, self._say, self._health)
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_LONGEST_HEADERS,
            http=guarded(),
            ws="none",
            lifespan="off",
            loop="asyncio",
            server_header=False,
            date_header=False,
            backlog=1024,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(self._server,), daemon=True, name="ullage-api")
        self._thread.start()

    def _run(self, server: uvicorn.Server) -> None:
        try:
            server.run(sockets=[self._socket])
        except BaseException as error:
            self._say(f"the API ended: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Stop answering; called by another thread than the daemon's loop, which open requests may wait for."""
        self._ending.set()
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(5)
        self._socket.close()
        self._address.unlink(missing_ok=True)


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def parse_listen(text: str, option: str = "--api") -> tuple[str, int]:
    """Host and port of `8600`, `127.0.0.1:8600` or `[::1]:8600`.

    >>> parse_listen("8600"), parse_listen("[::1]:0")
    (('127.0.0.1', 8600), ('::1', 0))
    """
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):)?([0-9]{1,5})", text.strip())
    if match is None or int(match[2]) > 65535:
        raise InvalidValue(f"{option} must be a port such as 8600, or 127.0.0.1:8600, got {text[:80]!r}")
    return (match[1] or DEFAULT_HOST).strip("[]"), int(match[2])


def listen_at(text: str, option: str, what: str, say: Callable[[str], None]) -> socket.socket:
    """Return a socket that listens at `text`, the value of an option; `what` is its user. Warn of hosts in reach."""
    host, port = parse_listen(text, option)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
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
    """Return the address of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
