"""Reads trace files, compressed or not, and the cells of tables, with errors that name the line."""

import csv
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from ullage.errors import InvalidValue, UllageError
from ullage.units import MIB, parse_bytes, parse_duration

_T = TypeVar("_T")
_HEAD = 1 << 16  # characters that are enough to recognise a format
_PACKED = {".gz": "a gzip", ".xz": "an xz"}
_ABSENT = frozenset(("", "nan", "none", "null", "na"))


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    openers: dict[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with io.TextIOWrapper(openers.get(path.suffix, open)(path, "rb"), encoding="utf-8-sig", newline="") as file:
            yield file
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError):
        raise InvalidValue(f"{path} is not {_PACKED[path.suffix]} file, or it is damaged") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{path} must be a trace of jobs (CSV or JSON), but it is not text") from None
    except csv.Error as error:
        raise InvalidValue(f"{path} is not CSV: {error}") from None
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path) -> Any:
    with opened(path) as file:
        try:
            return json.load(file)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None


def check_target(path: Path, kind: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse a file that cannot be written, or that exists and is not of this kind."""
    if not path.parent.is_dir():
        raise InvalidValue(f"cannot write {path}: there is no folder {path.parent}")
    try:
        ours = not path.exists() or is_ours(head(path))
    except InvalidValue:
        ours = False
    if not ours:
        raise InvalidValue(f"{path} is not a {kind}, so it was not changed; name another file")


def write_file(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidValue(f"cannot write {path}: {error.strerror}") from None


def head(path: Path) -> str:
    with opened(path) as file:
        return file.read(_HEAD)


def first_row(text: str) -> list[str]:
    return [name.strip() for name in next(csv.reader(text.splitlines()[:1]), [])]


def has_columns(*names: str) -> Callable[[str], bool]:
    """Return a function that checks whether the first line of a text names these columns."""
    return lambda text: set(names) <= set(first_row(text))


class TraceRow:
    """A row of a table: cells by column. Errors name its place `where` (file and line) and the column."""

    __slots__ = ("_columns", "_values", "where")

    def __init__(self, where: str, columns: Mapping[str, int], values: Sequence[str]) -> None:
        self.where, self._columns, self._values = where, columns, values

    def text(self, column: str, default: str | None = None) -> str:
        """Return a cell's text; without `default` it must not be empty."""
        place = self._columns.get(column)
        value = "" if place is None or place >= len(self._values) else self._values[place].strip()
        if value.casefold() not in _ABSENT:
            return value
        if default is None:
            raise self.wrong(f"{column} must have a value, {f'got {value!r}' if value else 'but it is empty'}")
        return default

    def has(self, column: str) -> bool:
        return bool(self.text(column, ""))

    def number(self, column: str, default: float | None = None) -> float:
        text = self.text(column, None if default is None else "")
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.wrong(f"{column} must be a number, got {text!r}")
        return value

    def whole(self, column: str, default: int | None = None) -> int:
        value = self.number(column, default)
        if value != int(value):
            raise self.wrong(f"{column} must be a whole number, got {self.text(column)!r}")
        return int(value)

    def bytes(self, column: str) -> int:
        return self._parsed(parse_bytes, column)

    def seconds(self, column: str) -> float:
        return self._parsed(parse_duration, column)

    def is_dated(self, column: str) -> bool:
        return bool(re.match(r"\d{4}-\d\d-\d\d", self.text(column)))

    def moment(self, column: str) -> float:
        """Return seconds, from a number or from a date and time such as 2026-03-01T08:00:00 (UTC by default)."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            try:
                value = seconds_of(text)
            except ValueError:
                value = math.nan
        if not math.isfinite(value):
            needed = "a number of seconds or a time such as 2026-03-01T08:00:00"
            raise self.wrong(f"{column} must be {needed}, got {text!r}")
        return value

    def mebibytes(self, column: str) -> int | None:
        return round(self.number(column) * MIB) if self.has(column) else None

    def wrong(self, words: str) -> InvalidValue:
        return InvalidValue(f"{self.where}: {words}")

    def _parsed(self, parse: Callable[[str], _T], column: str) -> _T:
        text = self.text(column)
        try:
            return parse(text)
        except UllageError as error:
            raise self.wrong(f"{column}: {error}") from None


def seconds_of(text: str) -> float:
    """Return the seconds since 1970 of a date and time (UTC by default).

    >>> seconds_of("1970-01-02 00:00:01")
    86401.0
    """
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def table(path: Path, needed: Iterable[str], columns: Sequence[str] | None = None) -> Iterator[TraceRow]:
    """Yield the rows of a CSV file; `columns` are the names if its first line has none."""
    with opened(path) as file:
        rows = csv.reader(file)
        names = [name.strip() for name in next(rows, [])] if columns is None else list(columns)
        missing = [name for name in needed if name not in names]
        if missing:
            columns_there = ", ".join(names) or "an empty file"
            raise InvalidValue(f"{path}, line 1: the columns must include {missing[0]}, got {columns_there}")
        places = {name: place for place, name in enumerate(names)}
        for row in rows:
            if row:
                yield TraceRow(f"{path}, line {rows.line_num}", places, row)


def left_out(count: int) -> list[str]:
    return [f"{jobs_are(count)} left out: without GPUs, or without a known run time"] if count else []


def jobs_are(count: int) -> str:
    """Return a number of jobs in words, with the verb.

    >>> jobs_are(1), jobs_are(2000)
    ('1 job is', '2,000 jobs are')
    """
    return "1 job is" if count == 1 else f"{count:,} jobs are"
