"""Stores all jobs. Every change goes through the job store, first into the database and, once on disk, into memory."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from ullage.errors import DamagedRecord, JobNotFound, UllageError
from ullage.manager.fault_injection import crash_point
from ullage.manager.placement import Account
from ullage.manager.storage.changes import Changes, SpecUse
from ullage.manager.storage.database import Database
from ullage.manager.storage.history import JobHistory
from ullage.manager.storage.records import (
    ENDED,
    RUNNING,
    AttemptRecord,
    Cause,
    Drain,
    JobRecord,
    Need,
    Notification,
    State,
    WorkRecord,
    check_transition,
    new_job,
    packed,
    stored,
    unpacked,
    work_from_row,
)

EndNote = tuple[str, dict[str, Any], dict[str, Any]]
"""A notification of a job's end: its kind (hook or command), its target, and the facts."""

_LARGEST_ANSWER = 1 << 20  # bytes of an estimate with its inputs, packed
_KEPT_OF_KEY, _KEPT_FOR = 5, 90 * 86400.0  # estimates and runs: number per key, and seconds
_MOST_WORKS = 10_000  # workloads in memory
_EVENTS = {
    "retry": "retry",
    "edit": "edited",
    "requeue": "requeued",
}  # other events have the name of the new state

_SLICE = 0.02  # seconds of follow-up work after which the event loop gets control
_NOTHING = Changes()  # the changes outside of transactions


class _Collecting(threading.local):
    """The changes of this thread, which no other one sees."""

    changes: Changes | None = None


class JobStore:
    """The jobs: unfinished ones and live attempts in memory, everything in the database. Memory changes when a
    transaction is on disk."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock
        self.history = JobHistory(database)
        jobs, live, damaged = self.history.not_over(), self.history.live_attempts(), self.history.damaged
        self.jobs: dict[int, JobRecord] = {job.id: job for job in jobs if job.id not in damaged}
        self.attempts: dict[int, AttemptRecord] = {each.job: each for each in live if each.job in self.jobs}
        self.unwatched = [each for each in live if each.job not in self.jobs]  # their jobs are unreadable
        for job in self.jobs.values():
            if job.state.is_live and job.id not in self.attempts:
                damaged[job.id] = f"it is {job.state} and has no attempt"
        self.jobs = {number: job for number, job in self.jobs.items() if number not in damaged}
        needs = self.history.needs("j.ended IS NULL")
        self.dependencies = {number: job_needs for number, job_needs in needs.items() if number in self.jobs}
        self.throttles = self.history.throttles()
        self.accounts = self.history.accounts()
        self._works: dict[str, WorkRecord] = {}  # those that were requested
        self.turn = asyncio.Lock()  # held while writing
        self._collecting = _Collecting()
        self._aside = False  # whether another thread is writing
        self._changed: set[int] = set(self.jobs)
        self._specs = SpecUse(database)
        self._last_job = self._sequence("jobs")
        self._last_spec = int(database.rows("SELECT coalesce(max(id), 0) AS id FROM specs")[0]["id"])
        self.last_event = self._sequence("events")
        self.on_change: Callable[[], object] = lambda: None
        self.on_end: Callable[[JobRecord], Iterable[EndNote]] = lambda job: ()

    def _sequence(self, table: str) -> int:
        """Return the last number assigned in a table, even if its row is gone."""
        rows = self._database.rows(
            f"SELECT max(coalesce((SELECT seq FROM sqlite_sequence WHERE name = '{table}'), 0), "
            f"coalesce((SELECT max(id) FROM {table}), 0)) AS last"
        )
        return int(rows[0]["last"])

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make changes together, on disk at the end. Only for short ones, since the loop waits for the disk."""
        if self._collecting.changes is not None:
            yield
            return
        changes = Changes()
        with self.collecting(changes):
            yield
        if changes:
            assert not self._aside, "written while another transaction is: wait for the store's turn first"
            self._specs.drop_environments(changes, self.jobs)
            self._database.write(changes.statements())
            for do in self._take_over(changes):
                do()

    @contextlib.contextmanager
    def collecting(self, changes: Changes) -> Iterator[None]:
        """Collect all changes made inside into `changes`; only this block sees them."""
        assert self._collecting.changes is None
        self._collecting.changes = changes
        try:
            yield
        finally:
            self._collecting.changes = None

    async def change(self, work: Callable[[], object]) -> None:
        """Take the turn, run a function that changes this store, and write its changes in another thread."""
        async with self.turn:
            changes = Changes()
            with self.collecting(changes):
                work()
            await self.write_aside(changes)

    async def write_aside(self, changes: Changes) -> None:
        """Write changes in another thread while the event loop goes on. The caller must hold the turn."""
        assert self.turn.locked()
        if not changes:
            return
        self._specs.drop_environments(changes, self.jobs)
        self._aside = True
        try:
            await asyncio.to_thread(self._database.write, changes.statements())
        finally:
            self._aside = False
        began = time.monotonic()
        for do in self._take_over(changes):
            do()
            if time.monotonic() - began > _SLICE:
                await asyncio.sleep(0)
                began = time.monotonic()

    def _take_over(self, changes: Changes) -> list[Callable[[], object]]:
        """Apply written changes in memory; return the functions to call now."""
        self._specs.take_over(changes, self.jobs)
        self.jobs |= changes.jobs
        self.attempts |= changes.attempts
        self.dependencies |= changes.dependencies
        for number, needs in changes.dependencies.items():
            if not needs:
                del self.dependencies[number]
        self.accounts |= changes.accounts
        self._remember(changes.works.values())
        for array, throttle in changes.throttles.items():
            self.throttles.pop(array, None)
            if throttle is not None:
                self.throttles[array] = throttle
        self._changed.update(changes.jobs)
        for job in changes.jobs.values():
            if job.state.is_over:
                self.jobs.pop(job.id, None)
                self.dependencies.pop(job.id, None)
        for attempt in changes.attempts.values():
            if attempt.state == ENDED:
                self.attempts.pop(attempt.job, None)
        self._last_job = max(self._last_job, changes.last_job)
        self._last_spec = max([self._last_spec, *changes.specs])
        self.last_event += len(changes.events)
        return [*changes.afterwards, self.on_change]

    def afterwards(self, do: Callable[[], object]) -> None:
        """Call a function when the open transaction is on disk, and never if it fails."""
        if self._collecting.changes is not None:
            self._collecting.changes.afterwards.append(do)
        else:
            do()

    def also(self, statement: str, values: Sequence[Any]) -> None:
        """Add a statement to the open transaction."""
        self._now.add(statement, values)

    def number_of(self, uid: int | None = None) -> int:
        """Return the number of unfinished jobs, of all users or one, including those being submitted."""
        come = self._pending.come
        if uid is None:
            return len(self.jobs) + come.total()
        return self._specs.number_of(uid) + come[uid]

    def bytes_of(self, uid: int) -> int:
        """Return the bytes stored for a user's unfinished jobs, including those being submitted."""
        submitted = [job for each in self._pending.submissions.values() for job in each if job.uid == uid]
        new = {job.spec_id: job.spec for job in submitted}
        return self._specs.bytes_of(uid) + sum(len(stored(spec)) for spec in new.values())

    def changed(self) -> set[int]:
        """Return the jobs changed since the last call; at first, all unfinished ones."""
        changed, self._changed = self._changed, set()
        return changed

    def job(self, number: int) -> JobRecord:
        return self.several([number])[0]

    def name_of(self, number: int) -> str:
        """Return the reference to a job by its number, or the number if there is no such job. Thread-safe."""
        job = self.jobs.get(number)
        if job is None:
            with contextlib.suppress(UllageError):
                job = self.job(number)
        return str(number) if job is None else job.reference

    def several(self, numbers: Sequence[int]) -> list[JobRecord]:
        """Return the jobs with these numbers, finished or not, in that order."""
        changed = self._pending.jobs
        records = [changed.get(number) or self.jobs.get(number) for number in numbers]
        missing = [number for number, job in zip(numbers, records, strict=True) if job is None]
        past = {job.id: job for job in self.history.numbered(missing)} if missing else {}
        for number in missing:
            if number in self.history.damaged:
                raise DamagedRecord(number, self.history.damaged[number])
            if number not in past:
                raise JobNotFound(str(number))
        return [job or past[number] for number, job in zip(numbers, records, strict=True)]

    @property
    def next_number(self) -> int:
        return max(self._last_job, self._pending.last_job) + 1

    def submit(
        self,
        common: dict[str, Any],
        parts: Iterable[tuple[dict[str, Any], tuple[Need, ...]]],
        throttle: int | None = None,
    ) -> Generator[None, None, list[JobRecord]]:
        """Add new jobs, all or none: `common` values, and `parts` with each job's own values and dependencies. Yields
        after each."""
        number, spec_id = self.next_number - 1, self._now.add_spec(common["spec"], self._last_spec)
        made: list[JobRecord] = []
        for values, needs in parts:
            number += 1
            array = None if values["array_index"] is None else made[0].id if made else number
            job = new_job({**common, **values, "id": number, "spec_id": spec_id, "array_id": array})
            made.append(job)
            if needs:
                self._now.dependencies[number] = needs
            self.event("submitted", job, f"by {job.user}")
            yield
        self._now.add_jobs(made)
        if throttle is not None:
            self._now.throttles[made[0].id] = throttle
        crash_point("submit-before-commit")
        return made

    def needs(self, numbers: Iterable[int]) -> dict[int, tuple[Need, ...]]:
        """Return the dependencies of jobs; for finished jobs, the unsettled ones."""
        changed = self._pending.dependencies
        needs = {number: changed.get(number, self.dependencies.get(number, ())) for number in numbers}
        over = [number for number in needs if number not in self.jobs and number not in changed]
        if over:
            needs |= self.history.needs("j.id IN (SELECT value FROM json_each(?))", (json.dumps(over),))
        return needs

    def wait_for(self, number: int, needs: tuple[Need, ...]) -> None:
        """Set the dependencies of a job."""
        with self.transaction():
            self._now.dependencies[number] = needs

    def throttle(self, array: int, at_once: int | None) -> None:
        """Set how many jobs of an array may run at once; `None`: any number."""
        with self.transaction():
            self._now.throttles[array] = at_once

    def of_submission(self, key: str) -> list[JobRecord]:
        return self._pending.submissions.get(key) or self.history.of_submission(key)

    @property
    def _pending(self) -> Changes:
        changes = self._collecting.changes
        return _NOTHING if changes is None else changes

    @property
    def _now(self) -> Changes:
        changes = self._collecting.changes
        assert changes is not None, "changes are made within a transaction"
        return changes

    def update(self, job: JobRecord, **changes: Any) -> JobRecord:
        """Change fields of a job other than its state."""
        with self.transaction():
            if "spec" in changes:
                changes["spec_id"] = self._now.add_spec(changes["spec"], self._last_spec)
            return self._now.change_job(job, changes)

    def move(self, job: JobRecord, transition: str, state: State, text: str = "", **changes: Any) -> JobRecord:
        """Make a named transition of `records.TRANSITIONS`, with its event."""
        check_transition(transition, job.state, state)
        if state.is_over:
            changes.setdefault("ended", self._clock())
        with self.transaction():
            if transition == "requeue":
                self._now.come[job.uid] += 1
            changed = self.update(job, state=state, **changes)
            self.event(_EVENTS.get(transition, state.value), changed, text)
            if state.is_over:
                for kind, target, facts in self.on_end(changed):
                    self._now.notifications.append((changed.id, kind, stored(target), stored(facts)))
        return changed

    def settle_notification(self, each: Notification, kind: str, text: str) -> None:
        """Remove a notification that was delivered or cannot be."""
        with self.transaction():
            self._now.add("DELETE FROM notifications WHERE id = ?", (each.id,))
            self._now.events.append((self._clock(), kind, each.job, None, text))

    def place(self, job: JobRecord, attempt: AttemptRecord, text: str) -> None:
        """Record that a job is about to start; only afterwards may a process be created."""
        with self.transaction():
            self._now.add_attempt(attempt)
            self.move(job, "place", State.STARTING, text)

    def next_attempt(self, job: int) -> int:
        row = self._database.rows("SELECT coalesce(max(number), 0) + 1 AS next FROM attempts WHERE job = ?", (job,))[0]
        return int(row["next"])

    def live_attempt(self, number: int) -> AttemptRecord:
        return self._pending.attempts.get(number) or self.attempts[number]

    def revise(self, attempt: AttemptRecord, **promise: Any) -> AttemptRecord:
        """Change the promise of a live attempt."""
        with self.transaction():
            return self._now.change_attempt(attempt, promise)

    def run(self, attempt: AttemptRecord, started: float) -> None:
        """Record that the process of an attempt runs."""
        with self.transaction():
            self._now.change_attempt(attempt, {"state": RUNNING, "started": started})
            job = self.job(attempt.job)
            if job.state is State.STARTING:
                self.move(job, "run", State.RUNNING, started=job.started or started)

    def end_attempt(self, attempt: AttemptRecord, cause: Cause, detail: str, **record: Any) -> AttemptRecord:
        """Record the end of an attempt; its job must be moved in the same transaction."""
        return self._now.change_attempt(attempt, {"state": ENDED, "cause": cause, "detail": detail, **record})

    def charge(self, user: str, used: float, at: float, half_life: float) -> None:
        """Add GPU-seconds, weighted at a time, to a user's account, whose balance has decayed until then."""
        before = self._now.accounts.get(user) or self.accounts.get(user) or Account(0.0, at)
        self._now.accounts[user] = before.charged(used, at, half_life)

    def event(self, kind: str, job: JobRecord | None = None, text: str = "", attempt: int | None = None) -> None:
        """Add an event."""
        with self.transaction():
            self._now.events.append((self._clock(), kind, job.id if job else None, attempt, text))

    def kept_estimates(self, key: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the times and answers of earlier estimates with a key, newest first."""
        rows = self._database.rows("SELECT made, answer FROM estimates WHERE key = ? ORDER BY made DESC", (key,))
        return [(row["made"], unpacked(row["answer"])) for row in rows]

    def keep_estimate(self, key: str, upper: int | None, seconds: float, answer: dict[str, Any]) -> None:
        """Store an estimate with its inputs. Only the newest few of a key are kept, and only for a time."""
        answer_text, now = packed(answer), self._clock()
        with self.transaction():
            if len(answer_text) <= _LARGEST_ANSWER:
                self._now.add(
                    "INSERT INTO estimates (key, upper, seconds, made, answer) VALUES (?, ?, ?, ?, ?)",
                    (key, upper, seconds, now, answer_text),
                )
            self._now.add(
                "DELETE FROM estimates WHERE made < ? OR key = ? AND id NOT IN "
                "(SELECT id FROM estimates WHERE key = ? ORDER BY made DESC LIMIT ?)",
                (now - _KEPT_FOR, key, key, _KEPT_OF_KEY),
            )
            self._now.add(
                "DELETE FROM works WHERE changed < ? AND id NOT IN "
                "(SELECT work FROM jobs WHERE work IS NOT NULL AND ended IS NULL)",
                (now - _KEPT_FOR,),
            )

    def runs(self, key: str) -> list[tuple[int, float]]:
        """Return the last runs with a key: the most bytes on one GPU, and seconds."""
        rows = self._database.rows(
            "SELECT used, elapsed FROM runs WHERE key = ? AND ended >= ?", (key, self._clock() - _KEPT_FOR)
        )
        return [(row["used"], row["elapsed"]) for row in rows]

    def keep_run(self, key: str, used: int, elapsed: float) -> None:
        with self.transaction():
            self._now.add(
                "INSERT INTO runs (key, used, elapsed, ended) VALUES (?, ?, ?, ?)", (key, used, elapsed, self._clock())
            )
            self._now.add(
                "DELETE FROM runs WHERE ended < ? OR key = ? AND id NOT IN "
                "(SELECT id FROM runs WHERE key = ? ORDER BY id DESC LIMIT ?)",
                (self._clock() - _KEPT_FOR, key, key, _KEPT_OF_KEY),
            )

    def keep_curve(self, job: int, number: int, step: float, values: Sequence[int | None]) -> None:
        """Store the memory of an attempt over time."""
        with self.transaction():
            self._now.add("INSERT OR REPLACE INTO curves VALUES (?, ?, ?, ?)", (job, number, step, json.dumps(values)))

    def work(self, id: str) -> WorkRecord | None:
        """Return a workload, if known. Thread-safe."""
        record = self._pending.works.get(id) or self._works.get(id)
        if record is None:
            for row in self._database.rows("SELECT * FROM works WHERE id = ?", (id,)):
                record = work_from_row(row)
                self._remember([record])
        return record

    def keep_work(self, work: WorkRecord) -> None:
        """Store a workload; one that no job needs is deleted after a time."""
        with self.transaction():
            self._now.works[work.id] = dataclasses.replace(work, changed=self._clock())

    def _remember(self, works: Iterable[WorkRecord]) -> None:
        if len(self._works) > _MOST_WORKS:
            self._works = {}
        self._works |= {work.id: work for work in works}

    def keep_site(self, values: dict[str, Any]) -> None:
        """Store the daemon's GPUs and rules."""
        with self.transaction():
            self._now.add("DELETE FROM site", ())
            self._now.add("INSERT INTO site VALUES (?)", (json.dumps(values),))

    def site(self) -> dict[str, Any] | None:
        """Return the daemon's GPUs and rules at its last start; None if an earlier version stored none."""
        rows = self._database.rows("SELECT told FROM site")
        return dict(json.loads(rows[0]["told"])) if rows else None

    def drain(self, new: Drain, replaced: Sequence[int], text: str) -> None:
        """Add a drain of a GPU in place of others."""
        values = (new.gpu, new.begin, new.until, stored(new.users), stored(new.groups), new.reason)
        with self.transaction():
            self._now.add("DELETE FROM drains WHERE id = ?", *((number,) for number in replaced))
            self._now.add(
                'INSERT INTO drains (gpu, "begin", until, users, groups, reason) VALUES (?, ?, ?, ?, ?, ?)', values
            )
            self.event("drained", None, text)

    def resume(self, drains: Sequence[int], gpu: str) -> None:
        """Remove drains of a GPU."""
        with self.transaction():
            self._now.add("DELETE FROM drains WHERE id = ?", *((number,) for number in drains))
            self.event("resumed", None, gpu)

    def skip_numbers(self, highest: int) -> int:
        """Give new jobs only numbers above `highest`, and return how many were skipped: a restored database lacks the
        last jobs, but their files exist."""
        skipped = highest - self._last_job
        if skipped <= 0:
            return 0
        with self.transaction():
            self._now.add("DELETE FROM sqlite_sequence WHERE name = 'jobs'", ())
            self._now.add("INSERT INTO sqlite_sequence VALUES ('jobs', ?)", (highest,))
        self._last_job = highest
        return skipped

    def forget(self, before: float) -> list[int]:
        """Delete events and curves of jobs that ended before a time; return these jobs, to delete their files."""
        with self.transaction():
            self._now.add("DELETE FROM curves WHERE job IN (SELECT id FROM jobs WHERE ended < ?)", (before,))
            self._now.add(
                "DELETE FROM events WHERE time < ? AND (job IS NULL OR job IN (SELECT id FROM jobs WHERE ended < ?))",
                (before, before),
            )
        return [row["id"] for row in self._database.rows("SELECT id FROM jobs WHERE ended < ?", (before,))]
