"""What the database tells of jobs and events that lie behind: questions that change nothing."""

from __future__ import annotations

from typing import Any

from ullage.manager.records import JobRecord, job_of
from ullage.manager.states import OVER
from ullage.manager.store import Store


class Past:
    """Asks the database.

    book.past.over(limit=50, user=None)
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def events(self, since: int, limit: int) -> list[dict[str, Any]]:
        """Events after number `since`, oldest first."""
        rows = self._store.rows("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", (since, limit))
        return [dict(row) for row in rows]

    def over(self, limit: int, user: str | None) -> list[JobRecord]:
        """Jobs that are over, the last one first."""
        of_user, values = ("AND user = ?", [user]) if user else ("", [])
        over = ", ".join(f"'{state}'" for state in sorted(OVER))
        rows = self._store.rows(
            f"SELECT * FROM jobs WHERE state IN ({over}) {of_user} ORDER BY ended DESC, id DESC LIMIT ?",
            [*values, limit],
        )
        return [job_of(row) for row in rows]

    def find(self, column: str, value: Any) -> list[int]:
        """Numbers of the jobs with that name or of that array."""
        assert column in ("name", "array_id")
        return [row["id"] for row in self._store.rows(f"SELECT id FROM jobs WHERE {column} = ? ORDER BY id", (value,))]

    def last_ends(self) -> dict[int, float]:
        """When the last attempt of each job that waits again ended."""
        rows = self._store.rows(
            "SELECT a.job, max(a.ended) AS ended FROM attempts a JOIN jobs j ON j.id = a.job "
            "WHERE j.state IN ('queued', 'held') AND a.ended IS NOT NULL GROUP BY a.job"
        )
        return {row["job"]: row["ended"] for row in rows}

    def usage(self, since: float) -> dict[str, float]:
        """GPU-seconds of attempts that ended since then, by user."""
        rows = self._store.rows(
            "SELECT j.user, sum(coalesce(a.elapsed, 0) * json_array_length(a.slots)) AS seconds "
            "FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.ended >= ? GROUP BY j.user",
            (since,),
        )
        return {row["user"]: row["seconds"] for row in rows}

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state, those that are over too."""
        rows = self._store.rows("SELECT state, count(*) AS number FROM jobs GROUP BY state")
        return {row["state"]: row["number"] for row in rows}
