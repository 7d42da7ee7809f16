"""Collects the changes of one transaction, to write them in a few statements and apply them in memory once on disk.
Another thread may write them while the loop goes on."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ullage.manager.placement import Account
from ullage.manager.storage.database import Database
from ullage.manager.storage.records import (
    ATTEMPT_COLUMNS,
    JOB_COLUMNS,
    AttemptRecord,
    JobRecord,
    Need,
    WorkRecord,
    stored,
)
from ullage.manager.storage.schema import DROP_ENVIRONMENT

_Rows = Sequence[Sequence[Any]]


class Changes:
    """Jobs, attempts and events after a transaction. If a job changes twice, its last values are written."""

    def __init__(self) -> None:
        self.jobs: dict[int, JobRecord] = {}
        self.attempts: dict[int, AttemptRecord] = {}
        self.dependencies: dict[int, tuple[Need, ...]] = {}  # new dependencies by job
        self.throttles: dict[int, int | None] = {}  # by array
        self.accounts: dict[str, Account] = {}  # by user
        self.works: dict[str, WorkRecord] = {}
        self.specs: dict[int, dict[str, Any]] = {}
        self.submissions: dict[str, list[JobRecord]] = {}
        self.events: list[tuple[float, str, int | None, int | None, str]] = []  # time, kind, job, attempt, text
        self.notifications: list[tuple[int, str, str, str]] = []  # job, kind, target, facts
        self.come: Counter[int] = Counter()  # new jobs in the queue, by user
        self.last_job = 0  # highest number of a new job
        self.afterwards: list[Callable[[], object]] = []
        self._numbers: dict[int, int] = {}  # of specs, by their `id()`
        self._new_jobs: list[int] = []
        self._new_attempts: list[AttemptRecord] = []
        self._of_jobs: dict[int, dict[str, Any]] = {}  # changed columns of existing jobs
        self._of_attempts: dict[tuple[int, int], dict[str, Any]] = {}
        self._others: list[tuple[str, _Rows]] = []

    def add_spec(self, spec: dict[str, Any], last: int) -> int:
        """Add a spec and return its number, after `last`, the highest on disk; the same dict is stored once."""
        known = self._numbers.setdefault(id(spec), max([last, *self.specs]) + 1)
        self.specs[known] = spec
        return known

    def add_jobs(self, made: Sequence[JobRecord]) -> None:
        self.submissions[made[0].submission] = list(made)
        self.jobs.update((job.id, job) for job in made)
        self._new_jobs += [job.id for job in made]
        self.last_job = made[-1].id
        self.come[made[0].uid] += len(made)

    def change_job(self, job: JobRecord, changes: dict[str, Any]) -> JobRecord:
        changed = self.jobs[job.id] = job.with_changes(changes)
        self._of_jobs.setdefault(job.id, {}).update(changes)
        return changed

    def add_attempt(self, attempt: AttemptRecord) -> None:
        self._new_attempts.append(attempt)
        self.attempts[attempt.job] = attempt

    def change_attempt(self, attempt: AttemptRecord, changes: dict[str, Any]) -> AttemptRecord:
        changed = self.attempts[attempt.job] = dataclasses.replace(attempt, **changes)
        self._of_attempts.setdefault((attempt.job, attempt.number), {}).update(changes)
        return changed

    def add(self, statement: str, *rows: Sequence[Any]) -> None:
        """Add any other statement, to run once for each row of values."""
        self._others.append((statement, rows))

    def __bool__(self) -> bool:
        return bool(
            self.jobs
            or self.attempts
            or self.specs
            or self.events
            or self.dependencies
            or self.throttles
            or self.accounts
            or self.works
            or self._others
        )

    def statements(self) -> Iterator[tuple[str, _Rows]]:
        """Yield all statements with their rows, in an order that keeps references valid."""
        if self.specs:
            yield "INSERT INTO specs VALUES (?, ?)", [(number, stored(spec)) for number, spec in self.specs.items()]
        new = [[stored(value) for value in _values(self.jobs[number], JOB_COLUMNS)] for number in self._new_jobs]
        yield from _inserted("jobs", JOB_COLUMNS, new)
        yield from _updated("jobs", "id = ?", [((number,), columns) for number, columns in self._of_jobs.items()])
        made = [[stored(value) for value in _values(attempt, ATTEMPT_COLUMNS)] for attempt in self._new_attempts]
        yield from _inserted("attempts", ATTEMPT_COLUMNS, made)
        yield from _updated("attempts", "job = ? AND number = ?", list(self._of_attempts.items()))
        if self.dependencies:
            yield "DELETE FROM dependencies WHERE job = ?", [(job,) for job in self.dependencies]
            needed = [(job, *need) for job, needs in self.dependencies.items() for need in needs]
            yield "INSERT INTO dependencies (job, needs, whole, kind) VALUES (?, ?, ?, ?)", needed
        for array, throttle in self.throttles.items():
            yield "DELETE FROM arrays WHERE id = ?", [(array,)]
            yield "INSERT INTO arrays VALUES (?, ?)", [] if throttle is None else [(array, throttle)]
        if self.accounts:
            yield "INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", [(user, *a) for user, a in self.accounts.items()]
        if self.works:
            works = [(each.id, stored(each.predicted), each.changed) for each in self.works.values()]
            yield "INSERT OR REPLACE INTO works VALUES (?, ?, ?)", works
        yield from self._others
        if self.notifications:
            yield "INSERT INTO notifications (job, kind, target, facts) VALUES (?, ?, ?, ?)", self.notifications
        if self.events:
            yield "INSERT INTO events (time, kind, job, attempt, text) VALUES (?, ?, ?, ?, ?)", self.events


def _values(record: Any, columns: Sequence[str]) -> list[Any]:
    return [getattr(record, name) for name in columns]


def _inserted(table: str, columns: Sequence[str], rows: _Rows) -> Iterator[tuple[str, _Rows]]:
    if rows:
        yield f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows


def _updated(
    table: str, where: str, changes: Sequence[tuple[tuple[int, ...], dict[str, Any]]]
) -> Iterator[tuple[str, _Rows]]:
    alike: dict[tuple[str, ...], list[list[Any]]] = {}
    for keys, columns in changes:
        names = tuple(name for name in columns if name != "spec")  # specs have their own table
        alike.setdefault(names, []).append([*(stored(columns[name]) for name in names), *keys])
    for names, rows in alike.items():
        yield f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in names)} WHERE {where}", rows


class SpecUse:
    """Counts unfinished jobs by `spec_id`, and stored bytes by user. When the last job of a spec is over, its
    variables, which may be secret, are deleted; an unused spec is deleted."""

    def __init__(self, database: Database) -> None:
        rows = database.rows(
            "SELECT s.id, j.uid, count(*) AS jobs, length(s.content) AS size FROM jobs j "
            "JOIN specs s ON s.id = j.spec_id WHERE j.ended IS NULL GROUP BY s.id"
        )
        self._live: Counter[int | None] = Counter({row["id"]: row["jobs"] for row in rows})
        self._specs: dict[int | None, tuple[int, int]] = {row["id"]: (row["uid"], row["size"]) for row in rows}
        self._bytes: Counter[int] = Counter()
        self._jobs: Counter[int] = Counter()
        for row in rows:
            self._bytes[row["uid"]] += row["size"]
            self._jobs[row["uid"]] += row["jobs"]

    def number_of(self, uid: int) -> int:
        """Return the number of a user's unfinished jobs."""
        return self._jobs[uid]

    def bytes_of(self, uid: int) -> int:
        """Return the bytes stored for a user's unfinished jobs."""
        return self._bytes[uid]

    def drop_environments(self, changes: Changes, jobs: Mapping[int, JobRecord]) -> None:
        """Add the deletions that follow from changes; `jobs` are those unfinished before."""
        more = self._more(changes, jobs)
        left = {job.spec_id for job in changes.jobs.values() if job.state.is_over}
        left |= {spec_id for spec_id, number in more.items() if number < 0}
        over = [(spec_id,) for spec_id in left if self._live[spec_id] + more[spec_id] == 0]
        if over:
            changes.add(DROP_ENVIRONMENT, *over)
            changes.add(
                "DELETE FROM specs WHERE id = ? AND NOT EXISTS (SELECT 1 FROM jobs WHERE spec_id = specs.id)", *over
            )

    def take_over(self, changes: Changes, jobs: Mapping[int, JobRecord]) -> None:
        """Update the counts after changes are on disk."""
        for job in changes.jobs.values():
            self._jobs[job.uid] += (not job.state.is_over) - (job.id in jobs)
        owners = {job.spec_id: job.uid for job in changes.jobs.values()} if changes.specs else {}
        for spec_id, uid in owners.items():
            if spec_id in changes.specs:
                self._specs[spec_id] = (uid, len(stored(changes.specs[spec_id])))
                self._bytes[uid] += self._specs[spec_id][1]
        for number, more in self._more(changes, jobs).items():
            self._live[number] += more
            if not self._live[number]:
                del self._live[number]
                uid, size = self._specs.pop(number, (0, 0))
                self._bytes[uid] -= size

    def _more(self, changes: Changes, jobs: Mapping[int, JobRecord]) -> Counter[int | None]:
        """Return how the number of unfinished jobs of each `spec_id` changes."""
        more: Counter[int | None] = Counter()
        for number, job in changes.jobs.items():
            before = jobs.get(number)
            if before is not None:
                more[before.spec_id] -= 1
            if not job.state.is_over:
                more[job.spec_id] += 1
        return more
