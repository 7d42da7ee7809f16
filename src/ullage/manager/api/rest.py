"""The REST API: what the command line can ask, over HTTP with a token. `GET /openapi.json` describes it.

First the error messages that hold for all requests, then the routes. The app knows nothing of the daemon but a function
that does an order (`ullage.manager.core.orders`) for somebody.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Body, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import ullage
from ullage.errors import NoDaemon, NoSuchJob, NotAllowed, StoreFull, UllageError, UnknownName, nearest
from ullage.jobs.estimate_spec import EstimateSpec
from ullage.jobs.validation import first_problem
from ullage.manager.api.encoding import encoded
from ullage.manager.api.gate import BodyLimit, Gate, Whose, problem
from ullage.manager.api.metrics import CONTENT_TYPE, metrics
from ullage.manager.api.shapes import (
    ChangeAnswer,
    DaemonAnswer,
    DrainAnswer,
    DrainRequest,
    EventsAnswer,
    FoldedAnswer,
    FullJobAnswer,
    GPUAnswer,
    JobAnswer,
    LogAnswer,
    MemoryAnswer,
    NewTokenAnswer,
    ProblemAnswer,
    QuestionAnswer,
    QuestionRow,
    ReportAnswer,
    RequeueRequest,
    ResumeRequest,
    SubmissionAnswer,
    SubmissionRequest,
    TokenAnswer,
    TokenRequest,
    TraceAnswer,
    TrialAnswer,
    TrialRequest,
)
from ullage.manager.identity import Caller
from ullage.manager.verbs import VERBS

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
_PATHS = "needed a path and a method of this API (GET /openapi.json lists them); found another"


def say_problems(app: FastAPI, say: Callable[[str], None]) -> None:
    """Let every error become one message of the same form."""

    async def ours(request: Request, error: Any) -> JSONResponse:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
        return problem(type(error).__name__, str(error), status)

    async def unreadable(request: Request, error: Any) -> JSONResponse:
        kind = EstimateSpec if request.url.path.endswith("/estimates") else SubmissionRequest
        return problem("InvalidValue", _said(error, kind), 422)

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
    """The first thing that is wrong with a request."""
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return "needed a body of JSON; found something else"
    return first_problem(found, kind, skip=1)


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
Ask = Callable[[Caller, str, dict[str, Any], float], Awaitable[Any]]
HEARTBEAT = 15.0  # seconds after which a silent stream says that it is alive
_PART = 1000  # events at a time

JobName = Annotated[str, Path(max_length=200, description="a number, 12_3 or 12_all of an array, or a name")]
GPUName = Annotated[str, Path(max_length=200, description="an index or a UUID")]
Limit = Annotated[int | None, Query(ge=1, le=100_000, description="at most so many")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="without the first ones")]
User = Annotated[str | None, Query(max_length=200, description="only this user's")]
Patience = Annotated[float, Query(ge=0, le=60, description="seconds to wait for the answer")]
EventNumber = Annotated[int, Query(ge=0, le=2**62)]


async def authorised(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> Caller:
    """Whose token a request has, as the gate found it; `given` is here for the description."""
    caller: Caller = request.state.caller
    return caller


Asker = Annotated[Caller, Depends(authorised)]


async def known_names(request: Request) -> None:
    """A name in the query that means nothing here is refused: it may be another one, misspelt."""
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
    """The app: `ask` does an order, `whose` says whose token it is, `each` is how many requests one user may make at a
    time, `ending` says whether streams are to end, `health` is what `/health` answers, which needs no token."""
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
    _job_routes(router, ask)
    _other_routes(router, ask, ending)
    app.include_router(router)
    return app


def _served(router: APIRouter, verb: str, answer: Any, tag: str, status: int = 200) -> Callable[[_Endpoint], _Endpoint]:
    """The route of a verb."""
    kind = VERBS[verb]
    return router.api_route(kind.path, methods=[kind.method], status_code=status, response_model=answer, tags=[tag])


def _job_routes(router: APIRouter, ask: Ask) -> None:
    @_served(router, "submit", SubmissionAnswer, "jobs", 201)
    async def submit(caller: Asker, submission: SubmissionRequest) -> Response:
        """Submit a job. It is on disk when the answer comes."""
        job = submission.job.said()
        key = submission.key or secrets.token_hex(16)
        return JSONResponse(await ask(caller, "submit", {"job": job, "key": key}, 0.0), 201)

    @_served(router, "queue", list[JobAnswer], "jobs")
    async def queue(caller: Asker, user: User = None, limit: Limit = None, offset: Offset = 0) -> Response:
        """Jobs that are not over, or a page of them."""
        return await _long(ask(caller, "queue", {"user": user, "limit": limit, "offset": offset}, 0.0))

    @_served(router, "folded_queue", FoldedAnswer, "jobs")
    async def folded_queue(
        caller: Asker,
        user: User = None,
        limit: Limit = None,
        offset: Offset = 0,
        live: Annotated[bool, Query(description="only jobs that have a place on GPUs now")] = False,
    ) -> Response:
        """The same in few rows: jobs of an array that wait in the same state are one."""
        asked = {"user": user, "limit": limit, "offset": offset, "live": live}
        return await _long(ask(caller, "folded_queue", asked, 0.0))

    @_served(router, "status", list[FullJobAnswer], "jobs")
    async def status(caller: Asker, job: JobName) -> Response:
        """All about a job, or the jobs of an array."""
        return await _long(ask(caller, "status", {"job": job}, 0.0))

    @_served(router, "memory", MemoryAnswer, "jobs")
    async def memory(caller: Asker, job: JobName) -> Response:
        """The memory of a job over time, attempt by attempt."""
        return await _long(ask(caller, "memory", {"job": job}, 0.0))

    @_served(router, "logs", LogAnswer, "jobs")
    async def logs(
        caller: Asker,
        job: JobName,
        attempt: Annotated[int | None, Query(ge=1, le=2**31, description="the newest by default")] = None,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: Annotated[int, Query(ge=0, le=2**60)] = 0,
        tail: Annotated[int | None, Query(ge=0, le=2**60, description="only about so many of the last bytes")] = None,
    ) -> Response:
        """A piece of a job's output."""
        asked = {"job": job, "attempt": attempt, "stream": stream, "offset": offset, "tail": tail}
        return JSONResponse(await ask(caller, "logs", asked, 0.0))

    def changes(verb: str, text: str) -> None:
        async def change(caller: Asker, job: JobName) -> Response:
            return await _long(ask(caller, verb, {"jobs": [job]}, 0.0))

        change.__doc__, change.__name__ = text, verb
        _served(router, verb, list[ChangeAnswer], "jobs")(change)

    @_served(router, "edit", list[ChangeAnswer], "jobs")
    async def edit(caller: Asker, job: JobName, values: Annotated[dict[str, Any], Body()]) -> Response:
        """Change a job that waits. The keys are those of a job file; null takes a value back."""
        return JSONResponse(await ask(caller, "edit", {"jobs": [job], "changes": values}, 0.0))

    @_served(router, "requeue", list[ChangeAnswer], "jobs")
    async def requeue(caller: Asker, job: JobName, how: RequeueRequest | None = None) -> Response:
        """Put a job that runs or is over into the queue again."""
        terms = how or RequeueRequest()
        return JSONResponse(await ask(caller, "requeue", {"jobs": [job], **terms.model_dump()}, 0.0))

    @_served(router, "dry_run", TrialAnswer, "jobs")
    async def dry_run(caller: Asker, trial: TrialRequest) -> Response:
        """What would become of a job if it were submitted now. Nothing is stored."""
        return JSONResponse(await ask(caller, "dry_run", {"job": trial.job.said(), "estimate": trial.estimate}, 0.0))

    @_served(router, "estimate", QuestionAnswer, "estimates", 201)
    async def estimate(caller: Asker, question: EstimateSpec, wait: Patience = 0.0) -> Response:
        """Ask for an estimate without a job. It is kept; without `wait`, ask for the answer by its id."""
        found = await ask(caller, "estimate", {"question": question.said()}, 0.0)
        return await _long(ask(caller, "estimated", {"estimate": found["id"]}, wait), 201)

    @_served(router, "estimates", list[QuestionRow], "estimates")
    async def estimates(caller: Asker, limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        """The estimates that you asked for, the newest first, without the answers."""
        return await _long(ask(caller, "estimates", {"limit": limit}, 0.0))

    @_served(router, "estimated", QuestionAnswer, "estimates")
    async def estimated(
        caller: Asker, estimate: Annotated[str, Path(max_length=200)], wait: Patience = 0.0
    ) -> Response:
        """An estimate that was asked for, with the answer once there is one."""
        return await _long(ask(caller, "estimated", {"estimate": estimate}, wait))

    @_served(router, "cancel_estimate", None, "estimates")
    async def cancel_estimate(caller: Asker, estimate: Annotated[str, Path(max_length=200)]) -> Response:
        """Give up an estimate that you asked for and that is not there yet."""
        return JSONResponse(await ask(caller, "cancel_estimate", {"estimate": estimate}, 0.0))

    changes("cancel", "Take a job out of the queue, or stop it if it runs.")
    changes("hold", "Keep a waiting job from starting.")
    changes("release", "Let a held job go on.")

    @_served(router, "history", list[JobAnswer], "jobs")
    async def history(
        caller: Asker, limit: Annotated[int, Query(ge=1, le=100_000)] = 50, user: User = None
    ) -> Response:
        """Jobs that are over, the last one first."""
        return await _long(ask(caller, "history", {"limit": limit, "user": user}, 0.0))


def _other_routes(router: APIRouter, ask: Ask, ending: Callable[[], bool]) -> None:
    @_served(router, "ping", DaemonAnswer, "daemon")
    async def ping(caller: Asker) -> Response:
        """What the daemon is, and who you are to it."""
        return JSONResponse(await ask(caller, "ping", {}, 0.0))

    @_served(router, "gpus", list[GPUAnswer], "gpus")
    async def gpus(caller: Asker) -> Response:
        """The GPUs now."""
        return JSONResponse(await ask(caller, "gpus", {}, 0.0))

    @_served(router, "drain", DrainAnswer, "gpus")
    async def drain(caller: Asker, gpu: GPUName, how: DrainRequest | None = None) -> Response:
        """No new jobs for a GPU but those of some; those that are there go on. For operators."""
        terms = how or DrainRequest()
        return JSONResponse(await ask(caller, "drain", {"gpu": gpu, **terms.model_dump()}, 0.0))

    @_served(router, "resume", DrainAnswer, "gpus")
    async def resume(caller: Asker, gpu: GPUName, how: ResumeRequest | None = None) -> Response:
        """New jobs for a GPU again. For operators."""
        terms = how or ResumeRequest()
        return JSONResponse(await ask(caller, "resume", {"gpu": gpu, **terms.model_dump()}, 0.0))

    @_served(router, "events", EventsAnswer, "events")
    async def events(
        caller: Asker,
        since: EventNumber = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        wait: Annotated[float, Query(ge=0, le=60, description="seconds to wait for one")] = 0.0,
    ) -> Response:
        """What happened after event number `since`."""
        return JSONResponse(await ask(caller, "events", {"since": since, "limit": limit}, wait))

    @router.get(
        "/v1/events/stream",
        tags=["events"],
        responses={200: {"content": {"text/event-stream": {}}}},
        response_class=StreamingResponse,
    )
    async def stream(request: Request, caller: Asker, since: EventNumber = 0) -> Response:
        """Events as they happen (server-sent events); after a break the header Last-Event-ID goes on from there."""
        last = request.headers.get("last-event-id", "")
        begin = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else since
        return StreamingResponse(
            _events(ask, caller, begin, ending), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @_served(router, "report", ReportAnswer, "daemon")
    async def report(
        caller: Asker,
        by: Annotated[str, Query(max_length=40, description="what rows are for: user, day, name, gpu")] = "user,day",
        since: Annotated[float | None, Query(ge=0, description="seconds since 1970; seven days ago by default")] = None,
        until: Annotated[float | None, Query(ge=0, description="seconds since 1970; now by default")] = None,
        user: User = None,
    ) -> Response:
        """What jobs took: GPU hours, memory, energy, waiting and failures."""
        asked = {"by": by.split(","), "since": since, "until": until, "user": user}
        return JSONResponse(await ask(caller, "report", asked, 0.0))

    @_served(router, "trace", TraceAnswer, "daemon")
    async def trace(
        caller: Asker,
        since: Annotated[float | None, Query(ge=0, description="seconds since 1970; seven days ago by default")] = None,
        until: Annotated[float | None, Query(ge=0, description="seconds since 1970; now by default")] = None,
        user: User = None,
        there: Annotated[bool, Query(description="also jobs that came before and were not over then")] = False,
    ) -> Response:
        """The jobs that were submitted, with all that a simulation needs to run them again."""
        return await _long(ask(caller, "trace", {"since": since, "until": until, "user": user, "there": there}, 0.0))

    @_served(router, "tokens", list[TokenAnswer], "tokens")
    async def tokens(caller: Asker, everybody: bool = False) -> Response:
        """Your tokens, or those of all users."""
        return JSONResponse(await ask(caller, "tokens", {"everybody": everybody}, 0.0))

    @_served(router, "token_create", NewTokenAnswer, "tokens", 201)
    async def make_token(caller: Asker, wanted: TokenRequest) -> Response:
        """Make a token."""
        return JSONResponse(await ask(caller, "token_create", wanted.model_dump(), 0.0), 201)

    @_served(router, "token_revoke", TokenAnswer, "tokens")
    async def revoke_token(caller: Asker, token: Annotated[int, Path(ge=1, le=2**62)]) -> Response:
        """Make a token worth nothing."""
        return JSONResponse(await ask(caller, "token_revoke", {"token": token}, 0.0))

    @router.get("/metrics", tags=["daemon"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def figures(caller: Asker) -> Response:
        """Figures for Prometheus."""
        return Response(metrics(await ask(caller, "figures", {}, 0.0)), media_type=CONTENT_TYPE)


async def _long(answer: Awaitable[Any], status: int = 200) -> Response:
    """An answer that may have thousands of rows."""
    return Response(await encoded(await answer), status, media_type="application/json")


async def _events(ask: Ask, caller: Caller, since: int, ending: Callable[[], bool]) -> AsyncIterator[str]:
    while not ending():
        found = await ask(caller, "events", {"since": since, "limit": _PART}, HEARTBEAT)
        since = max(since, found["last"]) if found["events"] else since
        for event in found["events"]:
            yield f"id: {event['id']}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n"
        if not found["events"]:
            yield ": still here\n\n"
