"""`ullage report`: what jobs took, as a table, CSV, JSON or a picture."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import client, print_json
from ullage.cli.options import Json
from ullage.cli.tables import aligned, text_width
from ullage.errors import InvalidValue
from ullage.manager.report_words import COLUMNS, cells_of, csv_of, failures, moment, sums_of
from ullage.text import plain

_MAY_BE_EMPTY = ("core hours", "energy")
_GIVE_WAY = ("core hours", "energy", "90 %", "by part", "promised", "used")  # in a narrow terminal, the first one first


def report(
    by: Annotated[
        str, typer.Option(help="What rows are for: user, day, name, gpu, or several of them.", metavar="KEYS",
                          autocompletion=completion.report_keys)
    ] = "user,day",
    since: Annotated[
        str, typer.Option(help="From when: a date (2026-11-01), a time (2026-11-01T08:00), or how long ago (7d, 12h).",
                          metavar="TIME")
    ] = "7d",
    until: Annotated[
        str | None, typer.Option(help="Until when, in the same way.", metavar="TIME", show_default="now")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-u", help="Show only the jobs of this user.", metavar="NAME")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the GPU hours as bars into this file.", metavar="FILE.svg")
    ] = None,
) -> None:  # fmt: skip
    """Show what jobs took: GPU hours, memory promised and used, energy, waiting and failures.

    "by part" counts each GPU by the part of its memory that was promised. "promised" and "used" are means over time, of
    jobs whose use was seen. "waited" is the median, and what 90 % of the jobs did not exceed. Operators see all users.
    Others see their own jobs, and more if the server's settings say so.

    Examples:

      ullage report
      ullage report --by user --since 30d
      ullage report --by day,gpu --since 2026-11-01 --until 2026-12-01 --csv
      ullage report --by day,user --plot hours.svg
    """
    if as_csv and as_json:
        raise InvalidValue("needed --csv or --json; found both")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise InvalidValue(f"--plot: needed the name of an SVG file; found {str(plot)!r}")
    now = time.time()
    keys = [key.strip() for key in by.split(",")]
    found = client().report(keys, moment(since, now), None if until is None else moment(until, now), user)
    if plot is not None:
        _write(plot, draw(found))
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


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"--plot: {file} cannot be written: {error.strerror}") from None


# The picture: a bar for each value of the first key (days, where there are days), stacked by the second one.

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
_REST = "#bbbbbb"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 900, 360, 60, 40, 60, 180


def draw(found: dict[str, Any]) -> str:
    """The GPU hours of a report as SVG."""
    across, stacked, hours, names = sums_of(found)
    colours = {name: _COLOURS[place] if place < len(_COLOURS) else _REST for place, name in enumerate(names)}
    title = f"GPU hours by {' and '.join(filter(None, (across, stacked)))}"
    body = [_text(_LEFT, 24, title, size=16), *_bars(hours, names, colours)]
    if stacked is not None:
        body += _legend(names, colours)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "".join(body)
        + "</svg>\n"
    )


def _bars(hours: dict[str, dict[str, float]], names: list[str], colours: dict[str, str]) -> list[str]:
    most = max((sum(bar.values()) for bar in hours.values()), default=0.0) or 1.0
    tall, wide = _HEIGHT - _TOP - _BOTTOM, _WIDTH - _LEFT - _LEGEND
    parts = []
    for part in (0.0, 0.5, 1.0):
        y = _TOP + tall * (1 - part)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{most * part:.3g}", anchor="end"))
    step = wide / max(len(hours), 1)
    every = max(1, round(len(hours) * 75 / wide))  # so that the words below do not run into each other
    for place, (label, bar) in enumerate(hours.items()):
        x, y = _LEFT + place * step, float(_TOP + tall)
        for name in names:
            height = tall * bar.get(name, 0.0) / most
            y -= height
            if height:
                parts.append(
                    f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{height:.1f}" '
                    f'fill="{colours[name]}"><title>{escape(f"{label} {name}")}: {bar[name]:.2f}</title></rect>'
                )
        if place % every == 0:
            parts.append(_text(x + step / 2, _HEIGHT - _BOTTOM + 20, label[:24], anchor="middle"))
    return parts


def _legend(names: list[str], colours: dict[str, str]) -> list[str]:
    shown = names[: len(_COLOURS)] + ([f"{len(names) - len(_COLOURS)} more"] if len(names) > len(_COLOURS) else [])
    parts, x = [], _WIDTH - _LEGEND + 20
    for place, name in enumerate(shown):
        y = _TOP + place * 22
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colours.get(name, _REST)}"/>')
        parts.append(_text(x + 18, y + 11, name[:20]))
    return parts


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"
