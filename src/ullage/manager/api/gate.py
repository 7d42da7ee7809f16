"""The checks before each HTTP request: its token, and limits of requests, connections and sizes.

A request without a valid token is refused before its body is read, except for `/health`. Incomplete requests time out.
If there are too many connections, the one idle longest is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ullage.manager.api.door import Door, Guest
from ullage.manager.identity import Caller

LARGEST_BODY = 4 << 20
LONGEST_HEAD, LONGEST_BODY = 15.0, 60.0  # seconds until the headers and until the body of a request must have come
MOST_CONNECTIONS, MOST_REQUESTS = 256, 192  # requests of others than operators, at a time
NO_TOKEN = (
    "the header Authorization must be 'Bearer TOKEN' with a token of this daemon (run/api-token in its home, or one "
    "from `ullage admin token create`), got "
)
HEALTH = "/health"
Whose = Callable[[str], Caller | None]
_GUEST = "ullage.guest"  # the connection of a request


def problem(kind: str, message: str, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": kind, "message": message}, status, headers)


class Gate:
    """Checks the token of a request (`request.state.caller`), and lets each user make `each` requests at a time.
    `health` returns the daemon's health in one word; the thread of the API calls it."""

    def __init__(self, app: ASGIApp, whose: Whose, each: int, health: Callable[[], str] = lambda: "ok") -> None:
        self._app, self._whose, self._each, self._health = app, whose, each, health
        self._inside: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == HEALTH and scope["method"] in ("GET", "HEAD"):
            word = self._health()
            await JSONResponse({"status": word}, 200 if word == "ok" else 503)(scope, receive, send)
            return
        kind, _, token = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1").partition(" ")
        caller = self._whose(token.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            text = NO_TOKEN + ("another" if token else "none")
            await problem("NotAllowed", text, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        if not caller.operator and (self._inside[caller.uid] >= self._each or self._inside.total() >= MOST_REQUESTS):
            text = f"{caller.user} has too many requests that wait for an answer; try again when one of them has ended"
            await problem("NotAllowed", text, 429)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        if _GUEST in scope:
            scope[_GUEST].busy()  # whoever has a token keeps its place until it is answered
        self._inside[caller.uid] += not caller.operator
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside[caller.uid] -= not caller.operator


class BodyLimit:
    """Limits the size of a request, whatever its headers say, and the time until it is complete."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, whole = 0, False
        deadline = asyncio.get_running_loop().time() + LONGEST_BODY

        async def counted() -> Message:
            nonlocal size, whole
            if whole:  # what comes after the body is the end of the connection, and that may take its time
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the whole request must arrive within {LONGEST_BODY:.0f} s") from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > LARGEST_BODY:
                raise HTTPException(413, f"a request must have at most {LARGEST_BODY} bytes, got more")
            return message

        await self._app(scope, counted, send)


class GuardedConnection(H11Protocol):
    """A connection that counts against the limit of its `door`. Made by `guarded`."""

    door: Door
    guest: Guest
    _late: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.guest = Guest(self.client[0] if self.client else "", transport.abort)
        self._wait_for_request()
        if not self.door.enter(self.guest):
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Stop the timer of the headers once they are complete."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before and not self.cycle.response_complete:
            self._late.cancel()
            scope: Any = self.cycle.scope
            scope[_GUEST] = self.guest

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()
        self.guest.idle()

    def connection_lost(self, error: Exception | None) -> None:
        self._late.cancel()
        self.door.leave(self.guest)
        super().connection_lost(error)

    def _wait_for_request(self) -> None:
        if hasattr(self, "_late"):
            self._late.cancel()
        self._late = self.loop.call_later(LONGEST_HEAD, self.transport.abort)


def guarded(most: int = MOST_CONNECTIONS) -> type[GuardedConnection]:
    """Return the connection class of one server."""
    return type("GuardedConnectionOfServer", (GuardedConnection,), {"door": Door(most)})
