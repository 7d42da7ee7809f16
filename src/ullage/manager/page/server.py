"""The page's server: NiceGUI behind the gate, in a process of its own."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ullage.manager.api.server import is_loopback, listening, parse_listen, url_of
from ullage.manager.page.gate import PageGate
from ullage.manager.page.pages import add_pages
from ullage.manager.page.sessions import Sessions


def open_door(listen: str, say: Callable[[str], None]) -> socket.socket:
    """A socket for `serve_page`, such as `8601` or `0.0.0.0:8601`."""
    host, port = parse_listen(listen, "--listen")
    if not is_loopback(host):
        say(f"the page listens on {host}, where others can reach it, and without encryption: put TLS before it")
    return listening(host, port, "the page")


def serve_page(
    door: socket.socket, sessions: Sessions, say: Callable[[str], None], ready: Callable[[str], None]
) -> None:
    """Serve the page on a socket that listens, until a signal comes. `ready` is told its address."""
    with door:
        host, port = door.getsockname()[:2]
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        add_pages(app, say)
        for name in ("uvicorn", "nicegui", "socketio", "engineio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            PageGate(app, sessions, port, say),
            log_config=None,
            access_log=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            server_header=False,
            limit_concurrency=1000,
            ws_max_size=1 << 20,
        )
        try:
            _PageServer(config, lambda: ready(url_of(host, port))).run(sockets=[door])
        finally:
            sessions.end_all()


class _PageServer(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._ready()
