"""The watcher's record of runs and decisions: an SQLite file, which one process writes before each action."""

import contextlib
import dataclasses
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ullage.errors import AlreadyServing, InvalidValue

DECIDED, HELD, UPDATED, LET_GO, RELEASED = "decided", "held", "updated", "let go", "released"
OVER, LOST = "over", "lost"
_VERSION = 1
_KEPT = 90 * 86400.0  # seconds
_TABLE = """
CREATE TABLE runs (
    job INTEGER NOT NULL, started INTEGER NOT NULL,  -- seconds since 1970: which run of the job
    restarts INTEGER NOT NULL,                       -- how often Slurm had started it again by then
    user TEXT NOT NULL, name TEXT NOT NULL,
    ended INTEGER NOT NULL, nodes TEXT NOT NULL, gres TEXT NOT NULL, exit_code INTEGER NOT NULL,
    cause TEXT NOT NULL, detail TEXT NOT NULL,
    next_gres TEXT,                                  -- what it asks for next; NULL: it is not started again
    next_text TEXT NOT NULL,
    streams TEXT NOT NULL,                           -- where its outputs ended, as JSON
    step TEXT NOT NULL,                              -- how far the decision is done
    decided REAL NOT NULL, changed REAL NOT NULL,    -- when, and when the last step was taken
    PRIMARY KEY (job, started)
) WITHOUT ROWID;
CREATE INDEX runs_by_age ON runs (decided);
"""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A finished run of a Slurm job. `step` is the last completed step of its restart."""

    job: int
    started: int
    restarts: int
    user: str
    name: str
    ended: int
    nodes: str
    gres: str
    exit_code: int
    cause: str
    detail: str
    next_gres: str | None
    next_text: str
    streams: str
    step: str
    decided: float
    changed: float

    @property
    def again(self) -> bool:
        """Whether the job must be started again."""
        return self.next_gres is not None


_COLUMNS = tuple(each.name for each in dataclasses.fields(RunRecord))


class RunStore:
    """The runs in a file. A writer locks it until `close` or the end of its process."""

    def __init__(self, file: Path, writes: bool = False) -> None:
        self.file = file
        if writes:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                raise AlreadyServing(f"another 'ullage slurm watch' runs with {file}") from None
        elif not file.exists():
            raise InvalidValue(f"{file} does not exist yet; type: ullage slurm watch")
        self._connection = sqlite3.connect(file, isolation_level="IMMEDIATE", timeout=10.0)
        self._connection.row_factory = sqlite3.Row
        try:
            self._check(writes)
        except sqlite3.DatabaseError as error:
            raise InvalidValue(f"{file} cannot be read as what 'ullage slurm watch' keeps: {error}") from None

    def _check(self, writes: bool) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise InvalidValue(f"{self.file} was written by a newer Ullage; install that version again")
        if writes:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            if version == 0:
                self._connection.executescript(f"BEGIN; {_TABLE} PRAGMA user_version = {_VERSION}; COMMIT;")

    def close(self) -> None:
        """Close the file and release its lock."""
        self._connection.close()
        if hasattr(self, "_lock"):
            os.close(self._lock)

    def of(self, job: int) -> list[RunRecord]:
        return [*self._read("WHERE job = ? ORDER BY started", job)]

    def unfinished(self) -> list[RunRecord]:
        """Return the runs whose jobs must still be started again."""
        return [*self._read("WHERE step IN (?, ?, ?, ?)", DECIDED, HELD, UPDATED, LET_GO)]

    def newest(self, limit: int) -> list[RunRecord]:
        """Return the last runs, newest first."""
        return [*self._read("ORDER BY decided DESC LIMIT ?", limit)]

    def _read(self, rest: str, *values: object) -> Iterator[RunRecord]:
        with contextlib.suppress(sqlite3.OperationalError):  # a new file has no table yet
            for row in self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM runs {rest}", values):
                yield RunRecord(**dict(row))

    def add(self, run: RunRecord) -> None:
        """Store a run on disk, and delete old ones."""
        with self._connection:
            columns = f"({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"
            self._connection.execute(f"INSERT INTO runs {columns}", vars(run))
            self._connection.execute("DELETE FROM runs WHERE decided < ?", (run.decided - _KEPT,))

    def step(self, run: RunRecord, step: str, text: str | None = None) -> RunRecord:
        """Store the next step of a run on disk, and return the changed run."""
        next_text = run.next_text if text is None else text
        done = dataclasses.replace(run, step=step, next_text=next_text, changed=time.time())
        with self._connection:
            self._connection.execute(
                "UPDATE runs SET step = :step, next_text = :next_text, changed = :changed "
                "WHERE job = :job AND started = :started",
                vars(done),
            )
        return done
