"""Files of measured rows for the command line: reads existing rows, and appends new ones as they come."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ullage.cli.progress import each
from ullage.errors import InvalidValue
from ullage.jobs.model import rows_so_far


def existing(path: str | Path | None) -> Path | None:
    """Return the path of a file from the command line; raise `InvalidValue` if there is no such file."""
    if path is not None and not Path(path).is_file():
        raise InvalidValue(f"cannot read {path}: no such file")
    return None if path is None else Path(path)


def say_left(done: int, left: int, what: str, out: Path) -> None:
    if done:
        Console(stderr=True).print(f"{done} {what} are already in {out}; {left} are left")


def measured_before(out: Path) -> set[str]:
    return {str(row.get("id")) for row in rows_so_far(out)}


def appended(rows: Iterable[dict[str, Any]], doing: str, count: int, out: Path) -> Iterator[dict[str, Any]]:
    """Yield rows, each appended to a file as it comes."""
    try:
        file = out.open("a")
    except OSError as error:
        raise InvalidValue(f"cannot write {out}: {error.strerror}") from None
    with file:
        for row in each(rows, doing, count):
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row


def check_file(path: Path | None) -> None:
    """Refuse a file that cannot be written, before an hour of work."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise InvalidValue(f"cannot write {path}: its folder must exist; type: mkdir -p {path.parent}")
