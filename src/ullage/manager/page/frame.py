"""The frame of every page: navigation, the signed-in user, and whether the daemon answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from nicegui import background_tasks, ui

from ullage.manager.page.elements import box, words
from ullage.manager.page.readings import EVERY, DaemonReading
from ullage.manager.page.sessions import Session
from ullage.units import format_duration

PLACES = {
    "GPUs": "/",
    "Queue": "/queue",
    "Timeline": "/timeline",
    "Reports": "/reports",
    "Submit": "/submit",
    "Estimate": "/estimate",
}
_BACK = 5.0  # seconds to show that the daemon is back
_FIRST = 0.5  # seconds for which a page waits for its first reading

Refresh = Callable[[DaemonReading], Awaitable[None]]


class Frame:
    """The frame of one open page; `every_reading` takes the page's update function."""

    def __init__(self, session: Session, title: str) -> None:
        self._session = session
        self._refresh: Refresh = _nothing
        self._troubled = False
        ui.add_head_html('<link rel="stylesheet" href="/_page/page.css"><script src="/_page/frame.js" defer></script>')
        ui.colors(primary="#00796b")
        ui.page_title(f"{title} - Ullage")
        layout = ui.context.client.layout
        with layout, box("div") as top:
            with box("header", "bar"):
                words("span", "Ullage", "brand")
                with box("nav").props('aria-label="Main"'):
                    for name, path in PLACES.items():
                        link = ui.link(name, path)
                        if name == title:
                            link.props('aria-current="page"')
                self._who = words("span", "", "who")
                with box("form").props('method="post" action="/sign-out"'):
                    words("button", "Sign out", "quiet").props('type="submit"')
            self._state = words("div", "").props('role="status" aria-live="polite"')
            self._say("")
        top.move(layout, 0)  # before the main part of NiceGUI's layout
        self.main = box("div", "content")
        with self.main:
            self._title = words("h1", title)
        ui.skip_link("Skip to the content", target=self.main)

    def call(self, title: str) -> None:
        if self._title.text != title:
            self._title.set_text(title)
            ui.page_title(f"{title} - Ullage")

    def every_reading(self, refresh: Refresh) -> None:
        """Begin to update the page, while the browser is still loading it."""
        self._refresh = refresh
        background_tasks.create(self._session.reading(), name="first reading")
        ui.timer(EVERY, self._tick)

    async def from_the_first(self, refresh: Refresh) -> None:
        """Update the page regularly, and send it with the first reading in it, unless that takes long."""
        first = background_tasks.create(self._session.reading(), name="first reading")
        done, _ = await asyncio.wait([first], timeout=_FIRST)
        if done and not first.result().trouble:
            self._show(first.result())
            await refresh(first.result())
        self.every_reading(refresh)

    async def _tick(self) -> None:
        if self._session.over:
            ui.navigate.to("/sign-in")
            return
        self._session.seen()
        reading = await self._session.reading()
        self._show(reading)
        if reading.about:
            await self._refresh(reading)

    def _show(self, reading: DaemonReading) -> None:
        if reading.about:
            self._who.set_text(reading.about["you"])
        if reading.trouble:
            self._troubled = True
            age = format_duration(round(time.time() - reading.since)) if reading.about else ""
            more = f" What you see is {age} old." if reading.about else ""
            self._say(f"{reading.trouble[:1].upper()}{reading.trouble[1:]}; trying again.{more}", "trouble")
        elif self._troubled and time.time() - reading.since < _BACK:
            self._say("The daemon answers again.", "fine")
        else:
            self._troubled = False
            self._say("")

    def _say(self, text: str, kind: str = "") -> None:
        self._state.set_text(text)
        self._state.classes(replace=f"connection {kind}" if text else "")


async def _nothing(reading: DaemonReading) -> None:
    """Do nothing, for pages that show no readings."""
