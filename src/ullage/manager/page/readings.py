"""The daemon's last answers, and values of the last minutes.

A page requests a reading every second. All sessions of a user with the same rights share a recent one; otherwise one of
them asks the daemon. Nothing asks it while no page is open.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Protocol, TypeVar

from ullage.errors import NotAllowed, UllageError

EVERY = 1.0  # seconds between two readings
_REST, _OLD = 20.0, 10.0  # pause before the whole queue is read again: a multiple of the time it took, at most seconds
_TRACE_EVERY = 5.0  # least seconds between two requests for a trace
KEPT = 300.0  # seconds for which values are kept
MOST_ROWS, FINISHED = 5000, 500  # most rows of the queue, and most finished jobs, to show
FIRST_ROWS = 100  # more than fit on a screen; the others follow
_MOST_KEPT = 50  # cached answers

Answer = dict[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True)
class DaemonReading:
    """The daemon's answers at a time. If `trouble` has the reason of a failure, the answers are older."""

    about: Answer = field(default_factory=dict)
    gpus: list[Answer] = field(default_factory=list)
    rows: list[Answer] = field(default_factory=list)
    all_rows: int = 0
    first: int | None = None  # only this many rows of the queue are known yet, and running jobs
    states: dict[str, int] = field(default_factory=dict)
    trouble: str | None = "asks the daemon"
    since: float = 0.0  # when the present state, with or without trouble, began

    @cached_property
    def places(self) -> dict[str, str]:
        return place_names(self.gpus)

    def on_gpu(self, gpu: str) -> list[Answer]:
        return self._by_gpu.get(gpu, [])

    @cached_property
    def _by_gpu(self) -> dict[str, list[Answer]]:
        rows_of_gpus: dict[str, list[Answer]] = {}
        for row in self.rows:
            for gpu in row["gpus_used"]:
                rows_of_gpus.setdefault(gpu, []).append(row)
        return rows_of_gpus


def place_names(gpus: list[Answer]) -> dict[str, str]:
    """Return the names of GPUs by id: their index or, for MIG instances as in NVIDIA's tools, GPU:INSTANCE.

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


class Asker(Protocol):
    """The part of a session that readings use."""

    @property
    def over(self) -> bool:
        """Whether its token is no longer valid."""

    @property
    def busy(self) -> bool:
        """Whether it is waiting for an answer."""

    async def ask(self, verb: str, **arguments: Any) -> Any:
        """Send an order to the daemon and return the answer."""


class SharedReadings:
    """Readings by user and rights, which the daemon reports for each session's own token."""

    def __init__(self) -> None:
        self._readings: dict[Hashable, Readings] = {}

    def of(self, session: Asker, about: Answer) -> "Readings":
        self._readings = {who: each for who, each in self._readings.items() if each.wanted}
        who = about["uid"], about["you"], about["operator"], about["scope"]
        readings = self._readings.setdefault(who, Readings(session))
        readings.share(session)
        return readings


class Readings:
    """The readings of sessions with the same rights; any of them asks the daemon on behalf of all."""

    def __init__(self, session: Asker) -> None:
        self._sessions = [session]
        self._last, self._next = DaemonReading(), 0.0
        # The last event in the whole queue, and its next reading times, with and without new events.
        self._whole_at, self._whole_next, self._whole_old = -1, 0.0, 0.0
        self._open: dict[Hashable, asyncio.Future[Any]] = {}  # requests without an answer yet
        self._figures: dict[tuple[str, str], deque[tuple[float, float | None]]] = defaultdict(deque)
        self._answers: dict[Hashable, tuple[float, Any]] = {}  # cached answers and the ends of their validity

    @property
    def wanted(self) -> bool:
        """Whether any session can still use these readings."""
        return any(not each.over for each in self._sessions)

    def share(self, session: Asker) -> None:
        self._sessions = [each for each in self._sessions if not each.over and each is not session] + [session]

    def leave(self, session: Asker) -> None:
        self._sessions = [each for each in self._sessions if each is not session]

    async def latest(self) -> DaemonReading:
        """Return the last reading, or a new one if it is old. Errors are in the reading."""
        if time.monotonic() >= self._next:
            await self._once("reading", self._read)
        return self._last

    async def finished(self) -> list[Answer]:
        """Return the last finished jobs, read again after each event."""
        question = "finished", int(self._last.about.get("last_event", -1))
        jobs: list[Answer] = await self._lasting(question, lambda took: inf, "history", limit=FINISHED, user=None)
        return jobs

    async def job(self, number: int) -> Answer:
        """Return one job's details, at most a second old."""
        records: list[Answer] = await self._lasting(("job", number), lambda took: EVERY * 0.8, "status", job=number)
        return records[0]

    async def trace(self, last: float) -> Answer:
        """Return all jobs of the last `last` seconds, cached for some seconds."""
        since = time.time() - last
        trace: Answer = await self._lasting(
            ("trace", last), lambda took: max(_TRACE_EVERY, _REST * took), "trace", since=since, there=True
        )
        return trace

    async def _lasting(self, question: Hashable, lasts: Callable[[float], float], verb: str, **arguments: Any) -> Any:
        """Return an answer, cached for a time that depends on how long it took."""

        async def ask() -> Any:
            began = time.monotonic()
            answer = await self._ask(verb, **arguments)
            now = time.monotonic()
            while len(self._answers) >= _MOST_KEPT:
                del self._answers[next(iter(self._answers))]
            self._answers[question] = now + lasts(now - began), answer
            return answer

        until, known = self._answers.get(question, (0.0, None))
        return known if time.monotonic() < until else await self._once(question, ask)

    def forget(self, number: int) -> None:
        """Drop the cached answer of a changed job."""
        self._answers.pop(("job", number), None)
        self._next = self._whole_next = 0.0

    def series(self, kind: str, name: str) -> list[tuple[float, float | None]]:
        """Return the values of the last minutes, each with its age in seconds."""
        now = time.monotonic()
        return [(now - at, value) for at, value in self._figures.get((kind, name), ())]

    async def _once(self, question: Hashable, ask: Callable[[], Awaitable[Found]]) -> Found:
        if question not in self._open:

            def done(future: asyncio.Future[Any]) -> None:
                del self._open[question]
                if not future.cancelled():
                    future.exception()  # mark it as retrieved, since no caller may be waiting any more

            self._open[question] = asyncio.ensure_future(ask())
            self._open[question].add_done_callback(done)
        future = self._open[question]
        await asyncio.wait([future])
        answer: Found = future.result()
        return answer

    async def _ask(self, verb: str, **arguments: Any) -> Any:
        """Ask the daemon through an idle session, or through any if none is idle."""
        while True:
            there = [each for each in self._sessions if not each.over]
            if not there:
                raise NotAllowed("you are signed out")
            session = next((each for each in there if not each.busy), there[-1])
            try:
                return await session.ask(verb, **arguments)
            except NotAllowed:
                if not session.over:
                    raise

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
            self._last = DaemonReading(
                about, gpus, queue["rows"], queue["all_rows"], queue.get("first"), queue["states"], None, since
            )
            self._keep_figures(began)
        finally:
            self._next = time.monotonic() + EVERY * 0.8

    async def _queue(self, about: Answer) -> Answer:
        """Return the queue. All of it is read again only after events, and not too often."""
        began, before = time.monotonic(), self._last
        if not before.about:
            return await self._first_rows(about)
        changed = about["last_event"] != self._whole_at or began > self._whole_old
        whole = before.trouble is not None or changed and began >= self._whole_next
        terms = {"user": None, "limit": MOST_ROWS, "offset": 0}
        queue: Answer = await self._ask("folded_queue", **terms, live=not whole)
        if whole:
            now = time.monotonic()
            self._whole_at, self._whole_old = about["last_event"], now + _OLD
            self._whole_next = now + min(_OLD, _REST * (now - began))
            return queue
        live = {row["id"]: row for row in queue["rows"]}
        return queue | {"rows": [live.get(row["id"], row) for row in before.rows]}

    async def _first_rows(self, about: Answer) -> Answer:
        """Return the first rows and running jobs of a long queue; the next reading has all of it."""
        queue: Answer = await self._ask("folded_queue", user=None, limit=FIRST_ROWS, offset=0, live=False)
        if queue["all_rows"] <= FIRST_ROWS:
            self._whole_at, self._whole_old = about["last_event"], time.monotonic() + _OLD
            return queue
        live: Answer = await self._ask("folded_queue", user=None, limit=MOST_ROWS, offset=0, live=True)
        rows = {row["id"]: row for row in (*queue["rows"], *live["rows"])}
        return queue | {"rows": list(rows.values()), "first": FIRST_ROWS}

    def _keep_figures(self, now: float) -> None:
        for gpu in self._last.gpus:
            figures = {name: gpu["activity"].get(name) for name in ("smact", "drama")}
            figures |= {"power_w": gpu.get("power_w")}
            for name, value in figures.items():
                self._figures[name, gpu["id"]].append((now, value))
        for key, values in list(self._figures.items()):
            while values and values[0][0] < now - KEPT:
                values.popleft()
            if not values:
                del self._figures[key]
