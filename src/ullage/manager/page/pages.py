"""Which page is where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Path, Request
from nicegui import app as nicegui_app
from nicegui import ui

from ullage.manager.page.estimate import show_estimate
from ullage.manager.page.gpus import show_gpus
from ullage.manager.page.job import show_job
from ullage.manager.page.queue import show_queue
from ullage.manager.page.reports import show_reports
from ullage.manager.page.sessions import Session
from ullage.manager.page.submit import show_submit
from ullage.manager.page.timeline import show_timeline


def add_pages(app: FastAPI, say: Callable[[str], None]) -> None:
    """Put NiceGUI and the pages into an app. The gate has let in only requests with a session."""

    @ui.page("/")
    async def gpus(request: Request) -> None:
        await show_gpus(_session(request))

    @ui.page("/queue")
    async def queue(request: Request) -> None:
        await show_queue(_session(request))

    @ui.page("/timeline")
    def timeline(request: Request) -> None:
        show_timeline(_session(request))

    @ui.page("/reports")
    def reports(request: Request) -> None:
        show_reports(_session(request))

    @ui.page("/submit")
    def submit(request: Request) -> None:
        show_submit(_session(request))

    @ui.page("/estimate")
    def estimate(request: Request) -> None:
        show_estimate(_session(request))

    @ui.page("/estimate/{number}")
    def estimated(request: Request, number: Annotated[str, Path(pattern="^[0-9a-z-]{1,80}$")]) -> None:
        show_estimate(_session(request), number)

    @ui.page("/job/{number}")
    def job(request: Request, number: Annotated[int, Path(ge=1, lt=2**53)]) -> None:
        show_job(_session(request), number)

    nicegui_app.on_exception(lambda error: say(f"a page failed: {type(error).__name__}: {str(error)[:200]}"))
    ui.run_with(
        app,
        title="Ullage",
        dark=None,
        language="en-US",
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=5.0,
        binding_refresh_interval=None,
        favicon="data:,",
    )


def _session(request: Request) -> Session:
    session: Session = request.scope["state"]["session"]
    return session
