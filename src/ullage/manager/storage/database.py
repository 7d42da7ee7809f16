"""The manager's database: SQLite with a write-ahead log and full sync; one connection, one thread, one writer."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.errors import StoreDamaged, StoreFull

# The tables of the manager's database, and how an older one becomes the present one.

VERSION_1 = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    submission TEXT NOT NULL,             -- the key that the submitter gave: the same key twice is one submission
    part INTEGER NOT NULL,                -- which job of that submission (an array has several)
    user TEXT NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    submitted REAL NOT NULL, started REAL, ended REAL,
    priority INTEGER NOT NULL,
    array_id INTEGER, array_index INTEGER,
    spec TEXT NOT NULL,                   -- what was asked for, as JSON
    estimate_key TEXT,
    estimate_note TEXT,                   -- who said how much it needs, or why nobody could
    need INTEGER,                         -- bytes on each GPU that a placement has to promise; unknown is NULL
    exclusive INTEGER NOT NULL,           -- asked for, or grown to it by recovery
    recovery INTEGER NOT NULL DEFAULT 0,  -- waits in the recovery queue
    memory_failures INTEGER NOT NULL DEFAULT 0,
    other_failures INTEGER NOT NULL DEFAULT 0,
    stop_reason TEXT,                     -- why it is being stopped
    cause TEXT, detail TEXT, exit_code INTEGER,
    ran REAL NOT NULL DEFAULT 0,          -- seconds over all attempts
    UNIQUE (submission, part)
);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    token TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,                  -- starting, running, over
    slots TEXT NOT NULL,                  -- JSON list of UUIDs
    promised INTEGER, exclusive INTEGER NOT NULL,
    placed REAL NOT NULL, started REAL, ended REAL, elapsed REAL,
    cause TEXT, detail TEXT, exit_code INTEGER, signal INTEGER,
    gpu_memory INTEGER, host_memory INTEGER,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE INDEX attempts_by_end ON attempts (ended);
CREATE INDEX live_attempts ON attempts (state) WHERE state != 'over';
CREATE TABLE dependencies (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needs INTEGER NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,                   -- ok, any
    PRIMARY KEY (job, needs)
) WITHOUT ROWID;
CREATE TABLE estimates (
    key TEXT PRIMARY KEY,
    upper INTEGER, note TEXT NOT NULL, seconds REAL NOT NULL, made REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE gpus (id TEXT PRIMARY KEY, drained INTEGER NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL, kind TEXT NOT NULL, job INTEGER, attempt INTEGER, text TEXT NOT NULL
);
"""

# Step n makes a database of version n out of one of version n - 1; a step that was released is never changed.
MIGRATIONS = (VERSION_1,)


FILE, BACKUPS = "state.db", "backups"
KEPT_BACKUPS = 3


class Database:
    """Opens, checks and migrates the database of a folder; `transaction` is the only way to write.

    >>> import tempfile
    >>> with contextlib.closing(Database(Path(tempfile.mkdtemp()))) as store:
    ...     with store.transaction():
    ...         _ = store.execute("INSERT INTO gpus VALUES ('GPU-1', 1, 'dust')")
    ...     store.rows("SELECT id FROM gpus")[0]["id"]
    'GPU-1'

    Not covered: two processes at once; the daemon's lock sees to that.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self.backups = folder / FILE, folder / BACKUPS
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._open = False
        with self._explained():
            self._connection = self._connect()
            self._migrate()

    def _connect(self) -> sqlite3.Connection:
        if self.file.exists() and self.file.stat().st_size > 0:
            self._check()
        os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.file, isolation_level=None, timeout=10.0)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _check(self) -> None:
        """By a connection that may only read: a damaged file must stay as it is."""
        with contextlib.closing(sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True)) as reader:
            found = str(reader.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise self._damaged(found.splitlines()[-1])

    def _migrate(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StoreDamaged(
                f"{self.file} was written by a newer Ullage (its version {version}, this one reads up to "
                f"{len(MIGRATIONS)}); nothing was changed. Install that version again"
            )
        if 0 < version < len(MIGRATIONS):
            self.back_up(f"before-version-{len(MIGRATIONS)}")
        for number in range(version, len(MIGRATIONS)):
            script = f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
            self._connection.executescript(script)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it returns. Inside another one it is a part of that."""
        if self._open:
            yield
            return
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            self._open = True
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._open = False

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._open

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        """One statement, within a transaction if it writes."""
        return self._connection.execute(statement, values)

    def rows(self, statement: str, values: Any = ()) -> list[sqlite3.Row]:
        """What a query finds."""
        with self._explained():
            return self._connection.execute(statement, values).fetchall()

    def back_up(self, label: str | None = None) -> Path:
        """A consistent copy beside the database; the newest few are kept."""
        self.backups.mkdir(mode=0o700, exist_ok=True)
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        target = self.backups / f"state-{label or stamp}.db"
        unfinished = target.with_suffix(".new")
        with self._explained():
            copy = sqlite3.connect(unfinished)
            try:
                self._connection.backup(copy)
            finally:
                copy.close()
        unfinished.chmod(0o600)
        unfinished.rename(target)
        for old in sorted(self.backups.glob("state-2*.db"))[:-KEPT_BACKUPS]:
            old.unlink()
        return target

    def close(self) -> None:
        """The log goes into the database; a second call does nothing."""
        self._connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors in words: damage, or no room."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY):
                raise StoreFull(
                    f"nothing was written: {self.file} cannot grow ({error}). Make room on that disk and try again"
                ) from error
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise StoreFull(f"nothing was written: {error.strerror} ({error.filename})") from error
            raise
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
                raise
            raise self._damaged(str(error)) from error

    def _damaged(self, found: str) -> StoreDamaged:
        copies = sorted(self.backups.glob("state-*.db"), key=lambda file: file.stat().st_mtime)
        aside = f"mv {_quoted(self.file)} {_quoted(self.file.with_suffix('.damaged'))}"
        logs = f"rm -f {_quoted(self.file)}-wal {_quoted(self.file)}-shm"
        if copies:
            taken = datetime.datetime.fromtimestamp(copies[-1].stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
            how = f"Its newest copy is of {taken}. To go back to it: {aside} && {logs} && cp {_quoted(copies[-1])} " + (
                f"{_quoted(self.file)}"
            )
        else:
            how = f"There is no copy of it yet. To begin anew: {aside} && {logs}"
        return StoreDamaged(f"the database {self.file} is damaged ({found}); nothing was changed. {how}")


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
