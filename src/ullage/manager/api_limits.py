"""Around the API: nothing too long is read, and whatever goes wrong becomes one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ullage.errors import NoDaemon, NoSuchJob, NotAllowed, StoreFull, UllageError, UnknownName, nearest
from ullage.manager.submission import Spec

LARGEST_BODY = 4 << 20
_STATUS: tuple[tuple[type[UllageError], int], ...] = (
    (NoSuchJob, 404), (UnknownName, 404), (NotAllowed, 403), (StoreFull, 507), (NoDaemon, 503),
)  # fmt: skip
_PATHS = "needed a path and a method of this API (GET /openapi.json lists them); found another"


class BodyLimit:
    """Reads at most `LARGEST_BODY` bytes of a request, whatever its headers say."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST_BODY:
                raise HTTPException(413, f"needed a request of at most {LARGEST_BODY} bytes; found a longer one")
            return message

        await self._app(scope, counted, send)


def problem(kind: str, message: str, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that says what is wrong."""
    return JSONResponse({"error": kind, "message": message}, status, headers)


def say_problems(app: FastAPI, say: Callable[[str], None]) -> None:
    """Let every error become one message of the same form."""

    async def ours(request: Request, error: Any) -> JSONResponse:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
        return problem(type(error).__name__, str(error), status)

    async def unreadable(request: Request, error: Any) -> JSONResponse:
        return problem("InvalidValue", _said(error), 422)

    async def of_http(request: Request, error: Any) -> JSONResponse:
        text = _PATHS if error.status_code in (404, 405) else str(error.detail)
        kind = "NotAllowed" if error.status_code == 401 else "InvalidValue"
        return problem(kind, text, error.status_code, dict(error.headers or {}))

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        say(f"the API failed at {request.method} {request.url.path[:80]!r}: {type(error).__name__}: {str(error)[:200]}")
        return problem(type(error).__name__, "the daemon failed at this request; its log says more", 500)

    app.add_exception_handler(UllageError, ours)
    app.add_exception_handler(RequestValidationError, unreadable)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unexpected)


def _said(error: RequestValidationError) -> str:
    """The first thing that is wrong with a request."""
    found = error.errors()
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    place = ".".join(str(part)[:80] for part in first["loc"][1:]) or str(first["loc"][0])
    if first["type"] == "json_invalid":
        return "needed a body of JSON; found something else"
    if first["type"] == "extra_forbidden":
        near = nearest(str(first["loc"][-1])[:80], Spec.model_fields)
        return f"there is no {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    text = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] in ("value_error", "missing"):
        return f"{place}: {text[:1].lower()}{text[1:]}"
    given = json.dumps(first.get("input"), default=str)
    return f"{place}: {text[:1].lower()}{text[1:]}; found {given if len(given) <= 80 else given[:77] + '...'}"
