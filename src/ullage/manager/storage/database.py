"""The manager's database: SQLite with a write-ahead log and full sync. One connection writes.

Any thread may read, through its own connection, which sees only committed data.
"""

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

from ullage.errors import DiskFull, InvalidValue, StoreDamaged
from ullage.manager.storage.schema import MIGRATIONS, TABLES, VERSION

FILE, BACKUPS, JOBS = "state.db", "backups", "jobs"
LOGS = ("-wal", "-shm")  # SQLite's files next to the database
NEWEST_KEPT, DAYS_KEPT, WEEKS_KEPT = 3, 7, 4


class Database:
    """Opens and checks the database of a folder; `transaction` is the only way to write. One process only (the
    daemon's lock).

    A missing file is created only if nothing is left of an earlier one, or with `new`. If the file is removed while
    open, it is restored before the next commit is acknowledged.
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
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                script = MIGRATIONS.get(version, TABLES)
                self._connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {VERSION}; COMMIT;")
            self._identity = self._on_disk()

    def _check_nothing_was_lost(self, new: bool) -> None:
        """Raise `StoreDamaged` if the database is missing or empty, but its copies, logs or jobs exist."""
        copies = self._copies()
        jobs = len([place for place in (self.file.parent / JOBS).glob("*") if place.name.isdigit()])
        logs = [log for log in self._logs() if log.exists() and log.stat().st_size]
        left = [f"the files of {jobs} jobs"] * bool(jobs) + [f"{len(copies)} copies of it"] * bool(copies)
        left += [f"its log {log.name}" for log in logs]
        if left and not new:
            state = "is empty" if self.file.exists() else "is missing"
            how = f"{self._going_back(copies[-1])}. " if copies else ""
            raise StoreDamaged(
                f"the database {self.file} {state}, but {' and '.join(left)} are there; nothing was changed. "
                f"{how}To start again without those jobs: ullage serve --new-database"
            )
        for log in logs:  # SQLite would delete it
            log.rename(log.with_name(f"{log.name}.aside-{_stamp()}"))

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.file, isolation_level=None, timeout=10.0, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted data
        return connection

    def _check(self, new: bool) -> None:
        """Check the file through a read-only connection, since a damaged file must stay unchanged."""
        if new:
            raise InvalidValue(
                f"--new-database: a database already exists ({self.file}); nothing was changed. "
                f"To set it aside first: {self._aside()}"
            )
        with contextlib.closing(sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True)) as reader:
            problem = str(reader.execute("PRAGMA integrity_check(1)").fetchone()[0])
            version = reader.execute("PRAGMA user_version").fetchone()[0]
            is_empty = reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        if problem != "ok":
            raise self._damaged(problem.splitlines()[-1])
        if version not in (VERSION, *MIGRATIONS) and not is_empty:
            raise StoreDamaged(
                f"{self.file} must be a database of this version of Ullage (it has version {version}, this one reads "
                f"{VERSION}); nothing was changed. Install the version that wrote it, or start again: "
                f"{self._aside()} && ullage serve --new-database"
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes or none; they are on disk at the end. A nested transaction is part of the outer one."""
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
        return self._open

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        """Run a statement; one that writes must be within a transaction."""
        return self._connection.execute(statement, values)

    def write(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """Run statements in one transaction, each once for each of its rows of values."""
        with self.transaction():
            for statement, rows in statements:
                self._connection.executemany(statement, rows)

    def rows(self, statement: str, values: Any = ()) -> list[sqlite3.Row]:
        """Return the rows of a query, from committed data. Thread-safe."""
        with self._explained():
            return self._reader().execute(statement, values).fetchall()

    def _reader(self) -> sqlite3.Connection:
        writer, reader = getattr(self._reading, "of", (None, None))
        if reader is None or writer is not self._connection:  # the writer may have another file by now
            reader = sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            reader.row_factory = sqlite3.Row
            self._reading.of = (self._connection, reader)
            self._readers.append(reader)
        return reader

    def _on_disk(self) -> tuple[tuple[int, int] | None, ...]:
        """Return the identities of the files that are now at our paths: the database and its log."""
        identities: list[tuple[int, int] | None] = []
        for file in (self.file, self._logs()[0]):
            try:
                status = file.stat()
                identities.append((status.st_dev, status.st_ino))
            except OSError:
                identities.append(None)
        return tuple(identities)

    def _keep_in_place(self) -> None:
        """Restore our files if they were removed, so that the commit is safe. Another file in their place stays."""
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

    def back_up(self) -> Path:
        """Make a consistent copy next to the database, and delete old copies except `kept_copies`."""
        self.backups.mkdir(mode=0o700, exist_ok=True)
        target = self.backups / f"state-{_stamp()}.db"
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
        """Close all connections, which moves the log into the database; a second call does nothing."""
        for reader in self._readers:
            reader.close()
        self._connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY):
                raise DiskFull(
                    f"nothing was written: {self.file} cannot grow ({error}). Make room on that disk and try again"
                ) from error
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise DiskFull(f"nothing was written: {error.strerror} ({error.filename})") from error
            raise
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
                raise
            raise self._damaged(str(error)) from error

    def _damaged(self, problem: str) -> StoreDamaged:
        copies = self._copies()
        how = (
            self._going_back(copies[-1], f"{self._aside()} && ")
            if copies
            else f"It has no copy yet. To start again: {self._aside()} && ullage serve --new-database"
        )
        return StoreDamaged(f"the database {self.file} is damaged ({problem}); nothing was changed. {how}")

    def _copies(self) -> list[Path]:
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
    """Return the copies to keep, by the dates in their names: the newest three, the newest of each of the last seven
    days with one, and the newest of each of the last four weeks. Many starts in an hour remove no older copy.

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
    """Flush a file to disk or, for a folder, the creations and renames in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
