"""`ullage report`: what jobs took, as a table, CSV or JSON."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.jobs import User, client, print_json
from ullage.cli.options import MOMENT_FORMS, Json, option
from ullage.cli.tables import aligned, text_width
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
        raise InvalidValue("needed --csv or --json; found both")
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
    span = " to ".join(datetime.datetime.fromtimestamp(found[end]).strftime("%Y-%m-%d %H:%M") for end in _SPAN)
    if not found["rows"]:
        print(f"no jobs ran from {span}")
        return
    print(span)
    print(table(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def table(found: dict[str, Any], width: int | None) -> str:
    """The report as a table, without what nobody used or knows, and what a narrow terminal has no room for."""
    rows, keys = found["rows"], found["by"]
    lines = [[plain(str(row[key])) for key in keys] + cells_of(row) for row in rows]
    if len(rows) > 1:
        lines.append(["total"] + [""] * (len(keys) - 1) + cells_of(found["total"]))
    heads = [*keys, *COLUMNS]
    empty = [heads.index(name) for name in _MAY_BE_EMPTY]
    shown = [
        place
        for place in range(len(heads))
        if place not in empty or {line[place] for line in lines} - {"0.00", "unknown"}
    ]
    sizes = [max(map(text_width, column)) for column in zip(heads, *lines, strict=True)]
    missing = []
    for name in _GIVE_WAY:
        wide = sum(sizes[place] + 2 for place in shown) - 2
        if width is not None and wide > width and heads.index(name) in shown:
            shown.remove(heads.index(name))
            missing.append(name)
    widths, right = [sizes[place] for place in shown], [place >= len(keys) for place in shown]
    text = []
    for number, cells in enumerate((heads, *lines)):
        text.append(aligned([cells[place] for place in shown], widths, right).rstrip())
        row = rows[number - 1] if 0 < number <= len(rows) else None
        if row is not None and row["failures"]:
            text.append(f"    {failures(row['failures'])}")
    if missing:
        text.append(f"(no room for {', '.join(missing)}; --csv has all)")
    return "\n".join(text)


_SPAN = ("since", "until")
