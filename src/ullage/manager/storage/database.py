"""The manager's database: SQLite with a write-ahead log and full sync; one connection writes, for one thread at a time.

Any thread may read: each has a connection of its own for that, which sees what is on disk and nothing half done.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shlex
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, StoreDamaged, StoreFull

# The tables of version 1. Later versions are made from them, step by step.
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

# One word for one thing: what a job is promised, and what it used at most.
VERSION_2 = """
ALTER TABLE jobs RENAME COLUMN need TO promise;
ALTER TABLE attempts RENAME COLUMN promised TO promise;
ALTER TABLE attempts RENAME COLUMN gpu_memory TO used;
"""

# How often a job failed by itself: it may be tried again as often as its submitter said.
OWN_FAILURES = """
ALTER TABLE jobs ADD COLUMN own_failures INTEGER NOT NULL DEFAULT 0;
"""

# What an attempt was promised of the host, so that it counts again after a restart.
HOST_SHARES = """
ALTER TABLE attempts ADD COLUMN cores INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN host_promise INTEGER NOT NULL DEFAULT 0;
"""

# What was asked for is kept once for all jobs of an array; arrays and names are looked for.
SHARED_SPECS = """
CREATE TABLE specs (
    id INTEGER PRIMARY KEY,
    content TEXT NOT NULL                 -- what was asked for, as JSON
);
INSERT INTO specs SELECT min(id), spec FROM jobs GROUP BY submission, spec;
ALTER TABLE jobs ADD COLUMN spec_id INTEGER REFERENCES specs (id);
UPDATE jobs SET spec_id = shared.first
    FROM (SELECT id, min(id) OVER (PARTITION BY submission, spec) AS first FROM jobs) AS shared
    WHERE shared.id = jobs.id;
ALTER TABLE jobs DROP COLUMN spec;
CREATE INDEX jobs_by_spec ON jobs (spec_id);
CREATE INDEX jobs_by_array ON jobs (array_id) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_by_name ON jobs (name);
CREATE INDEX jobs_by_end ON jobs (ended);
"""

# How often in a row the daemon ended while it dealt with a job.
CRASHES = """
ALTER TABLE jobs ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
"""

# What an attempt took, for reports: the GPUs by the part of their memory that it was promised, how long its job had
# waited for it in seconds, and joules.
ATTEMPT_FIGURES = """
ALTER TABLE attempts ADD COLUMN gpu_part REAL;
ALTER TABLE attempts ADD COLUMN waited REAL;
ALTER TABLE attempts ADD COLUMN energy REAL;
"""

# Tokens of the API, each for one user.
TOKENS = """
CREATE TABLE tokens (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    hash TEXT NOT NULL UNIQUE,            -- of the token, which itself is kept nowhere
    uid INTEGER NOT NULL, user TEXT NOT NULL,
    scope TEXT NOT NULL,                  -- read, submit, operate
    name TEXT NOT NULL,
    made REAL NOT NULL, expires REAL, revoked REAL
);
"""

# The variables of a job may be secret and are not kept longer than the job needs them; their names are.
DROP_ENVIRONMENT = """
UPDATE specs SET content = json_set(
    json_remove(content, '$.asked.env'), '$.variables',
    (SELECT json_group_array(key) FROM json_each(content, '$.asked.env'))
) WHERE CASE WHEN json_valid(content) THEN json_type(content, '$.asked.env') END = 'object' AND """
ENVIRONMENTS_OF_THE_PAST = f"""
{DROP_ENVIRONMENT} NOT EXISTS (SELECT 1 FROM jobs WHERE spec_id = specs.id AND ended IS NULL);
"""

# Estimates are kept with what they followed from; those of before did not have it, and cannot be trusted.
ESTIMATE_READS = """
DROP TABLE estimates;
CREATE TABLE estimates (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,                    -- who asked, what is run where, GPUs and versions
    upper INTEGER, note TEXT NOT NULL, own_failure INTEGER NOT NULL, seconds REAL NOT NULL, made REAL NOT NULL,
    reads BLOB NOT NULL                   -- the files and variables that the answer follows from: JSON, zlib
);
CREATE INDEX estimates_by_key ON estimates (key);
CREATE INDEX estimates_by_age ON estimates (made);
"""

# Ends of jobs that are still to be told; written with the end itself.
NOTIFICATIONS = """
CREATE TABLE notifications (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,                   -- hook, command, webhook, mail
    target TEXT NOT NULL,                 -- where to, as JSON
    facts TEXT NOT NULL,                  -- what is told, as JSON
    made REAL NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL                     -- not before this time
);
"""

# Jobs wait for whole arrays too, and of an array only some run at once.
ARRAYS = """
CREATE TABLE arrays (
    id INTEGER PRIMARY KEY REFERENCES jobs (id),
    throttle INTEGER NOT NULL             -- how many of its jobs run at once
);
ALTER TABLE dependencies RENAME TO old_dependencies;
CREATE TABLE dependencies (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needs INTEGER NOT NULL REFERENCES jobs (id),
    whole INTEGER NOT NULL,               -- all jobs of the array with that number, not that one alone
    kind TEXT NOT NULL,                   -- ok, any
    PRIMARY KEY (job, needs, whole)
) WITHOUT ROWID;
INSERT INTO dependencies SELECT job, needs, 0, kind FROM old_dependencies;
DROP TABLE old_dependencies;
"""

# GPUs that operators reserve for users and groups.
RESERVATIONS = """
CREATE TABLE reservations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    gpus TEXT NOT NULL,                   -- JSON list of UUIDs
    users TEXT NOT NULL, groups TEXT NOT NULL,  -- JSON lists of names
    "begin" REAL NOT NULL, "end" REAL NOT NULL,
    maker TEXT NOT NULL                   -- who reserved them
);
"""

# What users used of late, kept up to date instead of summed up; it begins anew.
ACCOUNTS = """
CREATE TABLE accounts (
    user TEXT PRIMARY KEY,
    used REAL NOT NULL,                   -- GPU-seconds, as they counted at that time
    at REAL NOT NULL
) WITHOUT ROWID;
"""

# What jobs do on GPUs: as it was predicted, and as it was measured since.
WORKS = """
CREATE TABLE works (
    id TEXT PRIMARY KEY,                  -- of what is run by whom, and what was predicted of it
    predicted TEXT NOT NULL,              -- by the name of a GPU, as JSON
    measured TEXT NOT NULL,               -- by the name of a GPU, as JSON
    changed REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX works_by_age ON works (changed);
ALTER TABLE jobs ADD COLUMN work TEXT;
ALTER TABLE estimates ADD COLUMN utilization TEXT NOT NULL DEFAULT '{}';
"""

# What users asked without a job, and what was answered.
QUESTIONS = """
CREATE TABLE questions (
    id TEXT PRIMARY KEY,                  -- nobody can guess it
    uid INTEGER NOT NULL, gid INTEGER NOT NULL, user TEXT NOT NULL,
    asked REAL NOT NULL,
    question BLOB NOT NULL,               -- JSON, zlib
    answered REAL,
    answer BLOB                           -- JSON, zlib
) WITHOUT ROWID;
CREATE INDEX questions_by_user ON questions (uid, asked);
CREATE INDEX open_questions ON questions (asked) WHERE answered IS NULL;
"""

# What the daemon has and goes by: its GPUs, policy and rules. Who reads the database alone knows what its jobs ran on.
SITE = """
CREATE TABLE site (told TEXT NOT NULL);   -- JSON; one row
"""

# What an estimate is made of, kept with the job; and the memory of attempts over time.
BREAKDOWNS_AND_CURVES = """
ALTER TABLE jobs ADD COLUMN breakdown TEXT;               -- bytes by part, as JSON; unknown is NULL
ALTER TABLE estimates ADD COLUMN breakdown TEXT;
CREATE TABLE curves (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,              -- of the attempt
    step REAL NOT NULL,                   -- seconds between two figures
    "values" TEXT NOT NULL,               -- bytes, a JSON list; null where nobody looked
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
"""

# What GPUs are promised where the ranks of a job take different memory: bytes, a JSON list in the order of the ranks.
PROMISES_BY_RANK = """
ALTER TABLE jobs ADD COLUMN promises TEXT NOT NULL DEFAULT '[]';
ALTER TABLE attempts ADD COLUMN promises TEXT NOT NULL DEFAULT '[]';
ALTER TABLE estimates ADD COLUMN by_rank TEXT NOT NULL DEFAULT '[]';
"""

# Step n makes a database of version n out of one of version n - 1. A step that was released is never changed.
MIGRATIONS = (
    VERSION_1,
    VERSION_2,
    OWN_FAILURES,
    HOST_SHARES,
    SHARED_SPECS,
    CRASHES,
    ATTEMPT_FIGURES,
    TOKENS,
    ENVIRONMENTS_OF_THE_PAST,
    ESTIMATE_READS,
    NOTIFICATIONS,
    ARRAYS,
    RESERVATIONS,
    ACCOUNTS,
    WORKS,
    QUESTIONS,
    SITE,
    BREAKDOWNS_AND_CURVES,
    PROMISES_BY_RANK,
)


FILE, BACKUPS, JOBS = "state.db", "backups", "jobs"
LOGS = ("-wal", "-shm")  # what SQLite keeps beside the file
NEWEST_KEPT, DAYS_KEPT, WEEKS_KEPT = 3, 7, 4


class Database:
    """Opens, checks and migrates the database of a folder; `transaction` is the only way to write.

    >>> import tempfile
    >>> with contextlib.closing(Database(Path(tempfile.mkdtemp()))) as store:
    ...     with store.transaction():
    ...         _ = store.execute("INSERT INTO gpus VALUES ('GPU-1', 1, 'dust')")
    ...     store.rows("SELECT id FROM gpus")[0]["id"]
    'GPU-1'

    A missing file is made anew only where nothing is left of an earlier one, or with `new`. A file that is removed
    while it is open is put back, with all that it held, before anything more is acknowledged.

    Not covered: two processes at once; the daemon's lock sees to that.
    """

    def __init__(self, folder: Path, new: bool = False, say: Callable[[str], None] = lambda text: None) -> None:
        self.file, self.backups, self._say = folder / FILE, folder / BACKUPS, say
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._open = False
        self._readers: list[sqlite3.Connection] = []
        self._reading = threading.local()
        with self._explained():
            if self.file.exists() and self.file.stat().st_size > 0:
                self._check(new)
            else:
                self._check_nothing_was_lost(new)
            self._connection = self._connect()
            self._migrate()
            self._identity = self._on_disk()

    def _check_nothing_was_lost(self, new: bool) -> None:
        """Where the file is missing or empty: whether there was one, by what it has left behind."""
        copies = self._copies()
        jobs = len([place for place in (self.file.parent / JOBS).glob("*") if place.name.isdigit()])
        logs = [log for log in self._logs() if log.exists() and log.stat().st_size]
        left = [f"the files of {jobs} jobs"] * bool(jobs) + [f"{len(copies)} copies of it"] * bool(copies)
        left += [f"its log {log.name}" for log in logs]
        if left and not new:
            found = "is empty" if self.file.exists() else "is missing"
            how = f"{self._going_back(copies[-1])}. " if copies else ""
            raise StoreDamaged(
                f"the database {self.file} {found}, but {' and '.join(left)} are there; nothing was changed. "
                f"{how}To begin anew without those jobs: ullage serve --new-database"
            )
        for log in logs:  # SQLite would throw it away
            log.rename(log.with_name(f"{log.name}.aside-{_stamp()}"))

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.file, isolation_level=None, timeout=10.0, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what is dropped is overwritten
        return connection

    def _check(self, new: bool) -> None:
        """By a connection that may only read: a damaged file must stay as it is."""
        if new:
            raise InvalidValue(
                f"--new-database: there is a database already ({self.file}); nothing was changed. "
                f"To set it aside first: {self._aside()}"
            )
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
                self._keep_in_place()
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

    def write(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """One transaction of statements, each with the rows of values that it is done for."""
        with self.transaction():
            for statement, rows in statements:
                self._connection.executemany(statement, rows)

    def rows(self, statement: str, values: Any = ()) -> list[sqlite3.Row]:
        """What a query finds, of what is on disk. Any thread may ask."""
        with self._explained():
            return self._reader().execute(statement, values).fetchall()

    def _reader(self) -> sqlite3.Connection:
        """The connection by which this thread reads."""
        writer, reader = getattr(self._reading, "of", (None, None))
        if reader is None or writer is not self._connection:  # the writer's file may be another one by now
            reader = sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            reader.row_factory = sqlite3.Row
            self._reading.of = (self._connection, reader)
            self._readers.append(reader)
        return reader

    def _on_disk(self) -> tuple[tuple[int, int] | None, ...]:
        """Which files have our names now: the database and its log."""
        found: list[tuple[int, int] | None] = []
        for file in (self.file, self._logs()[0]):
            try:
                status = file.stat()
                found.append((status.st_dev, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)

    def _keep_in_place(self) -> None:
        """What was committed is only safe if our files still have their names: put them back where they were removed.

        Nothing is put over a file that somebody else has put there.
        """
        there = self._on_disk()
        if there == self._identity:
            return
        try:
            copy = self.back_up()
            if there[0] not in (None, self._identity[0]):
                raise self._replaced(copy)
            self._connection.close()
            for log in self._logs():
                log.unlink(missing_ok=True)
            new = self.file.with_suffix(".new")
            shutil.copyfile(copy, new)
            new.chmod(0o600)
            sync(new)
            new.replace(self.file)
            sync(self.file.parent)
            self._connection = self._connect()
            self._identity = self._on_disk()
        except (OSError, sqlite3.Error) as error:
            raise StoreDamaged(
                f"the database {self.file} was removed while it was in use and cannot be put back ({error}); "
                "the last order may be lost"
            ) from error
        self._say(f"{self.file} was removed while it was in use; it was put back, and nothing is lost")

    def _replaced(self, copy: Path) -> StoreDamaged:
        return StoreDamaged(
            f"another file was put in the place of the database {self.file} while it was in use; the daemon ends. All "
            f"that it knew is in {copy}. To go on with that: {self._aside()} && {self._back(copy)}"
        )

    def back_up(self, label: str | None = None) -> Path:
        """A consistent copy beside the database; of the others, those are kept that `kept_copies` names."""
        self.backups.mkdir(mode=0o700, exist_ok=True)
        target = self.backups / f"state-{label or _stamp()}.db"
        unfinished = target.with_suffix(".new")
        with self._explained():
            copy = sqlite3.connect(unfinished)
            try:
                self._connection.backup(copy)
            finally:
                copy.close()
        unfinished.chmod(0o600)
        sync(unfinished)
        unfinished.rename(target)
        dated = sorted(self.backups.glob("state-2*.db"))
        for old in set(dated) - kept_copies(dated):
            old.unlink()
        return target

    def close(self) -> None:
        """The log goes into the database; a second call does nothing."""
        for reader in self._readers:
            reader.close()
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
        copies = self._copies()
        how = (
            self._going_back(copies[-1], f"{self._aside()} && ")
            if copies
            else f"There is no copy of it yet. To begin anew: {self._aside()} && ullage serve --new-database"
        )
        return StoreDamaged(f"the database {self.file} is damaged ({found}); nothing was changed. {how}")

    def _copies(self) -> list[Path]:
        """All copies, the newest last."""
        return sorted(self.backups.glob("state-*.db"), key=lambda file: file.stat().st_mtime)

    def _logs(self) -> list[Path]:
        return [self.file.with_name(self.file.name + end) for end in LOGS]

    def _going_back(self, copy: Path, first: str = "") -> str:
        taken = datetime.datetime.fromtimestamp(copy.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        return f"Its newest copy is of {taken}. To go back to it: {first}{self._back(copy)}"

    def _back(self, copy: Path) -> str:
        logs = f"rm -f {_quoted(self.file)}-wal {_quoted(self.file)}-shm"
        return f"{logs} && cp {_quoted(copy)} {_quoted(self.file)}"

    def _aside(self) -> str:
        return f"mv {_quoted(self.file)} {_quoted(self.file.with_suffix('.damaged'))}"


def kept_copies(dated: Sequence[Path]) -> set[Path]:
    """Of copies with a date in their names: the newest three, the newest of each of the last seven days that have one,
    and the newest of each of the last four weeks. Many starts in an hour push out nothing older.

    >>> names = [f"state-202611{day:02}-{hour:02}0000-0.db" for day in range(1, 31) for hour in range(24)]
    >>> kept = sorted(path.name for path in kept_copies([Path(name) for name in names]))
    >>> len(kept), kept[0], kept[-1]
    (11, 'state-20261115-230000-0.db', 'state-20261130-230000-0.db')
    """
    by_day: dict[object, Path] = {}
    by_week: dict[object, Path] = {}
    for copy in sorted(dated):
        try:
            day = datetime.datetime.strptime(copy.name[6:14], "%Y%m%d")
        except ValueError:
            continue
        by_day[day], by_week[day.isocalendar()[:2]] = copy, copy
    days, weeks = list(by_day.values())[-DAYS_KEPT:], list(by_week.values())[-WEEKS_KEPT:]
    return {*sorted(dated)[-NEWEST_KEPT:], *days, *weeks}


def _stamp() -> str:
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")


def sync(path: Path) -> None:
    """A file, or what was created or renamed in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
