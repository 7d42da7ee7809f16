"""All jobs: every change goes through the job store, into the database first and into memory once it is on disk."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ullage.errors import DamagedRecord, NoSuchJob, StoreDamaged, StoreFull, UllageError
from ullage.manager.fault_injection import crash_point
from ullage.manager.storage.database import Database
from ullage.manager.storage.records import (
    ENDED,
    OVER,
    RUNNING,
    AttemptRecord,
    Cause,
    JobRecord,
    State,
    attempt_from_row,
    check_transition,
    job_from_row,
    stored,
)

_Record = TypeVar("_Record", JobRecord, AttemptRecord)


class JobHistory:
    """Questions to the database about jobs, attempts and events of the past. They change nothing.

    store.history.over(limit=50, user=None)

    Rows that cannot be read are left out, and `damaged` says why, by job.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.damaged: dict[int, str] = {}

    def readable(self, rows: Iterable[sqlite3.Row], read: Callable[[sqlite3.Row], _Record]) -> list[_Record]:
        """The records of rows; those of which none can be made are written down in `damaged`."""
        found = []
        for row in rows:
            try:
                found.append(read(row))
            except DamagedRecord as error:
                self.damaged[error.job] = error.reason
        return found

    def events(self, since: int, limit: int) -> list[dict[str, Any]]:
        """Events after number `since`, oldest first, each with the user of its job."""
        rows = self._database.rows(
            "SELECT e.*, j.uid FROM events e LEFT JOIN jobs j ON j.id = e.job WHERE e.id > ? ORDER BY e.id LIMIT ?",
            (since, limit),
        )
        return [dict(row) for row in rows]

    def over(self, limit: int, user: str | None) -> list[JobRecord]:
        """Jobs that are over, the last one first."""
        of_user, values = ("AND user = ?", [user]) if user else ("", [])
        over = ", ".join(f"'{state}'" for state in sorted(OVER))
        rows = self._database.rows(
            f"SELECT * FROM jobs WHERE state IN ({over}) {of_user} ORDER BY ended DESC, id DESC LIMIT ?",
            [*values, limit],
        )
        return self.readable(rows, job_from_row)

    def find(self, column: str, value: Any) -> list[int]:
        """Numbers of the jobs with that name or of that array."""
        assert column in ("name", "array_id")
        return [
            row["id"] for row in self._database.rows(f"SELECT id FROM jobs WHERE {column} = ? ORDER BY id", (value,))
        ]

    def last_ends(self) -> dict[int, float]:
        """When the last attempt of each job that waits again ended."""
        rows = self._database.rows(
            "SELECT a.job, max(a.ended) AS ended FROM attempts a JOIN jobs j ON j.id = a.job "
            "WHERE j.state IN ('queued', 'held') AND a.ended IS NOT NULL GROUP BY a.job"
        )
        return {row["job"]: row["ended"] for row in rows}

    def usage(self, since: float) -> dict[str, float]:
        """GPU-seconds of attempts that ended since then, by user."""
        rows = self._database.rows(
            "SELECT j.user, sum(coalesce(a.elapsed, 0) * json_array_length(a.slots)) AS seconds "
            "FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.ended >= ? GROUP BY j.user",
            (since,),
        )
        return {row["user"]: row["seconds"] for row in rows}

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state, those that are over too."""
        rows = self._database.rows("SELECT state, count(*) AS number FROM jobs GROUP BY state")
        return {row["state"]: row["number"] for row in rows}

    def causes(self) -> dict[str, int]:
        """How many attempts ended by each cause."""
        rows = self._database.rows("SELECT cause, count(*) AS number FROM attempts WHERE state = 'over' GROUP BY cause")
        return {str(row["cause"]): row["number"] for row in rows}


class JobStore:
    """Jobs that are not over and their live attempts, in memory; everything in the database.

    Memory follows the database: it changes when a transaction is on disk and stays as it was when one fails.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock
        self.history = JobHistory(database)
        over = ", ".join(f"'{state}'" for state in sorted(OVER))
        rows = database.rows(f"SELECT * FROM jobs WHERE state NOT IN ({over}) ORDER BY id")
        jobs = self.history.readable(rows, job_from_row)
        live = self.history.readable(
            database.rows("SELECT * FROM attempts WHERE state != 'over' ORDER BY job"), attempt_from_row
        )
        damaged = self.history.damaged
        self.jobs: dict[int, JobRecord] = {job.id: job for job in jobs if job.id not in damaged}
        self.attempts: dict[int, AttemptRecord] = {each.job: each for each in live if each.job in self.jobs}
        self.unwatched = [each for each in live if each.job not in self.jobs]  # who knows what their jobs are?
        for job in self.jobs.values():
            if job.state.is_live and job.id not in self.attempts:
                damaged[job.id] = f"it is {job.state} and has no attempt"
        self.jobs = {number: job for number, job in self.jobs.items() if number not in damaged}
        self.dependencies: dict[int, dict[int, str]] = {}
        for row in database.rows("SELECT d.* FROM dependencies d JOIN jobs j ON j.id = d.job WHERE j.ended IS NULL"):
            if row["job"] in self.jobs:
                self.dependencies.setdefault(row["job"], {})[row["needs"]] = row["kind"]
        self._new_jobs: dict[int, JobRecord] = {}
        self._new_attempts: dict[int, AttemptRecord] = {}
        self._new_dependencies: dict[int, dict[int, str]] = {}
        self._afterwards: list[Callable[[], None]] = []
        self._changed: set[int] = set(self.jobs)
        self.last_event: int = database.rows("SELECT coalesce(max(id), 0) AS last FROM events")[0]["last"]
        self.on_change: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Changes that happen together."""
        if self._database.in_transaction:
            yield
            return
        try:
            with self._database.transaction():
                yield
            self.jobs |= self._new_jobs
            self.attempts |= self._new_attempts
            self.dependencies |= self._new_dependencies
            changed = bool(self._new_jobs)
            self._changed.update(self._new_jobs)
            self._forget()
            afterwards = self._afterwards
        finally:
            self._new_jobs, self._new_attempts, self._new_dependencies, self._afterwards = {}, {}, {}, []
        for do in afterwards:
            do()
        last = self._database.rows("SELECT coalesce(max(id), 0) AS last FROM events")[0]["last"]
        if changed or last != self.last_event:
            self.last_event = last
            self.on_change()

    def _forget(self) -> None:
        for job in self._new_jobs.values():
            if job.state.is_over:
                self.jobs.pop(job.id, None)
                self.dependencies.pop(job.id, None)
        for attempt in self._new_attempts.values():
            if attempt.state == ENDED:
                self.attempts.pop(attempt.job, None)

    def afterwards(self, do: Callable[[], None]) -> None:
        """Do this when the transaction that is open now is on disk, and never if it fails."""
        if self._database.in_transaction:
            self._afterwards.append(do)
        else:
            do()

    def changed(self) -> set[int]:
        """The jobs that have changed since this was asked before; at first all that are not over."""
        found, self._changed = self._changed, set()
        return found

    def job(self, number: int) -> JobRecord:
        """The job of that number, over or not."""
        found = self._new_jobs.get(number) or self.jobs.get(number)
        if found is not None:
            return found
        rows = self._database.rows("SELECT * FROM jobs WHERE id = ?", (number,))
        if not rows:
            raise NoSuchJob(str(number))
        read = job_from_row(rows[0])
        if not read.state.is_over:  # or it would be in memory
            raise DamagedRecord(number, self.history.damaged[number])
        return read

    def attempts_of(self, number: int) -> list[AttemptRecord]:
        """All attempts of a job, the first one first."""
        rows = self._database.rows("SELECT * FROM attempts WHERE job = ? ORDER BY number", (number,))
        return self.history.readable(rows, attempt_from_row)

    def live_attempt(self, number: int) -> AttemptRecord:
        """The attempt that may have a live process."""
        return self._new_attempts.get(number) or self.attempts[number]

    def submit(self, jobs: Sequence[dict[str, Any]], dependencies: dict[int, str]) -> list[JobRecord]:
        """New jobs, all or none; `needs` are the jobs that they wait for. The same submission again gives its jobs."""
        known = self.of_submission(jobs[0]["submission"])
        if known:
            return known
        made: list[JobRecord] = []
        with self.transaction():
            for values in jobs:
                if values.get("array_index") is not None and made:
                    values = {**values, "array_id": made[0].id}
                names = ", ".join(values)
                marks = ", ".join("?" * len(values))
                cursor = self._database.execute(
                    f"INSERT INTO jobs ({names}) VALUES ({marks})", [stored(value) for value in values.values()]
                )
                job = JobRecord(id=int(cursor.lastrowid or 0), **values)
                made.append(job)
                if job.array_index is not None and job.array_id is None:
                    made[-1] = self.update(job, array_id=job.id)
                self._new_jobs[job.id] = made[-1]
                self._note_dependencies(job.id, dependencies)
                self.event("submitted", made[-1], f"by {job.user}")
            crash_point("submit-before-commit")
        return made

    def _note_dependencies(self, job: int, dependencies: dict[int, str]) -> None:
        for other, kind in dependencies.items():
            self._database.execute("INSERT INTO dependencies VALUES (?, ?, ?)", (job, other, kind))
        if dependencies:
            self._new_dependencies[job] = dict(dependencies)

    def update(self, job: JobRecord, **changes: Any) -> JobRecord:
        """Change fields of a job other than its state; within a transaction."""
        with self.transaction():
            self._write("jobs", "id = ?", (job.id,), changes)
            changed = dataclasses.replace(job, **changes)
            self._new_jobs[job.id] = changed
        return changed

    def move(self, job: JobRecord, transition: str, state: State, text: str = "", **changes: Any) -> JobRecord:
        """A named transition of `states.TRANSITIONS`, with its event."""
        check_transition(transition, job.state, state)
        if state.is_over:
            changes.setdefault("ended", self._clock())
        with self.transaction():
            changed = self.update(job, state=state, **changes)
            self.event(state.value if transition != "retry" else "retry", changed, text)
        return changed

    def place(self, job: JobRecord, attempt: AttemptRecord, text: str) -> None:
        """Write down that a job is about to start there; only after that may a process be made."""
        with self.transaction():
            values = dataclasses.asdict(attempt)
            self._database.execute(
                f"INSERT INTO attempts ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})",
                [stored(value) for value in values.values()],
            )
            self._new_attempts[job.id] = attempt
            self.move(job, "place", State.STARTING, text)

    def next_attempt(self, job: int) -> int:
        """The number of the next attempt."""
        row = self._database.rows("SELECT coalesce(max(number), 0) + 1 AS next FROM attempts WHERE job = ?", (job,))[0]
        return int(row["next"])

    def run(self, attempt: AttemptRecord, started: float) -> None:
        """The process was seen alive."""
        with self.transaction():
            self._attempt(attempt, state=RUNNING, started=started)
            job = self.job(attempt.job)
            if job.state is State.STARTING:
                self.move(job, "run", State.RUNNING, started=job.started or started)

    def end_attempt(self, attempt: AttemptRecord, cause: Cause, detail: str, **record: Any) -> AttemptRecord:
        """The attempt is over; what becomes of its job is moved beside it, in the same transaction."""
        return self._attempt(attempt, state=ENDED, cause=cause, detail=detail, **record)

    def _attempt(self, attempt: AttemptRecord, **changes: Any) -> AttemptRecord:
        self._write("attempts", "job = ? AND number = ?", (attempt.job, attempt.number), changes)
        changed = dataclasses.replace(attempt, **changes)
        self._new_attempts[attempt.job] = changed
        return changed

    def _write(self, table: str, where: str, keys: tuple[int, ...], changes: dict[str, Any]) -> None:
        names = ", ".join(f"{name} = ?" for name in changes)
        values = [stored(value) for value in changes.values()]
        self._database.execute(f"UPDATE {table} SET {names} WHERE {where}", [*values, *keys])

    def event(self, kind: str, job: JobRecord | None = None, text: str = "", attempt: int | None = None) -> None:
        """A line for whoever follows what happens."""
        with self.transaction():
            self._database.execute(
                "INSERT INTO events (time, kind, job, attempt, text) VALUES (?, ?, ?, ?, ?)",
                (self._clock(), kind, job.id if job else None, attempt, text),
            )

    def known_estimate(self, key: str) -> dict[str, Any] | None:
        """What an earlier estimate of the same content said."""
        rows = self._database.rows("SELECT * FROM estimates WHERE key = ?", (key,))
        return dict(rows[0]) if rows else None

    def keep_estimate(self, key: str, upper: int | None, note: str, seconds: float) -> None:
        """Keep an estimate by its content."""
        with self.transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO estimates VALUES (?, ?, ?, ?, ?)", (key, upper, note, seconds, self._clock())
            )

    def drained(self) -> dict[str, str]:
        """GPUs that get no new jobs, each with the reason given."""
        return {row["id"]: row["reason"] for row in self._database.rows("SELECT * FROM gpus WHERE drained = 1")}

    def drain(self, gpu: str, drained: bool, reason: str) -> None:
        """Give a GPU no new jobs, or jobs again."""
        with self.transaction():
            self._database.execute("INSERT OR REPLACE INTO gpus VALUES (?, ?, ?)", (gpu, drained, reason))
            self.event("drained" if drained else "resumed", None, f"{gpu} {reason}".strip())

    def skip_numbers(self, highest: int) -> int:
        """Give new jobs numbers above that one only; how many numbers were skipped for it.

        A database that was restored from a copy does not know the jobs that came after it, but their files are there.
        """
        known = int(self._database.rows("SELECT coalesce(max(id), 0) AS id FROM jobs")[0]["id"])
        rows = self._database.rows("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'")
        last = max(known, int(rows[0]["seq"]) if rows else 0)
        if highest <= last:
            return 0
        with self.transaction():
            self._database.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
            self._database.execute("INSERT INTO sqlite_sequence VALUES ('jobs', ?)", (highest,))
        return highest - last

    def forget(self, before: float) -> list[int]:
        """Drop events and kept environments of jobs that ended before a time; the jobs whose files may go too.

        Of a job that is not over nothing is dropped, however old.
        """
        with self.transaction():
            self._database.execute(
                "DELETE FROM events WHERE time < ? AND (job IS NULL OR job IN (SELECT id FROM jobs WHERE ended < ?))",
                (before, before),
            )
            self._database.execute(
                "UPDATE jobs SET spec = json_set(spec, '$.asked.env', json('{}')) "
                "WHERE ended < ? AND json_extract(spec, '$.asked.env') != '{}'",
                (before,),
            )
        return [row["id"] for row in self._database.rows("SELECT id FROM jobs WHERE ended < ?", (before,))]

    def of_submission(self, key: str) -> list[JobRecord]:
        """The jobs of an earlier submission."""
        return [
            job_from_row(row)
            for row in self._database.rows("SELECT * FROM jobs WHERE submission = ? ORDER BY part", (key,))
        ]


_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class GroupCommit:
    """One transaction for submissions that come at the same time, so that a slow disk is waited for once.

    Collects what arrives in one turn of the event loop and does it in the next.

    Each is answered when the transaction is on disk. One that is refused (`UllageError`) must have written nothing by
    then; the others go on. Where the transaction fails, nobody's work was done: all are told of a full or damaged disk,
    and after any other failure each is tried alone, so that one cannot spoil another.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._waiting: list[_Work] = []

    async def do(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, once that is on disk."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((work, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._all)
        return await answer

    def _all(self) -> None:
        batch, self._waiting = [each for each in self._waiting if not each[1].cancelled()], []
        try:
            self._in_one(batch)
        except (StoreFull, StoreDamaged) as error:
            for _, answer in batch:
                answer.set_exception(type(error)(str(error)))
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for each in batch:
                self._alone(each)

    def _in_one(self, batch: list[_Work]) -> None:
        done: list[tuple[asyncio.Future[Any], Any]] = []
        refused: list[tuple[asyncio.Future[Any], UllageError]] = []
        with self._store.transaction():
            for work, answer in batch:
                try:
                    done.append((answer, work()))
                except (StoreFull, StoreDamaged):
                    raise
                except UllageError as error:
                    refused.append((answer, error))
        for answer, result in done:
            answer.set_result(result)
        for answer, refusal in refused:
            answer.set_exception(refusal)

    def _alone(self, each: _Work) -> None:
        try:
            self._in_one([each])
        except Exception as error:
            each[1].set_exception(error)
