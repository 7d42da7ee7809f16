"""Parses when jobs may run, as users write it: indices of an array, dependencies, and start times."""

import datetime
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ullage.errors import InvalidValue
from ullage.units import parse_duration

LONGEST_ARRAY, MOST_DEPENDENCIES, LARGEST_INDEX = 10_000, 1000, 10**9
START_FORMS = "2026-11-20T08:00, 22:00 or now+2h"
LAST_MOMENT = 253_000_000_000.0  # seconds since 1970: in the year 9987, before datetime ends
INDEX = "{index}"  # becomes the index of each array job

_REFERENCE = re.compile(r"[^\x00-\x1f\x7f]{1,128}")


class Dependency(BaseModel):
    """Jobs to wait for: until they are done (`ok`; if one fails, the waiting job is cancelled) or over (`any`).

    Users write `17`, `"12_3"`, `"12_all"`, `"12_{index}"` (the array job of the same index) or a name, each also after
    `ok:` or `any:`, or `{"job": 17, "kind": "any"}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: int | str
    kind: Literal["ok", "any"] = "ok"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, Dependency):
            return value
        given = value if isinstance(value, Mapping) else {"job": value}
        text = str(given.get("job")).strip() if type(given.get("job")) in (int, str) else ""
        kind, colon, rest = text.partition(":")
        if not isinstance(value, Mapping) and colon and kind in ("ok", "any"):
            given, text = {"kind": kind}, rest.strip()
        if not _REFERENCE.fullmatch(text) or re.fullmatch(r"-?\d+", text) and not 1 <= int(text[:30]) < 10**18:
            raise ValueError(f"job must be given as 17, 12_3, 12_all, a name, ok:17 or any:17, got {str(value)[:80]!r}")
        return {**given, "job": int(text) if text.isascii() and text.isdigit() else text}


def parse_array(text: str) -> list[int]:
    """Parse the indices of `1-20`, `0-10:2` or `1,5,7`."""
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?\s*", part)
        step = int(match[3] or 1) if match else 0
        if match is None or step < 1 or match[2] and int(match[2]) < int(match[1]):
            raise InvalidValue(f"indices must look like 1-20, 0-10:2 or 1,5,7, got {text[:80]!r}")
        indices += range(int(match[1]), int(match[2] or match[1]) + 1, step)[: LONGEST_ARRAY + 1]
        if len(indices) > LONGEST_ARRAY:
            raise InvalidValue(f"number of indices must be at most {LONGEST_ARRAY}, got more in {text[:80]!r}")
    return indices


def parse_start(value: Any, now: float) -> float:
    """Parse a start time to seconds since 1970: `2026-11-20T08:00`, `22:00` (the next one), `now+2h`, or a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    text = value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value).strip()
    try:
        match = re.fullmatch(r"now(?:\s*\+\s*(.+))?", text)
        if match:
            return now + (parse_duration(match[1]) if match[1] else 0.0)
        if re.match(r"\d{1,2}:\d\d", text):
            return _next(datetime.time.fromisoformat(text.zfill(5) if len(text) < 6 else text), now)
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidValue(f"time must look like {START_FORMS}, got {text[:80]!r}") from None


def _next(clock_time: datetime.time, now: float) -> float:
    """Return the next moment at which the clock shows this time."""
    today = datetime.datetime.fromtimestamp(now, clock_time.tzinfo)
    moment = datetime.datetime.combine(today.date(), clock_time)
    if moment.timestamp() < now:
        moment = datetime.datetime.combine(today.date() + datetime.timedelta(days=1), clock_time)
    return moment.timestamp()


StartTime = Annotated[
    float,
    Field(ge=0, le=LAST_MOMENT, allow_inf_nan=False),
    BeforeValidator(lambda value: None if value is None else parse_start(value, time.time())),
]
"""The earliest start of a job, in seconds since 1970, or as users write it."""
