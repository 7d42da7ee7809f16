"""The REST API: the orders of `VERBS` over HTTP, with a token. `GET /openapi.json` describes it.

Routes are made from `VERBS` and the signatures of `Orders`. The app knows the daemon only as a function that does
orders.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Body, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, create_model
from starlette.exceptions import HTTPException

import ullage
from ullage.errors import NoDaemon, NoSuchJob, NotAllowed, StoreFull, UllageError, UnknownName, nearest
from ullage.jobs.estimate_spec import EstimateSpec
from ullage.jobs.job_files import JobSpec
from ullage.jobs.validation import first_problem
from ullage.manager.api.encoding import encoded
from ullage.manager.api.gate import BodyLimit, Gate, Whose, problem
from ullage.manager.api.metrics import CONTENT_TYPE, metrics
from ullage.manager.api.shapes import ANSWERS, ProblemAnswer
from ullage.manager.core.orders import JobReference, Orders, parameters_of
from ullage.manager.identity import Caller
from ullage.manager.verbs import VERBS, Verb

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemAnswer, "description": "what was asked for cannot be done"},
    401: {"model": ProblemAnswer, "description": "no token, or none of this daemon"},
    403: {"model": ProblemAnswer, "description": "somebody else's job, or an order for operators"},
    404: {"model": ProblemAnswer, "description": "no such job"},
    408: {"model": ProblemAnswer, "description": "the request did not come in time"},
    413: {"model": ProblemAnswer, "description": "more than the API reads"},
    422: {"model": ProblemAnswer, "description": "the request cannot be read"},
    429: {"model": ProblemAnswer, "description": "too many requests of one user at a time"},
    503: {"model": ProblemAnswer, "description": "the daemon is ending"},
    507: {"model": ProblemAnswer, "description": "the disk is full: nothing was changed"},
}


_STATUS: tuple[tuple[type[UllageError], int], ...] = (
    (NoSuchJob, 404),
    (UnknownName, 404),
    (NotAllowed, 403),
    (StoreFull, 507),
    (NoDaemon, 503),
)
_PATHS = "this API has no such path and method (GET /openapi.json lists them)"


def say_problems(app: FastAPI, say: Callable[[str], None]) -> None:
    """Turn every error into one message of the same form."""

    async def ours(request: Request, error: Any) -> JSONResponse:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
        return problem(type(error).__name__, str(error), status)

    async def unreadable(request: Request, error: Any) -> JSONResponse:
        body = getattr(request.scope["endpoint"], "takes", {}).get("content", (BaseModel, None))[0]
        kinds = [each for each in (body, *get_args(body)) if isinstance(each, type) and issubclass(each, BaseModel)]
        return problem("InvalidValue", _said(error, kinds[0] if kinds else BaseModel), 422)

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


def _said(error: RequestValidationError, kind: type[BaseModel]) -> str:
    """Return the first problem of a request."""
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return "the body must be JSON, got something else"
    return first_problem(found, kind, skip=1)


Ask = Callable[[Caller, str, dict[str, Any], float], Awaitable[Any]]
HEARTBEAT = 15.0  # seconds after which a silent stream says that it is alive
_PART = 1000  # events at a time
_MODELS = {"job": JobSpec, "question": EstimateSpec}  # of arguments, for the description and for better messages
_CREATED = ("submit", "estimate", "token_create")


async def authorised(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> Caller:
    """Return the caller that the gate found; `given` is for the description in /openapi.json."""
    caller: Caller = request.state.caller
    return caller


Asker = Annotated[Caller, Depends(authorised)]


async def known_names(request: Request) -> None:
    """Refuse unknown names in the query: they may be misspelt."""
    names = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in names:
            near = nearest(name[:80], names)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"
            raise HTTPException(422, f"there is no {name[:80]!r} in this query; {advice}")


def make_app(
    ask: Ask,
    whose: Whose,
    each: int = 64,
    ending: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
    health: Callable[[], str] = lambda: "ok",
) -> FastAPI:
    """Make the app. `ask` does an order, `whose` returns a token's caller, `each` limits the requests of a user,
    `ending` stops streams, `health` answers `/health`."""
    app = FastAPI(
        title="Ullage",
        version=ullage.__version__,
        description="Many jobs on shared GPUs. Every request needs the header `Authorization: Bearer TOKEN`.",
        docs_url=None,  # these two load their scripts from elsewhere
        redoc_url=None,
    )
    say_problems(app, say)
    app.add_middleware(BodyLimit)
    app.add_middleware(Gate, whose=whose, each=each, health=health)
    router = APIRouter(responses=PROBLEMS, dependencies=[Depends(authorised), Depends(known_names)])
    for verb, kind in VERBS.items():
        if kind.path:
            _serve(router, ask, verb, kind)
    _other_routes(router, ask, ending)
    app.include_router(router)
    return app


def _serve(router: APIRouter, ask: Ask, verb: str, kind: Verb) -> None:
    """Make the route of a verb: its method's arguments come from the path, the query and the body."""
    status = 201 if verb in _CREATED else 200
    takes = _taken(verb, kind)

    async def endpoint(**given: Any) -> Response:
        caller, wait, content = given.pop("caller"), given.pop("wait", 0.0), given.pop("content", None)
        plain = content.model_dump(mode="json", exclude_unset=True) if isinstance(content, BaseModel) else content or {}
        given |= {kind.body: plain} if kind.body else plain
        if "jobs" in parameters_of(verb):
            given["jobs"] = [given.pop("job")]
        if "by" in given:
            given["by"] = given["by"].split(",")
        found = await ask(caller, verb, given, wait)
        if verb == "estimate":
            found = await ask(caller, "estimated", {"estimate": found["id"]}, wait)
        return Response(await encoded(found), status, media_type="application/json")

    endpoint.__name__, endpoint.__doc__ = verb, getattr(Orders, verb).__doc__
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, annotation=hint, default=value) for name, (hint, value) in takes.items()
    ]
    vars(endpoint).update(__signature__=inspect.Signature(parameters), takes=takes)
    router.add_api_route(
        kind.path,
        endpoint,
        methods=[kind.method],
        status_code=status,
        response_model=ANSWERS.get(verb),
        tags=[kind.path.split("/")[2]],
    )


def _taken(verb: str, kind: Verb) -> dict[str, tuple[Any, Any]]:
    """Return the parameters of a route, by name: type and default."""
    none = inspect.Parameter.empty
    found: dict[str, tuple[Any, Any]] = {"caller": (Asker, none)}
    fields: dict[str, Any] = {}
    for name, (hint, default) in parameters_of(verb).items():
        if name == "jobs":
            found["job"] = (Annotated[JobReference, Path()], none)
        elif f"{{{name}}}" in kind.path:
            found[name] = (Annotated[hint, Path()], none)
        elif name == "by":
            found[name] = (Annotated[str, Query(description="user, day, name, gpu: what rows are for")], "user,day")
        elif name in kind.query:
            found[name] = (Annotated[hint, Query()], default)
        else:
            fields[name] = (_MODELS.get(name, hint), default)
    if "wait" in kind.query:
        found["wait"] = (Annotated[float, Query(ge=0, le=60, description="seconds to wait for it")], 0.0)
    if kind.body:
        found["content"] = (Annotated[fields[kind.body][0], Body()], none)
    elif fields:
        model = create_model(f"{verb}_request", __config__=ConfigDict(extra="forbid"), **fields)
        optional = all(default is not ... for _, default in fields.values())
        found["content"] = (Annotated[model | None, Body()], None) if optional else (Annotated[model, Body()], none)
    return found


def _other_routes(router: APIRouter, ask: Ask, ending: Callable[[], bool]) -> None:
    @router.get(
        "/v1/events/stream",
        tags=["events"],
        responses={200: {"content": {"text/event-stream": {}}}},
        response_class=StreamingResponse,
    )
    async def stream(
        request: Request, caller: Asker, since: Annotated[int, Query(ge=0, le=2**62)] = 0
    ) -> StreamingResponse:
        """Events as they happen (server-sent events); after a break the header Last-Event-ID goes on from there."""
        last = request.headers.get("last-event-id", "")
        begin = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else since
        return StreamingResponse(
            _events(ask, caller, begin, ending), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @router.get("/metrics", tags=["daemon"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def figures(caller: Asker) -> Response:
        """Figures for Prometheus."""
        return Response(metrics(await ask(caller, "figures", {}, 0.0)), media_type=CONTENT_TYPE)


async def _events(ask: Ask, caller: Caller, since: int, ending: Callable[[], bool]) -> AsyncIterator[str]:
    while not ending():
        found = await ask(caller, "events", {"since": since, "limit": _PART}, HEARTBEAT)
        since = max(since, found["last"]) if found["events"] else since
        for event in found["events"]:
            yield f"id: {event['id']}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n"
        if not found["events"]:
            yield ": still here\n\n"
