"""The page's server: NiceGUI behind the gate, in its own process, with the addresses of the pages."""

import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Path, Request
from nicegui import app as nicegui_app
from nicegui import ui

from ullage.manager.api.server import url_of
from ullage.manager.page.estimate import EstimatePage
from ullage.manager.page.frame import Frame
from ullage.manager.page.gate import PageGate
from ullage.manager.page.gpus import show_gpus
from ullage.manager.page.job import show_job
from ullage.manager.page.queue import show_queue
from ullage.manager.page.reports import ReportSheet
from ullage.manager.page.sessions import Session, Sessions
from ullage.manager.page.submit import SubmitPage
from ullage.manager.page.timeline import Timeline


def _show_view(title: str, view: Callable[[Session], Any], session: Session) -> None:
    frame = Frame(session, title)
    with frame.main:
        shown = view(session)
    frame.every_reading(shown.refresh)


_PLACES: dict[str, Callable[[Session], Awaitable[None] | None]] = {
    "/": show_gpus,
    "/queue": show_queue,
    "/timeline": partial(_show_view, "Timeline", Timeline),
    "/reports": partial(_show_view, "Reports", ReportSheet),
    "/submit": partial(_show_view, "Submit", SubmitPage),
    "/estimate": partial(_show_view, "Estimate", EstimatePage),
}


def serve_page(
    door: socket.socket, sessions: Sessions, say: Callable[[str], None], ready: Callable[[str], None]
) -> None:
    """Serve the page on a listening socket until a signal arrives. Pass its address to `ready`."""
    with door:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        _add_pages(app, say)
        for name in ("uvicorn", "nicegui", "socketio", "engineio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            PageGate(app, sessions, door.getsockname()[1], say),
            log_config=None,
            access_log=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            server_header=False,
            limit_concurrency=1000,
            ws_max_size=1 << 20,
        )
        try:
            _PageServer(config, lambda: ready(url_of(door))).run(sockets=[door])
        finally:
            sessions.end_all()


class _PageServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def _add_pages(app: FastAPI, say: Callable[[str], None]) -> None:
    """Add NiceGUI and the pages to an app. The gate lets only requests with a session through."""
    for path, show in _PLACES.items():
        _add_page(path, show)

    @ui.page("/estimate/{number}")
    def estimated(request: Request, number: Annotated[str, Path(pattern="^[0-9a-z-]{1,80}$")]) -> None:
        _show_view("Estimate", partial(EstimatePage, number=number), _session(request))

    @ui.page("/job/{number}")
    def job(request: Request, number: Annotated[int, Path(ge=1, lt=2**53)]) -> None:
        show_job(_session(request), number)

    nicegui_app.on_exception(lambda error: say(f"a page failed: {type(error).__name__}: {str(error)[:200]}"))
    look: dict[str, Any] = {"title": "Ullage", "dark": None, "tailwind": False, "favicon": "data:,"}
    quiet: dict[str, Any] = {"show_welcome_message": False, "binding_refresh_interval": None}
    ui.run_with(app, language="en-US", reconnect_timeout=5.0, **look, **quiet)


def _add_page(path: str, show: Callable[[Session], Awaitable[None] | None]) -> None:
    @ui.page(path)
    async def page(request: Request) -> None:
        shown = show(_session(request))
        if shown is not None:
            await shown


def _session(request: Request) -> Session:
    session: Session = request.scope["state"]["session"]
    return session
