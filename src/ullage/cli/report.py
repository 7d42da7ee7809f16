"""`ullage report`: what jobs took, as a table, CSV or JSON."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from itertools import zip_longest
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.jobs import User, client, print_json
from ullage.cli.options import MOMENT_FORMS, Json, option
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue
from ullage.manager.report_words import COLUMNS, cells_of, csv_of, failures, moment
from ullage.text import plain

_MAY_BE_EMPTY = ("core hours", "energy")
_GIVE_WAY = ("core hours", "energy", "90 %", "by part", "promised", "used")  # in a narrow terminal, the first one first


def report(
    by: Annotated[
        str, option("Group rows by user, day, name, gpu, or several.", "KEYS", complete=completion.report_keys)
    ] = "user,day",
    since: Annotated[str, option(f"Start: {MOMENT_FORMS}.", "TIME")] = "7d",
    until: Annotated[str | None, option("End, in the same form.", "TIME", default="now")] = None,
    user: User = None,
    as_csv: Annotated[bool, option("Print CSV.", "--csv")] = False,
    as_json: Json = False,
) -> None:
    """Report usage: GPU hours, memory, energy, waiting times and failures.

    "by part" weights each GPU by the promised part of its memory. "promised" and "used" are means over time. "waited"
    is the median and the 90th percentile. Operators see all users; others see their own jobs, and more if the daemon's
    settings allow it.

    Examples:

      ullage report --by user --since 30d
      ullage report --by day,gpu --since 2026-11-01 --until 2026-12-01 --csv
    """
    if as_csv and as_json:
        raise InvalidValue("--csv and --json exclude each other, got both; leave one out")
    now = time.time()
    keys = [key.strip() for key in by.split(",")]
    found = client().report(keys, moment(since, now), None if until is None else moment(until, now), user)
    if as_json:
        print_json(found)
    elif as_csv:
        print(csv_of(found), end="")
    else:
        _print_table(found)


def _print_table(found: dict[str, Any]) -> None:
    moments = (datetime.datetime.fromtimestamp(found[name]) for name in ("since", "until"))
    span = " to ".join(each.strftime("%Y-%m-%d %H:%M") for each in moments)
    if not found["rows"]:
        print(f"no jobs ran from {span}")
        return
    print(span)
    print(table(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def table(found: dict[str, Any], width: int | None) -> str:
    """Return the report as a table, without unused and unknown figures and the columns that do not fit the width."""
    rows, keys = found["rows"], found["by"]
    lines = [[plain(str(row[key])) for key in keys] + cells_of(row) for row in rows]
    if len(rows) > 1:
        lines.append(["total"] + [""] * (len(keys) - 1) + cells_of(found["total"]))
    columns = zip([*keys, *COLUMNS], *lines, strict=True)
    shown = [column for column in columns if column[0] not in _MAY_BE_EMPTY or {*column[1:]} - {"0.00", "unknown"}]
    heads, *cells = zip(*shown, strict=True)
    give_way = [name for name in _GIVE_WAY if name in heads]
    head, *text = fitted(heads, cells, give_way=give_way, left=keys, width=width or sys.maxsize).split("\n")
    with_failures = [head]
    for line, row in zip_longest(text, rows):  # after the rows come the total, and a note
        with_failures += [line, f"    {failures(row['failures'])}"] if row and row["failures"] else [line]
    return "\n".join(with_failures)
