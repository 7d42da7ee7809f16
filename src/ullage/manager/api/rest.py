"""The REST API: what the command line can ask, over HTTP with a token. `GET /openapi.json` describes it.

First the answers as the description shows them: unknown is null, and an answer may have more keys. Then the
error messages that hold for all requests, and the routes. The app knows nothing of the daemon but a function that does
an order (`ullage.manager.core.orders`) for somebody.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

import ullage
from ullage.errors import NoDaemon, NoSuchJob, NotAllowed, StoreFull, UllageError, UnknownName, nearest
from ullage.manager.api.encoding import encoded
from ullage.manager.api.gate import BodyLimit, Gate, Whose, problem
from ullage.manager.api.grafana import dashboard
from ullage.manager.api.metrics import CONTENT_TYPE, metrics
from ullage.manager.identity import Caller
from ullage.manager.storage.records import State
from ullage.workloads.job_files import JobSpec
from ullage.workloads.questions import EstimateSpec
from ullage.workloads.validation import first_problem


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class ProblemAnswer(_Answer):
    """Something that could not be done, in one message."""

    error: str = Field(description="the kind, such as NoSuchJob")
    message: str


class SubmissionRequest(BaseModel):
    """A job, and a key that is used once: the same key again gives the same jobs and makes no new ones."""

    model_config = ConfigDict(extra="forbid")

    job: JobSpec
    key: str | None = Field(None, min_length=8, max_length=200)


class TrialRequest(BaseModel):
    """A job to try out."""

    model_config = ConfigDict(extra="forbid")

    job: JobSpec
    estimate: str | None = Field(None, max_length=200, description="the id of an estimate of its command")


class RequeueRequest(BaseModel):
    """How a job goes into the queue again: held or not, with which variables if its own are not kept any more, and with
    how much memory."""

    model_config = ConfigDict(extra="forbid")

    hold: bool = False
    env: dict[str, str] | None = None
    memory: Annotated[
        int | None, Field(gt=0, le=2**50, description="bytes on each GPU from now on; for jobs that are over")
    ] = None


class DrainReason(BaseModel):
    """Why a GPU is drained."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=200)


class SubmissionAnswer(_Answer):
    """What became of a submission: on disk by now."""

    jobs: list[int]
    array: int | None
    state: State
    estimate: str | None = Field(description="where the promise comes from; null while it is being estimated")
    promise: int | None = Field(description="bytes on each GPU; null if unknown")


class TrialAnswer(_Answer):
    """What would become of a submission now; nothing was stored."""

    jobs: int = Field(description="how many it would be")
    state: State
    starts: list[dict[str, Any]] = Field(
        description="those that would start: index, gpus, promise, promises, alone, and speed, a share of its speed "
        "alone or null"
    )
    reason: str | None = Field(description="why the first of the others would wait")
    ahead: list[int] = Field(description="the jobs before it in the queue that wait too")
    behind: list[int] = Field(description="the jobs behind it in the queue, if it would wait")
    beside: list[dict[str, Any]] = Field(
        description="the jobs beside which it would run: job, gpu, speed now and then, as shares of its speed alone"
    )
    held_up: list[dict[str, Any]] = Field(
        description="the jobs that would wait longer: job; until is the running one after which it would have started, "
        "null if that were now"
    )
    estimate: str | None = Field(description="where the promise comes from; null if it would be estimated first")
    promise: int | None = Field(description="bytes on each GPU; null if unknown")


class UtilizationAnswer(_Answer):
    """What a job is expected to do with a GPU to itself: seconds a step, shares of the time from 0 to 1, watts."""

    gpu: str
    step_s: float
    smact: float
    smocc: float
    drama: float
    power_w: float
    windows: int = Field(description="how often it was measured, on this GPU; 0: predicted only")


class JobAnswer(_Answer):
    """A job. Memory in bytes, times in seconds since 1970, spans in seconds."""

    id: int
    name: str
    user: str
    state: State
    priority: int
    gpus: int
    cores: int = Field(description="processor cores that it is promised, or asks for; 0: not counted")
    host_promise: int = Field(description="bytes of host memory that it is promised, or asks for; 0: not counted")
    promise: int | None = Field(description="bytes on each GPU, promised now or at the start; null if unknown")
    promises: list[int] = Field(
        description="bytes on each GPU in the order of the ranks, where these differ, and `promise` is the largest; "
        "empty where they are the same"
    )
    used: int | None = Field(description="bytes that it uses now, the most on one GPU")
    submitted: float
    started: float | None
    ended: float | None
    waited: float | None
    ran: float | None
    completion: float | None
    cause: str | None
    exit_code: int | None
    utilization: UtilizationAnswer | None = Field(description="null if unknown")
    speed: float | None = Field(
        description="the share of its speed alone that is expected where it runs; null if unknown"
    )
    min_speed: float = Field(description="the share of its speed alone that it is to keep beside others")
    over_promise: bool = Field(description="whether it uses more now than it was promised")
    reason: str | None = Field(description="why it waits")


class RowAnswer(JobAnswer):
    """A row of the queue: a job, or the first of several that wait in the same way."""

    jobs: int = Field(description="how many jobs it stands for")
    indices: str | None = Field(description="their indices, such as 5-10000; null for one job")


class FoldedAnswer(_Answer):
    """The queue in few rows."""

    rows: list[RowAnswer]
    all_rows: int
    jobs: int
    states: dict[str, int] = Field(description="how many jobs are in each state")


class AttemptAnswer(_Answer):
    """One time that a job was placed."""

    number: int
    state: str
    slots: list[str]
    promise: int | None
    promises: list[int] = Field(description="bytes on each of the slots where its ranks differ; else empty")
    cause: str | None
    exit_code: int | None
    used: int | None = Field(description="the most bytes that it used on one GPU")


class FullJobAnswer(JobAnswer):
    """A job with its attempts; with its command, folder and the names of its variables for those whose job it is."""

    attempts: list[AttemptAnswer]
    more_memory: int | None = Field(description="bytes to ask for if it is over and is to run again with more")


class CurveAnswer(_Answer):
    """The memory of an attempt over time: every `step` seconds from `begin` on."""

    number: int
    begin: float
    promise: int | None
    step: float
    values: list[int | None] = Field(description="the most bytes that it held on one GPU; null where nobody looked")


class MemoryAnswer(_Answer):
    """The memory of a job over time."""

    job: int
    attempts: list[CurveAnswer]


class LogAnswer(_Answer):
    """A piece of an attempt's output; ask again with `offset` until `over`."""

    job: int
    attempt: int | None
    offset: int
    text: str
    over: bool
    file: str | None


class ChangeAnswer(_Answer):
    """What was done to one of the jobs that were named."""

    job: int
    done: bool
    text: str


class ActivityAnswer(_Answer):
    """Means over the window, 0 to 1."""

    gract: float | None
    smact: float | None
    smocc: float | None
    drama: float | None
    age: float | None


class GPUAnswer(_Answer):
    """A GPU as it is now; `free` is what can still be promised."""

    id: str
    index: int
    name: str
    total: int
    used: int | None
    promised: int = Field(description="the sum of the promises of its jobs")
    free: int
    jobs: list[int]
    activity: ActivityAnswer
    power_w: float | None = Field(description="watts now; null if unknown")
    drained: bool
    lost: bool


class DrainAnswer(_Answer):
    """Whether a GPU gets new jobs."""

    gpu: str
    index: int
    drained: bool


class EventAnswer(_Answer):
    """Something that happened."""

    id: int
    time: float
    kind: str
    job: int | None
    attempt: int | None
    text: str


class EventsAnswer(_Answer):
    """Events, oldest first; `last` is the number to ask with next."""

    events: list[EventAnswer]
    last: int


class ReservationRequest(BaseModel):
    """GPUs to reserve for users and groups, for so many seconds from `begin` (now) on."""

    model_config = ConfigDict(extra="forbid")

    gpus: list[str] = Field(min_length=1, max_length=1024, description="by index or UUID")
    seconds: float = Field(gt=0, le=366 * 86400)
    begin: float | None = Field(None, ge=0, le=1e11, description="seconds since 1970")
    users: list[Annotated[str, Field(max_length=200)]] = Field([], max_length=1000)
    groups: list[Annotated[str, Field(max_length=200)]] = Field([], max_length=1000)
    name: str = Field("", max_length=80)


class ReservationAnswer(_Answer):
    """GPUs that are for some users and groups alone, from `begin` to `end`."""

    id: int
    name: str
    gpus: list[str]
    users: list[str]
    groups: list[str]
    begin: float
    end: float
    maker: str


class ReportRow(_Answer):
    """What the jobs of a row took, with the keys that were asked for (user, day, name, gpu)."""

    jobs: int
    gpu_hours: float = Field(description="of whole GPUs")
    gpu_hours_by_part: float = Field(description="each GPU by the part of its memory that was promised")
    core_hours: float
    promised: int | None = Field(description="bytes on each GPU, the mean over time; null where the use is unknown")
    used: int | None = Field(description="the most bytes that jobs used on a GPU, the mean over the same time")
    energy_j: float | None = Field(description="joules; null if unknown")
    energy_known: float | None = Field(description="for which part of the GPU hours the energy is known, 0 to 1")
    waited_median: float | None = Field(description="seconds until the first start")
    waited_90: float | None
    failures: dict[str, int] = Field(description="attempts that failed, by cause")


class ReportAnswer(_Answer):
    """What jobs took between two times."""

    since: float
    until: float
    by: list[str]
    rows: list[ReportRow]
    total: ReportRow


class TraceAnswer(_Answer):
    """What jobs did that were submitted between two times."""

    since: float
    until: float
    policy: str
    sharing: str
    estimator: str | None
    min_speed: float
    rules: dict[str, Any] = Field(description="the settings of placement")
    reading_s: float = Field(description="how often GPUs are read")
    all: bool = Field(description="whether you may see the jobs of everybody")
    gpus: list[dict[str, Any]]
    works: dict[str, dict[str, dict[str, Any]]] = Field(description="what jobs do alone, by work and by GPU")
    jobs: list[dict[str, Any]] = Field(description="each with its attempts")


class TokenRequest(BaseModel):
    """What a new token is to be."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("", max_length=80)
    scope: Literal["read", "submit", "operate"] = "submit"
    lasts: float | None = Field(None, gt=0, lt=3.2e9, description="seconds until it expires; null: never")
    user: str | None = Field(None, max_length=200, description="for operators: whose it is to be")


class TokenAnswer(_Answer):
    """A token, without the token itself."""

    id: int
    user: str
    scope: str
    name: str
    made: float
    expires: float | None
    revoked: float | None


class NewTokenAnswer(TokenAnswer):
    """A token that was just made; it is shown in no other answer."""

    token: str


class QuestionRow(_Answer):
    """An estimate that was asked for without a job, without the answer."""

    id: str
    state: Literal["waiting", "done", "failed"]
    user: str
    asked: float
    answered: float | None
    question: dict[str, Any] = Field(description="what was asked; the script and its place only for who asked")
    reason: str | None = Field(description="how far it is while it waits, or why it failed")


class QuestionAnswer(QuestionRow):
    """An estimate that was asked for without a job."""

    estimates: list[dict[str, Any]] = Field(description="one for each GPU, as `ullage estimate --json` gives it")
    advice: dict[str, Any] | None = Field(
        description="options that would make it fit, each with change, fits, takes and note; largest: the largest batch"
    )


class DaemonAnswer(_Answer):
    """What the daemon is."""

    version: str
    protocol: int = Field(description="which answers it gives; a client that knows another number is told so")
    policy: str
    gpus: int
    jobs: dict[str, int]
    last_event: int
    you: str
    uid: int
    operator: bool
    scope: str = Field(description="what your token allows: read, submit or operate")


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
    (NoSuchJob, 404), (UnknownName, 404), (NotAllowed, 403), (StoreFull, 507), (NoDaemon, 503),
)  # fmt: skip
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


def _job_routes(router: APIRouter, ask: Ask) -> None:
    @router.post("/v1/jobs", status_code=201, response_model=SubmissionAnswer, tags=["jobs"])
    async def submit(caller: Asker, submission: SubmissionRequest) -> Response:
        """Submit a job. It is on disk when the answer comes."""
        job = submission.job.said()
        key = submission.key or secrets.token_hex(16)
        return JSONResponse(await ask(caller, "submit", {"job": job, "key": key}, 0.0), 201)

    @router.get("/v1/jobs", response_model=list[JobAnswer], tags=["jobs"])
    async def queue(caller: Asker, user: User = None, limit: Limit = None, offset: Offset = 0) -> Response:
        """Jobs that are not over, or a page of them."""
        return await _long(ask(caller, "queue", {"user": user, "limit": limit, "offset": offset}, 0.0))

    @router.get("/v1/queue", response_model=FoldedAnswer, tags=["jobs"])
    async def folded_queue(
        caller: Asker, user: User = None, limit: Limit = None, offset: Offset = 0,
        live: Annotated[bool, Query(description="only jobs that have a place on GPUs now")] = False,
    ) -> Response:  # fmt: skip
        """The same in few rows: jobs of an array that wait in the same state are one."""
        asked = {"user": user, "limit": limit, "offset": offset, "live": live}
        return await _long(ask(caller, "folded_queue", asked, 0.0))

    @router.get("/v1/jobs/{job}", response_model=list[FullJobAnswer], tags=["jobs"])
    async def status(caller: Asker, job: JobName) -> Response:
        """All about a job, or the jobs of an array."""
        return await _long(ask(caller, "status", {"job": job}, 0.0))

    @router.get("/v1/jobs/{job}/memory", response_model=MemoryAnswer, tags=["jobs"])
    async def memory(caller: Asker, job: JobName) -> Response:
        """The memory of a job over time, attempt by attempt."""
        return await _long(ask(caller, "memory", {"job": job}, 0.0))

    @router.get("/v1/jobs/{job}/logs", response_model=LogAnswer, tags=["jobs"])
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

        change.__doc__ = text
        router.post(f"/v1/jobs/{{job}}/{verb}", response_model=list[ChangeAnswer], tags=["jobs"], name=verb)(change)

    @router.patch("/v1/jobs/{job}", response_model=list[ChangeAnswer], tags=["jobs"])
    async def edit(caller: Asker, job: JobName, values: Annotated[dict[str, Any], Body()]) -> Response:
        """Change a job that waits. The keys are those of a job file; null takes a value back."""
        return JSONResponse(await ask(caller, "edit", {"jobs": [job], "changes": values}, 0.0))

    @router.post("/v1/jobs/{job}/requeue", response_model=list[ChangeAnswer], tags=["jobs"])
    async def requeue(caller: Asker, job: JobName, how: RequeueRequest | None = None) -> Response:
        """Put a job that runs or is over into the queue again."""
        terms = how or RequeueRequest()
        return JSONResponse(await ask(caller, "requeue", {"jobs": [job], **terms.model_dump()}, 0.0))

    @router.post("/v1/dry-run", response_model=TrialAnswer, tags=["jobs"])
    async def dry_run(caller: Asker, trial: TrialRequest) -> Response:
        """What would become of a job if it were submitted now. Nothing is stored."""
        return JSONResponse(await ask(caller, "dry_run", {"job": trial.job.said(), "estimate": trial.estimate}, 0.0))

    @router.post("/v1/estimates", status_code=201, response_model=QuestionAnswer, tags=["estimates"])
    async def estimate(caller: Asker, question: EstimateSpec, wait: Patience = 0.0) -> Response:
        """Ask for an estimate without a job. It is kept; without `wait`, ask for the answer by its id."""
        found = await ask(caller, "estimate", {"question": question.said()}, 0.0)
        return await _long(ask(caller, "estimated", {"estimate": found["id"]}, wait), 201)

    @router.get("/v1/estimates", response_model=list[QuestionRow], tags=["estimates"])
    async def estimates(caller: Asker, limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        """The estimates that you asked for, the newest first, without the answers."""
        return await _long(ask(caller, "estimates", {"limit": limit}, 0.0))

    @router.get("/v1/estimates/{estimate}", response_model=QuestionAnswer, tags=["estimates"])
    async def estimated(
        caller: Asker, estimate: Annotated[str, Path(max_length=200)], wait: Patience = 0.0
    ) -> Response:
        """An estimate that was asked for, with the answer once there is one."""
        return await _long(ask(caller, "estimated", {"estimate": estimate}, wait))

    @router.post("/v1/estimates/{estimate}/cancel", tags=["estimates"])
    async def cancel_estimate(caller: Asker, estimate: Annotated[str, Path(max_length=200)]) -> Response:
        """Give up an estimate that you asked for and that is not there yet."""
        return JSONResponse(await ask(caller, "cancel_estimate", {"estimate": estimate}, 0.0))

    changes("cancel", "Take a job out of the queue, or stop it if it runs.")
    changes("hold", "Keep a waiting job from starting.")
    changes("release", "Let a held job go on.")

    @router.get("/v1/history", response_model=list[JobAnswer], tags=["jobs"])
    async def history(
        caller: Asker, limit: Annotated[int, Query(ge=1, le=100_000)] = 50, user: User = None
    ) -> Response:
        """Jobs that are over, the last one first."""
        return await _long(ask(caller, "history", {"limit": limit, "user": user}, 0.0))


def _other_routes(router: APIRouter, ask: Ask, ending: Callable[[], bool]) -> None:
    @router.get("/v1/ping", response_model=DaemonAnswer, tags=["daemon"])
    async def ping(caller: Asker) -> Response:
        """What the daemon is, and who you are to it."""
        return JSONResponse(await ask(caller, "ping", {}, 0.0))

    @router.get("/v1/gpus", response_model=list[GPUAnswer], tags=["gpus"])
    async def gpus(caller: Asker) -> Response:
        """The GPUs now."""
        return JSONResponse(await ask(caller, "gpus", {}, 0.0))

    @router.post("/v1/gpus/{gpu}/drain", response_model=DrainAnswer, tags=["gpus"])
    async def drain(caller: Asker, gpu: GPUName, why: DrainReason | None = None) -> Response:
        """No new jobs for a GPU; those that are there go on. For operators."""
        return JSONResponse(await ask(caller, "drain", {"gpu": gpu, "reason": why.reason if why else ""}, 0.0))

    @router.post("/v1/gpus/{gpu}/resume", response_model=DrainAnswer, tags=["gpus"])
    async def resume(caller: Asker, gpu: GPUName) -> Response:
        """New jobs for a GPU again. For operators."""
        return JSONResponse(await ask(caller, "resume", {"gpu": gpu}, 0.0))

    @router.get("/v1/events", response_model=EventsAnswer, tags=["events"])
    async def events(
        caller: Asker,
        since: EventNumber = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        wait: Annotated[float, Query(ge=0, le=60, description="seconds to wait for one")] = 0.0,
    ) -> Response:
        """What happened after event number `since`."""
        return JSONResponse(await ask(caller, "events", {"since": since, "limit": limit}, wait))

    @router.get(
        "/v1/events/stream", tags=["events"], responses={200: {"content": {"text/event-stream": {}}}},
        response_class=StreamingResponse,
    )  # fmt: skip
    async def stream(request: Request, caller: Asker, since: EventNumber = 0) -> Response:
        """Events as they happen (server-sent events); after a break the header Last-Event-ID goes on from there."""
        last = request.headers.get("last-event-id", "")
        begin = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else since
        return StreamingResponse(
            _events(ask, caller, begin, ending), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @router.post("/v1/reservations", status_code=201, response_model=ReservationAnswer, tags=["gpus"])
    async def reserve(caller: Asker, wanted: ReservationRequest) -> Response:
        """Reserve GPUs for users and groups. For operators."""
        return JSONResponse(await ask(caller, "reserve", wanted.model_dump(), 0.0), 201)

    @router.get("/v1/reservations", response_model=list[ReservationAnswer], tags=["gpus"])
    async def reservations(caller: Asker) -> Response:
        """Reservations that are not over."""
        return JSONResponse(await ask(caller, "reservations", {}, 0.0))

    @router.delete("/v1/reservations/{reservation}", response_model=ReservationAnswer, tags=["gpus"])
    async def unreserve(caller: Asker, reservation: Annotated[str, Path(max_length=200)]) -> Response:
        """Take a reservation back, by its number or its name. For operators."""
        return JSONResponse(await ask(caller, "unreserve", {"reservation": reservation}, 0.0))

    @router.get("/v1/report", response_model=ReportAnswer, tags=["daemon"])
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

    @router.get("/v1/trace", response_model=TraceAnswer, tags=["daemon"])
    async def trace(
        caller: Asker,
        since: Annotated[float | None, Query(ge=0, description="seconds since 1970; seven days ago by default")] = None,
        until: Annotated[float | None, Query(ge=0, description="seconds since 1970; now by default")] = None,
        user: User = None,
        there: Annotated[bool, Query(description="also jobs that came before and were not over then")] = False,
    ) -> Response:
        """The jobs that were submitted, with all that a simulation needs to run them again."""
        return await _long(ask(caller, "trace", {"since": since, "until": until, "user": user, "there": there}, 0.0))

    @router.get("/v1/tokens", response_model=list[TokenAnswer], tags=["tokens"])
    async def tokens(caller: Asker, everybody: bool = False) -> Response:
        """Your tokens, or those of all users."""
        return JSONResponse(await ask(caller, "tokens", {"everybody": everybody}, 0.0))

    @router.post("/v1/tokens", status_code=201, response_model=NewTokenAnswer, tags=["tokens"])
    async def make_token(caller: Asker, wanted: TokenRequest) -> Response:
        """Make a token."""
        return JSONResponse(await ask(caller, "token_create", wanted.model_dump(), 0.0), 201)

    @router.delete("/v1/tokens/{token}", response_model=TokenAnswer, tags=["tokens"])
    async def revoke_token(caller: Asker, token: Annotated[int, Path(ge=1, le=2**62)]) -> Response:
        """Make a token worth nothing."""
        return JSONResponse(await ask(caller, "token_revoke", {"token": token}, 0.0))

    @router.get("/metrics", tags=["daemon"], response_class=Response,
                responses={200: {"content": {"text/plain": {}}}})  # fmt: skip
    async def figures(caller: Asker) -> Response:
        """Figures for Prometheus."""
        return Response(metrics(await ask(caller, "figures", {}, 0.0)), media_type=CONTENT_TYPE)

    @router.get("/grafana.json", tags=["daemon"])
    async def grafana(caller: Asker) -> dict[str, Any]:
        """A dashboard of these figures, to be imported into Grafana."""
        return dashboard()


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
