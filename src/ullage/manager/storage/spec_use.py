"""What is kept of submissions and still needed: whose it is, how large it is, and by how many jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ullage.manager.storage.changes import Changes
from ullage.manager.storage.database import Database
from ullage.manager.storage.records import JobRecord, stored
from ullage.manager.storage.schema import DROP_ENVIRONMENT


class SpecUse:
    """Counts the jobs that are not over, by `spec_id`, and the bytes that are kept for each user's jobs.

    Variables may be secret: when the last job of a submission is over, they go, and their names stay. When the last one
    asks for something else by now, nothing stays.
    """

    def __init__(self, database: Database) -> None:
        rows = database.rows(
            "SELECT s.id, j.uid, count(*) AS jobs, length(s.content) AS size FROM jobs j "
            "JOIN specs s ON s.id = j.spec_id WHERE j.ended IS NULL GROUP BY s.id"
        )
        self._live: Counter[int | None] = Counter({row["id"]: row["jobs"] for row in rows})
        self._kept: dict[int | None, tuple[int, int]] = {row["id"]: (row["uid"], row["size"]) for row in rows}
        self._bytes: Counter[int] = Counter()
        self._jobs: Counter[int] = Counter()
        for row in rows:
            self._bytes[row["uid"]] += row["size"]
            self._jobs[row["uid"]] += row["jobs"]

    def number_of(self, uid: int) -> int:
        """How many jobs of a user are not over."""
        return self._jobs[uid]

    def bytes_of(self, uid: int) -> int:
        """How much is kept for the jobs of a user that are not over."""
        return self._bytes[uid]

    def drop_environments(self, changes: Changes, jobs: Mapping[int, JobRecord]) -> None:
        """Add to changes what follows from them; `jobs` are those that were not over before."""
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
        """The changes are on disk."""
        for job in changes.jobs.values():
            self._jobs[job.uid] += (not job.state.is_over) - (job.id in jobs)
        owners = {job.spec_id: job.uid for job in changes.jobs.values()} if changes.specs else {}
        for spec_id, uid in owners.items():
            if spec_id in changes.specs:
                self._kept[spec_id] = (uid, len(stored(changes.specs[spec_id])))
                self._bytes[uid] += self._kept[spec_id][1]
        for number, more in self._more(changes, jobs).items():
            self._live[number] += more
            if not self._live[number]:
                del self._live[number]
                uid, size = self._kept.pop(number, (0, 0))
                self._bytes[uid] -= size

    def _more(self, changes: Changes, jobs: Mapping[int, JobRecord]) -> Counter[int | None]:
        """How many more jobs of each `spec_id` are not over after these changes, or how many fewer."""
        more: Counter[int | None] = Counter()
        for number, job in changes.jobs.items():
            before = jobs.get(number)
            if before is not None:
                more[before.spec_id] -= 1
            if not job.state.is_over:
                more[job.spec_id] += 1
        return more
