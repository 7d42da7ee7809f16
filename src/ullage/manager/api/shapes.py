"""The answers of the REST API, for its description: unknown values are null; answers may have more keys."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ullage.manager.storage.records import State


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class ProblemAnswer(_Answer):
    """An error, in one message."""

    error: str = Field(description="the kind, such as JobNotFound")
    message: str


class SubmissionAnswer(_Answer):
    """The jobs of a submission, already stored on disk."""

    jobs: list[int]
    array: int | None
    state: State
    estimate: str | None = Field(description="where the promise comes from; null if nothing is known yet")
    estimating: str | None = Field(description="what becomes of the estimate that is to come; null if none is")
    promise: int | None = Field(description="bytes on each GPU; null if unknown")


class TrialAnswer(_Answer):
    """The outcome that a submission would have now; nothing was stored."""

    jobs: int = Field(description="how many it would be")
    state: State
    starts: list[dict[str, Any]] = Field(
        description="those that would start: index, gpus, promise, promises, alone, speed"
    )
    reason: str | None = Field(description="why the first of the others would wait")
    ahead: list[int] = Field(description="the jobs before it in the queue that wait too")
    behind: list[int] = Field(description="the jobs behind it in the queue, if it would wait")
    estimate: str | None = Field(description="where the promise comes from; null if nothing is known yet")
    promise: int | None = Field(description="bytes on each GPU; null if unknown")


class UtilizationAnswer(_Answer):
    """The expected activity of a job alone on a GPU: seconds per step, shares of the time from 0 to 1, watts."""

    gpu: str
    step_s: float
    smact: float
    smocc: float
    drama: float
    power_w: float


class JobAnswer(_Answer):
    """A job. Memory is in bytes, times are in seconds since 1970, durations in seconds."""

    id: int
    name: str
    user: str
    state: State
    priority: int
    gpus: int
    cores: int = Field(description="processor cores that it is promised, or asks for; 0: not counted")
    host_promise: int = Field(description="bytes of host memory that it is promised, or asks for; 0: not counted")
    promise: int | None = Field(description="bytes on each GPU, promised now or at the start; null if unknown")
    promises: list[int] = Field(description="bytes on each GPU, rank by rank, if these differ; else empty")
    used: int | None = Field(description="bytes that it uses now, the most on one GPU")
    estimating: str | None = Field(description="what becomes of the estimate that is to come; null if none is")
    submitted: float
    started: float | None
    ended: float | None
    waited: float | None
    ran: float | None
    completion: float | None
    cause: str | None
    exit_code: int | None
    utilization: UtilizationAnswer | None = Field(description="null if unknown")
    speed: float | None = Field(description="the share of its speed alone that is expected where it runs")
    min_speed: float | None = Field(description="the share of its speed alone that it must keep on a shared GPU")
    over_promise: bool = Field(description="whether it uses more now than it was promised")
    reason: str | None = Field(description="why it waits, or what threatens it while it runs")


class RowAnswer(JobAnswer):
    """A row of the queue: a job, or the first of several jobs of an array that wait in the same state."""

    jobs: int = Field(description="how many jobs it stands for")
    indices: str | None = Field(description="their indices, such as 5-10000; null for one job")


class FoldedAnswer(_Answer):
    """The queue, with jobs of an array that wait in the same state in one row."""

    rows: list[RowAnswer]
    all_rows: int
    jobs: int
    states: dict[str, int] = Field(description="how many jobs are in each state")


class AttemptAnswer(_Answer):
    """One start of a job."""

    number: int
    state: str
    slots: list[str]
    promise: int | None
    promises: list[int] = Field(description="bytes on each of the slots where its ranks differ; else empty")
    cause: str | None
    exit_code: int | None
    used: int | None = Field(description="the most bytes that it used on one GPU")


class FullJobAnswer(JobAnswer):
    """A job with its attempts; for its owner also with its command, folder and the names of its variables."""

    attempts: list[AttemptAnswer]
    more_memory: int | None = Field(description="bytes to ask for if it is over and is to run again with more")


class CurveAnswer(_Answer):
    """The memory of an attempt over time: every `step` seconds from `begin` on."""

    number: int
    begin: float
    promise: int | None
    step: float
    values: list[int | None] = Field(description="the most bytes that it held on one GPU; null if not measured")


class MemoryAnswer(_Answer):
    """The memory of a job over time."""

    job: int
    attempts: list[CurveAnswer]


class LogAnswer(_Answer):
    """A piece of an attempt's output; repeat the request with the new `offset` until `over`."""

    job: int
    attempt: int | None
    offset: int
    text: str
    over: bool
    file: str | None


class ChangeAnswer(_Answer):
    """The result of an order for one of the named jobs."""

    job: int
    done: bool
    text: str


class ActivityAnswer(_Answer):
    """Mean activity over the window, 0 to 1."""

    gract: float | None
    smact: float | None
    smocc: float | None
    drama: float | None
    age: float | None


class GPUAnswer(_Answer):
    """A GPU as it is now; `free` is the memory that can still be promised."""

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
    drained: bool = Field(description="whether it gets none at all")
    text: str = Field(description="the drain in words, or those that remain")


class EventAnswer(_Answer):
    """Something that happened."""

    id: int
    time: float
    kind: str
    job: int | None
    attempt: int | None
    text: str


class EventsAnswer(_Answer):
    """Events, oldest first; `last` is the `since` of the next request."""

    events: list[EventAnswer]
    last: int


class ReportRow(_Answer):
    """The resources that the jobs of a row used, with the requested keys (user, day, name, gpu)."""

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
    """The resources that jobs used between two times."""

    since: float
    until: float
    by: list[str]
    rows: list[ReportRow]
    total: ReportRow


class TraceAnswer(_Answer):
    """The jobs submitted between two times, with what they did."""

    since: float
    until: float
    policy: str
    sharing: str
    estimator: str | None
    min_speed: float | None
    rules: dict[str, Any] = Field(description="the settings of placement")
    reading_s: float = Field(description="how often GPUs are read")
    all: bool = Field(description="whether you may see the jobs of everybody")
    gpus: list[dict[str, Any]]
    works: dict[str, dict[str, dict[str, Any]]] = Field(description="what jobs do alone, by work and by GPU")
    jobs: list[dict[str, Any]] = Field(description="each with its attempts")


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
    """A new token; no other answer shows it."""

    token: str


class QuestionRow(_Answer):
    """An estimate requested without a job, without its result."""

    id: str
    state: Literal["waiting", "done", "failed"]
    user: str
    asked: float
    answered: float | None
    question: dict[str, Any] = Field(description="what was asked; the script and its place only for who asked")
    reason: str | None = Field(description="how far it is while it waits, or why it failed")


class QuestionAnswer(QuestionRow):
    """An estimate requested without a job."""

    estimates: list[dict[str, Any]] = Field(description="one for each GPU, as `ullage estimate --json` gives it")
    advice: dict[str, Any] | None = Field(description="options that would make it fit, and the largest batch")


class DaemonAnswer(_Answer):
    """The daemon's version, policy and numbers."""

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


ANSWERS: dict[str, Any] = {
    "ping": DaemonAnswer,
    "submit": SubmissionAnswer,
    "dry_run": TrialAnswer,
    "queue": list[JobAnswer],
    "folded_queue": FoldedAnswer,
    "status": list[FullJobAnswer],
    "memory": MemoryAnswer,
    "history": list[JobAnswer],
    "logs": LogAnswer,
    **dict.fromkeys(("cancel", "hold", "release", "edit", "requeue"), list[ChangeAnswer]),
    **dict.fromkeys(("estimate", "estimated"), QuestionAnswer),
    "estimates": list[QuestionRow],
    "gpus": list[GPUAnswer],
    **dict.fromkeys(("drain", "resume"), DrainAnswer),
    "events": EventsAnswer,
    "report": ReportAnswer,
    "trace": TraceAnswer,
    "tokens": list[TokenAnswer],
    "token_create": NewTokenAnswer,
    "token_revoke": TokenAnswer,
}
