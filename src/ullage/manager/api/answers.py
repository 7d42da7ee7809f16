"""What the API's answers look like, for its description (OpenAPI). Unknown is null; answers may have more keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ullage.manager.storage.records import State
from ullage.workloads.job_files import JobSpec


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class Problem(_Answer):
    """Something that could not be done, in one message."""

    error: str = Field(description="the kind, such as NoSuchJob")
    message: str


class Submission(BaseModel):
    """A job, and a key that is used once: the same key again gives the same jobs and makes no new ones."""

    model_config = ConfigDict(extra="forbid")

    job: JobSpec
    key: str | None = Field(None, min_length=8, max_length=200)


class Reason(BaseModel):
    """Why a GPU is drained."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=200)


class Submitted(_Answer):
    """What became of a submission: on disk by now."""

    jobs: list[int]
    array: int | None
    state: State
    estimate: str | None = Field(description="who says how much it needs; null while that is found out")
    need: int | None = Field(description="bytes on each GPU")


class Job(_Answer):
    """A job. Memory in bytes, times in seconds since 1970, spans in seconds."""

    id: int
    name: str
    user: str
    state: State
    priority: int
    gpus: int
    need: int | None
    promised: int | None
    gpu_memory: int | None
    submitted: float
    started: float | None
    ended: float | None
    waited: float | None
    ran: float | None
    completion: float | None
    cause: str | None
    exit_code: int | None
    reason: str | None = Field(description="why it waits")


class Attempt(_Answer):
    """One time that a job was placed."""

    number: int
    state: str
    slots: list[str]
    promised: int | None
    cause: str | None
    exit_code: int | None
    gpu_memory: int | None


class WholeJob(Job):
    """A job with its attempts; with its command, folder and the names of its variables for those whose job it is."""

    attempts: list[Attempt]


class Log(_Answer):
    """A piece of an attempt's output; ask again with `offset` until `over`."""

    job: int
    attempt: int | None
    offset: int
    text: str
    over: bool


class Done(_Answer):
    """What was done to one of the jobs that were named."""

    job: int
    done: bool
    text: str


class Activity(_Answer):
    """Means over the window, 0 to 1."""

    gract: float | None
    smact: float | None
    smocc: float | None
    drama: float | None
    age: float | None


class GPUNow(_Answer):
    """A GPU as it is now; `free` is what can still be promised."""

    id: str
    index: int
    name: str
    total: int
    used: int | None
    promised: int
    free: int
    jobs: list[int]
    activity: Activity
    drained: bool
    lost: bool


class Drained(_Answer):
    """Whether a GPU gets new jobs."""

    gpu: str
    index: int
    drained: bool


class Event(_Answer):
    """Something that happened."""

    id: int
    time: float
    kind: str
    job: int | None
    attempt: int | None
    text: str


class Events(_Answer):
    """Events, oldest first; `last` is the number to ask with next."""

    events: list[Event]
    last: int


class About(_Answer):
    """What the daemon is."""

    version: str
    policy: str
    gpus: int
    jobs: dict[str, int]
    last_event: int
    you: str
    operator: bool


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "what was asked for cannot be done"},
    401: {"model": Problem, "description": "no token, or none of this daemon"},
    403: {"model": Problem, "description": "somebody else's job, or an order for operators"},
    404: {"model": Problem, "description": "no such job"},
    413: {"model": Problem, "description": "more than the API reads"},
    422: {"model": Problem, "description": "the request cannot be read"},
    503: {"model": Problem, "description": "the daemon is ending"},
    507: {"model": Problem, "description": "the disk is full: nothing was changed"},
}
