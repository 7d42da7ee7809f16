"""The HTTP application: the verbs of `VERBS` for callers that the gate has let in. `GET /openapi.json` describes it.

Requests come from the Unix socket and from TCP. The app reaches the daemon through one function.
"""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ullage.errors import DiskFull, JobNotFound, NoDaemon, NotAllowed, UllageError, UnknownName, nearest
from ullage.jobs.validation import first_problem
from ullage.manager.api.gate import problem
from ullage.manager.api.routes import STREAM, Route, description, routes
from ullage.manager.identity import Caller
from ullage.manager.transport import LARGEST_REQUEST

LONGEST_BODY, LONGEST_SENDING = 60.0, 60.0  # seconds to receive the body of a request, and to send an answer
HEARTBEAT = 15.0  # seconds of silence after which a stream sends a sign of life
_EVENTS = 1000  # events sent at a time in a stream
_PIECE = 1 << 16  # bytes of an answer sent at a time
_MANY = 100  # rows
_STATUS: tuple[tuple[type[UllageError], int], ...] = (
    (JobNotFound, 404),
    (UnknownName, 404),
    (NotAllowed, 403),
    (DiskFull, 507),
    (NoDaemon, 503),
)
_PATHS = "this API has no such path and method (GET /openapi.json lists them)"
OPENAPI = "/openapi.json"
Order = Callable[[Caller, str, dict[str, Any], float], Awaitable[Any]]


class App:
    """`order` carries out an order; `ending` stops streams."""

    def __init__(self, order: Order, ending: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._order, self._ending, self._say = order, ending, say
        self._routes: dict[int, list[tuple[list[str], Route]]] = {}  # by the number of parts of their paths
        for route in routes():
            parts = route.kind.path.split("/")
            self._routes.setdefault(len(parts), []).append((parts, route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except UllageError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
            answer = problem(type(error).__name__, str(error), status)
        except HTTPException as error:
            answer = problem("InvalidValue", error.detail, error.status_code)
        except ClientDisconnect:
            return
        except Exception as error:  # even after a bug of ours, the client gets an answer
            where = f"{scope['method']} {scope['path'][:80]!r}"
            self._say(f"the API failed at {where}: {type(error).__name__}: {str(error)[:200]}")
            answer = problem(type(error).__name__, "the daemon failed to handle this request; see its log", 500)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        content = await _body(receive)
        caller: Caller = scope["state"]["caller"]
        if scope["method"] == "GET" and scope["path"] == OPENAPI:
            return Answer(await asyncio.to_thread(_description))
        route, in_path = self._find(scope)
        arguments = _arguments(route, in_path, scope["query_string"], content)
        if route.kind.path == STREAM:
            last = dict(scope["headers"]).get(b"last-event-id", b"")
            since = int(last) if last.isdigit() and len(last) < 19 else arguments["since"]
            return StreamingResponse(
                self._stream(caller, since), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        verb, wait = route.verb, arguments.pop("wait", 0.0)
        if verb == "estimate":
            question = await self._order(caller, verb, arguments, 0.0)
            verb, arguments = "estimated", {"estimate": question["id"]}
        answer = await _unless_gone(self._order(caller, verb, arguments, wait), wait, receive)
        if verb == "figures":
            from ullage.manager.api.metrics import CONTENT_TYPE, metrics

            return Response(metrics(answer), media_type=CONTENT_TYPE)
        return Answer(await encoded(answer), route.kind.status)

    def _find(self, scope: Scope) -> tuple[Route, dict[str, str]]:
        parts = scope["raw_path"].decode("ascii").split("/")
        local, status = scope["state"]["guest"].caller is not None, 404
        for names, route in self._routes.get(len(parts), []):
            pairs = list(zip(names, parts, strict=True))
            if (route.kind.local and not local) or any(name != part and name[:1] != "{" for name, part in pairs):
                continue
            if route.kind.method == scope["method"]:
                return route, {name[1:-1]: unquote(part) for name, part in pairs if name[:1] == "{"}
            status = 405
        raise HTTPException(status, _PATHS)

    async def _stream(self, caller: Caller, since: int) -> AsyncIterator[str]:
        while not self._ending():
            page = await self._order(caller, "events", {"since": since, "limit": _EVENTS}, HEARTBEAT)
            since = max(since, page["last"]) if page["events"] else since
            for event in page["events"]:
                yield f"id: {event['id']}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n"
            if not page["events"]:
                yield ": still here\n\n"


async def _body(receive: Receive) -> bytes:
    """Read the body of a request, at most as many bytes as allowed, whatever its headers say."""
    pieces, size, more = [], 0, True
    try:
        async with asyncio.timeout(LONGEST_BODY):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                size, more = size + len(pieces[-1]), message.get("more_body", False)
                if size > LARGEST_REQUEST:
                    raise HTTPException(413, f"a request must have at most {LARGEST_REQUEST} bytes, got more")
    except TimeoutError:
        raise HTTPException(408, f"the whole request must arrive within {LONGEST_BODY:.0f} s") from None
    return b"".join(pieces)


def _arguments(route: Route, in_path: dict[str, str], query: bytes, content: bytes) -> dict[str, Any]:
    in_query: dict[str, Any] = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    for name in in_query:
        if name not in route.in_query:
            near = nearest(name[:80], route.in_query)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(route.in_query) or 'none'}"
            raise HTTPException(422, f"there is no {name[:80]!r} in this query; {advice}")
    if "by" in in_query:
        in_query["by"] = in_query["by"].split(",")
    try:
        given = json.loads(content) if content else {}
    except RecursionError:
        raise HTTPException(400, "the body must have fewer levels") from None
    except ValueError:
        raise HTTPException(422, "the body must be JSON, got something else") from None
    if not content and any(default is ... for _, default in route.in_body.values()):
        raise HTTPException(422, "the body is missing")
    if route.kind.body:
        given = {route.kind.body: given}
    elif not isinstance(given, dict):
        raise HTTPException(422, f"the body must be an object, got {type(given).__name__}")
    for name in given:
        if name in in_path:
            raise HTTPException(422, f"the body must not have {name!r}, which is in the path")
    try:
        checked = route.checks.model_validate({**given, **in_query, **in_path})
    except ValidationError as error:
        raise HTTPException(422, first_problem(error.errors(include_url=False), route.checks)) from None
    arguments = {name: getattr(checked, name) for name in route.checks.model_fields}
    if route.names_one:
        arguments["jobs"] = [arguments.pop("job")]
    return arguments


async def _unless_gone(order: Awaitable[Any], wait: float, receive: Receive) -> Any:
    """Return the answer to an order; stop waiting for news if the caller disconnects."""
    if not wait:
        return await order
    answering, leaving = asyncio.ensure_future(order), asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer(Response):
    """A JSON answer, sent in pieces; a client that reads too slowly is disconnected."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(LONGEST_SENDING):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for first in range(0, len(self.body), _PIECE):
                    piece, more = self.body[first : first + _PIECE], first + _PIECE < len(self.body)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            scope["state"]["guest"].close()


@functools.cache
def _description() -> bytes:
    return json.dumps(description(routes())).encode()


async def encoded(answer: Any) -> bytes:
    """Return an answer as JSON. A long one is encoded in another thread, so that it delays no other request."""
    return (await asyncio.to_thread(_text, answer) if _is_long(answer) else _text(answer)).encode()


def _text(answer: Any) -> str:
    """Encode a long answer row by row: `json.dumps` blocks all other threads until it is done."""
    if not _is_long(answer):
        return json.dumps(answer, allow_nan=False, default=str)
    if isinstance(answer, dict):
        return "{" + ", ".join([f"{json.dumps(name)}: {_text(value)}" for name, value in answer.items()]) + "}"
    return "[" + ", ".join([_text(row) for row in answer]) + "]"


def _is_long(answer: Any) -> bool:
    if isinstance(answer, dict):
        return any(_is_long(value) for value in answer.values() if isinstance(value, dict | list))
    return isinstance(answer, list) and len(answer) > _MANY and isinstance(answer[0], dict)
