"""Queries of the database about jobs, attempts and events. They are read-only and thread-safe."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ullage.errors import DamagedRecord
from ullage.manager.placement import Account
from ullage.manager.storage.database import Database
from ullage.manager.storage.records import (
    OVER,
    AttemptRecord,
    Drain,
    JobRecord,
    Need,
    Notification,
    attempt_from_row,
    job_from_row,
    spec_from_text,
)

_Record = TypeVar("_Record", JobRecord, AttemptRecord)
_AT_ONCE = 20  # notifications per user and kind to read at once
_LISTED = "(SELECT value FROM json_each(?))"  # any number of values in one
_OVER = ", ".join(f"'{state}'" for state in sorted(OVER))


class JobHistory:
    """Queries of the database. Unreadable rows are left out; `damaged` has the reasons by job."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.damaged: dict[int, str] = {}

    def _jobs(self, where: str, *values: Any) -> list[JobRecord]:
        rows = self._database.rows(f"SELECT * FROM jobs WHERE {where}", values)
        specs = self._specs({row["spec_id"] for row in rows})
        missing = ValueError("spec is missing")
        return self._readable(rows, lambda row: job_from_row(row, specs.get(row["spec_id"], missing)))

    def _specs(self, numbers: Iterable[int]) -> dict[int, dict[str, Any] | ValueError]:
        specs: dict[int, dict[str, Any] | ValueError] = {}
        for row in self._database.rows(f"SELECT id, content FROM specs WHERE id IN {_LISTED}", (_listed(numbers),)):
            try:
                specs[row["id"]] = spec_from_text(row["content"])
            except ValueError as error:
                specs[row["id"]] = error
        return specs

    def _pairs(self, statement: str, *values: Any) -> dict[Any, Any]:
        return {row[0]: row[1] for row in self._database.rows(statement, values)}

    def _readable(self, rows: Iterable[sqlite3.Row], read: Callable[[sqlite3.Row], _Record]) -> list[_Record]:
        """Return the records of rows; note unreadable ones in `damaged`."""
        records = []
        for row in rows:
            try:
                records.append(read(row))
            except DamagedRecord as error:
                self.damaged[error.job] = error.reason
        return records

    def numbered(self, numbers: Iterable[int]) -> list[JobRecord]:
        return self._jobs(f"id IN {_LISTED}", _listed(numbers))

    def not_over(self) -> list[JobRecord]:
        return self._jobs(f"state NOT IN ({_OVER}) ORDER BY id")

    def over(self, limit: int, user: str | None) -> list[JobRecord]:
        """Return finished jobs, the latest first."""
        of_user, values = ("AND user = ?", [user]) if user else ("", [])
        return self._jobs(f"+state IN ({_OVER}) {of_user} ORDER BY ended DESC, id DESC LIMIT ?", *values, limit)

    def of_submission(self, key: str) -> list[JobRecord]:
        return self._jobs("submission = ? ORDER BY part", key)

    def named(self, name: str, uid: int) -> list[int]:
        """Return the numbers of a user's jobs with a name."""
        rows = self._database.rows("SELECT id FROM jobs WHERE name = ? AND uid = ? ORDER BY id", (name, uid))
        return [row["id"] for row in rows]

    def of_array(self, array: int, *indices: int) -> list[int]:
        """Return the numbers of the jobs of an array, or of those with these indices."""
        chosen, values = (f"AND array_index IN {_LISTED}", (array, _listed(indices))) if indices else ("", (array,))
        rows = self._database.rows(f"SELECT id FROM jobs WHERE array_id = ? {chosen} ORDER BY id", values)
        return [row["id"] for row in rows]

    def indices(self, array: int) -> dict[int, int]:
        return self._pairs("SELECT array_index, id FROM jobs WHERE array_id = ?", array)

    def states(self, numbers: Iterable[int]) -> dict[int, str]:
        return self._pairs(f"SELECT id, state FROM jobs WHERE id IN {_LISTED}", _listed(numbers))

    def not_done(self, array: int) -> tuple[int, str] | None:
        """Return the index and the state of the first job of an array that is not done, or `None`."""
        rows = self._database.rows(
            "SELECT array_index, state FROM jobs WHERE array_id = ? AND state != 'done' ORDER BY id LIMIT 1", (array,)
        )
        return (rows[0]["array_index"], rows[0]["state"]) if rows else None

    def needs(self, where: str, values: Iterable[Any] = ()) -> dict[int, tuple[Need, ...]]:
        """Return the unsettled dependencies of the jobs (`j`) that match a condition in SQL."""
        needs: dict[int, tuple[Need, ...]] = {}
        for row in self._database.rows(
            f"SELECT d.* FROM dependencies d JOIN jobs j ON j.id = d.job WHERE {where}", tuple(values)
        ):
            need = Need(row["needs"], bool(row["whole"]), row["kind"])
            needs[row["job"]] = (*needs.get(row["job"], ()), need)
        return needs

    def throttles(self) -> dict[int, int]:
        """Return the limits of jobs at once, by array."""
        return self._pairs("SELECT id, throttle FROM arrays")

    def attempts(self, jobs: Iterable[int]) -> dict[int, list[AttemptRecord]]:
        """Return all attempts of jobs, in order."""
        rows = self._database.rows(
            f"SELECT * FROM attempts WHERE job IN {_LISTED} ORDER BY job, number", (_listed(jobs),)
        )
        attempts: dict[int, list[AttemptRecord]] = {}
        for attempt in self._readable(rows, attempt_from_row):
            attempts.setdefault(attempt.job, []).append(attempt)
        return attempts

    def curves(self, job: int) -> dict[int, tuple[float, list[int | None]]]:
        """Return the stored memory of a job's attempts over time: seconds between two values, and bytes."""
        curves = {}
        for row in self._database.rows('SELECT number, step, "values" FROM curves WHERE job = ?', (job,)):
            with contextlib.suppress(ValueError):
                curves[row["number"]] = row["step"], list(json.loads(row["values"]))
        return curves

    def live_attempts(self) -> list[AttemptRecord]:
        rows = self._database.rows("SELECT * FROM attempts WHERE state != 'over' ORDER BY job")
        return self._readable(rows, attempt_from_row)

    def events(self, since: int, limit: int) -> list[dict[str, Any]]:
        """Return events after number `since`, oldest first, each with the user of its job."""
        rows = self._database.rows(
            "SELECT e.*, j.uid FROM events e LEFT JOIN jobs j ON j.id = e.job WHERE e.id > ? ORDER BY e.id LIMIT ?",
            (since, limit),
        )
        return [dict(row) for row in rows]

    def last_ends(self) -> dict[int, float]:
        """Return the end of the last attempt of each job that waits again."""
        return self._pairs(
            "SELECT a.job, max(a.ended) FROM attempts a JOIN jobs j ON j.id = a.job "
            "WHERE j.state IN ('queued', 'held') AND a.ended IS NOT NULL GROUP BY a.job"
        )

    def accounts(self) -> dict[str, Account]:
        """Return the recent usage of users."""
        return {row["user"]: Account(row["used"], row["at"]) for row in self._database.rows("SELECT * FROM accounts")}

    def attempts_between(self, since: float, until: float) -> Iterator[dict[str, Any]]:
        """Yield attempts that may have run between two times, with the user and name of their jobs, for reports."""
        rows = self._database.rows(
            "SELECT a.job, a.number, a.slots, a.promise, a.used, a.started, a.placed, a.ended, a.elapsed, a.cause, "
            "a.cores, a.gpu_part, a.energy, coalesce(a.waited, max(0, a.placed - j.submitted)) AS waited, "
            "j.user, j.name FROM attempts a JOIN jobs j ON j.id = a.job "
            "WHERE (a.ended >= ? OR a.state != 'over') AND a.placed < ?",
            (since, until),
        )
        for row in rows:
            with contextlib.suppress(ValueError):  # leave out unreadable rows
                yield {**dict(row), "slots": tuple(json.loads(row["slots"]))}

    def submitted_between(self, since: float, until: float, there: bool = False) -> list[JobRecord]:
        """Return the jobs submitted between two times, in order; with `there`, also earlier unfinished ones."""
        or_there = "OR ended >= ? OR ended IS NULL" if there else "OR submitted >= ?"
        return self._jobs(f"(submitted >= ? {or_there}) AND submitted < ? ORDER BY submitted, id", since, since, until)

    def queued(self, jobs: Iterable[int]) -> dict[int, float]:
        """Return when jobs last came into the queue before their first attempt, if the events are still stored."""
        return self._pairs(
            "SELECT e.job, max(e.time) FROM events e JOIN attempts a ON a.job = e.job AND a.number = 1 "
            f"WHERE e.kind = 'queued' AND e.time <= a.placed AND e.job IN {_LISTED} GROUP BY e.job",
            _listed(jobs),
        )

    def drains(self, now: float) -> list[Drain]:
        """Return the drains that are not over, by their beginning."""
        drains = []
        for row in self._database.rows(
            'SELECT * FROM drains WHERE until IS NULL OR until > ? ORDER BY "begin"', (now,)
        ):
            lists = {name: tuple(json.loads(row[name])) for name in ("users", "groups")}
            drains.append(Drain(**{**dict(row), **lists}))
        return drains

    def notifications(self) -> dict[tuple[int, str], list[Notification]]:
        """Return pending notifications, oldest first, a few for each user and kind (hook or command)."""
        rows = self._database.rows(
            "SELECT * FROM (SELECT n.*, j.uid, j.gid, row_number() OVER (PARTITION BY j.uid, n.kind ORDER BY n.id) "
            "AS place FROM notifications n JOIN jobs j ON j.id = n.job) WHERE place <= ? ORDER BY id",
            (_AT_ONCE,),
        )
        notifications: dict[tuple[int, str], list[Notification]] = {}
        for row in rows:
            values = {name: row[name] for name in ("id", "job", "uid", "gid", "kind")}
            contents = {name: json.loads(row[name]) for name in ("target", "facts")}
            notifications.setdefault((row["uid"], row["kind"]), []).append(Notification(**values, **contents))
        return notifications

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state, including finished ones."""
        return self._pairs("SELECT state, count(*) FROM jobs GROUP BY state")

    def causes(self) -> dict[str, int]:
        """Return the number of ended attempts by cause."""
        return self._pairs("SELECT coalesce(cause, 'None'), count(*) FROM attempts WHERE state = 'over' GROUP BY cause")


def _listed(numbers: Iterable[int]) -> str:
    return json.dumps(list(numbers))
