"""What the daemon answered last, shared by all pages of a session, and figures of the last minutes.

A page asks for a reading about once a second. It gets the last one if that is new enough; otherwise one question goes
to the daemon, for all who wait. While no page is open, nothing is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ullage.errors import NotAllowed, UllageError

EVERY = 1.0  # seconds between two readings
_REST, _OLD = 20.0, 10.0  # the whole queue again: after so many times as long as it took; after so many seconds at most
KEPT = 300.0  # seconds of which figures are kept
MOST_ROWS, FINISHED = 5000, 500  # rows of the queue, and jobs that are over, that are shown
_MOST_JOBS = 50  # of which all is kept

Answer = dict[str, Any]


@dataclass(frozen=True)
class DaemonReading:
    """What the daemon answered at a time; `trouble` is why it did not, and then the rest is what it said before."""

    about: Answer = field(default_factory=dict)
    gpus: list[Answer] = field(default_factory=list)
    rows: list[Answer] = field(default_factory=list)
    all_rows: int = 0
    states: dict[str, int] = field(default_factory=dict)
    trouble: str | None = "asks the daemon"
    since: float = 0.0  # since when there is trouble, or none

    @cached_property
    def places(self) -> dict[str, str]:
        """What each GPU is called."""
        return place_names(self.gpus)

    def on_gpu(self, gpu: str) -> list[Answer]:
        """The jobs that hold a promise on a GPU."""
        return self._by_gpu.get(gpu, [])

    @cached_property
    def _by_gpu(self) -> dict[str, list[Answer]]:
        found: dict[str, list[Answer]] = {}
        for row in self.rows:
            for gpu in row["gpus_used"]:
                found.setdefault(gpu, []).append(row)
        return found


def place_names(gpus: list[Answer]) -> dict[str, str]:
    """What GPUs are called, by their ids: by their index, and MIG instances as NVIDIA's tools do, GPU:INSTANCE.

    >>> whole, part = {"id": "a", "index": 0, "mig": False}, {"id": "b", "index": 1, "mig": True}
    >>> place_names([whole, part, part | {"id": "c"}])
    {'a': '0', 'b': '1:0', 'c': '1:1'}
    """
    names: dict[str, str] = {}
    seen: Counter[int] = Counter()
    for gpu in gpus:
        names[gpu["id"]] = f"{gpu['index']}:{seen[gpu['index']]}" if gpu["mig"] else str(gpu["index"])
        seen[gpu["index"]] += 1
    return names


class Readings:
    """The readings of one session."""

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask
        self._last, self._next = DaemonReading(), 0.0
        # The whole queue: its last event, and when it is asked for again, if something has happened or not.
        self._whole_at, self._whole_next, self._whole_old = -1, 0.0, 0.0
        self._asking: asyncio.Task[None] | None = None
        self._figures: dict[tuple[str, str], deque[tuple[float, float | None]]] = defaultdict(deque)
        self._jobs: dict[int, tuple[float, Answer]] = {}
        self._finished: tuple[int, list[Answer]] = (-1, [])

    async def latest(self) -> DaemonReading:
        """The last reading, or a new one if that is old. Never raises: what went wrong is in the reading."""
        if time.monotonic() >= self._next and self._asking is None:
            self._asking = asyncio.create_task(self._read())
        if self._asking is not None:
            await asyncio.shield(self._asking)
        return self._last

    async def finished(self) -> list[Answer]:
        """The last jobs that are over; asked for again when something has happened."""
        event = int(self._last.about.get("last_event", -1))
        if event != self._finished[0]:
            self._finished = event, await self._ask("history", limit=FINISHED, user=None)
        return self._finished[1]

    async def job(self, number: int) -> Answer:
        """All about one job, as it was within the last second."""
        at, found = self._jobs.get(number, (0.0, {}))
        if time.monotonic() >= at:
            [found] = await self._ask("status", job=number)
            while len(self._jobs) >= _MOST_JOBS:
                del self._jobs[next(iter(self._jobs))]
            self._jobs[number] = time.monotonic() + EVERY * 0.8, found
        return found

    def forget(self, number: int) -> None:
        """Ask about a job anew: it was changed."""
        self._jobs.pop(number, None)
        self._next = self._whole_next = 0.0

    def series(self, kind: str, name: str) -> list[tuple[float, float | None]]:
        """The figures of the last minutes, with how many seconds ago each was."""
        now = time.monotonic()
        return [(now - at, value) for at, value in self._figures.get((kind, name), ())]

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            about = await self._ask("ping")
            gpus = await self._ask("gpus")
            queue = await self._queue(about)
        except UllageError as error:
            words = str(error) if isinstance(error, NotAllowed) else "the daemon does not answer"
            since = self._last.since if self._last.trouble else time.time()
            self._last = replace(self._last, trouble=words, since=since)
        else:
            since = time.time() if self._last.trouble else self._last.since
            self._last = DaemonReading(about, gpus, queue["rows"], queue["all_rows"], queue["states"], None, since)
            self._keep(began)
        finally:
            self._next = time.monotonic() + EVERY * 0.8
            self._asking = None

    async def _queue(self, about: Answer) -> Answer:
        """The queue. It may be long: all of it is asked for when something has happened, and not too often."""
        began, before = time.monotonic(), self._last
        changed = about["last_event"] != self._whole_at or began > self._whole_old
        whole = before.trouble is not None or changed and began >= self._whole_next
        terms = {"user": None, "limit": MOST_ROWS, "offset": 0}
        found: Answer = await self._ask("folded_queue", **terms, live=not whole)
        if whole:
            now = time.monotonic()
            self._whole_at, self._whole_old = about["last_event"], now + _OLD
            self._whole_next = now + _REST * (now - began)
            return found
        live = {row["id"]: row for row in found["rows"]}
        return found | {"rows": [live.get(row["id"], row) for row in before.rows]}

    def _keep(self, now: float) -> None:
        for gpu in self._last.gpus:
            figures = {name: gpu["activity"].get(name) for name in ("smact", "drama")}
            figures |= {"power_w": gpu.get("power_w"), "used": gpu["used"]}
            for name, value in figures.items():
                self._figures[name, gpu["id"]].append((now, value))
        for row in self._last.rows:
            if row["used"] is not None:
                self._figures["job", str(row["id"])].append((now, row["used"]))
        for key, values in list(self._figures.items()):
            while values and values[0][0] < now - KEPT:
                values.popleft()
            if not values:
                del self._figures[key]
