"""Tables of jobs, with columns by name: wrapped and in a pager for people, plain values with tabs for programs."""

import datetime
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.cli.tables import aligned, text_width
from ullage.errors import UnknownName
from ullage.manager.job_words import Job, memory, reference, why
from ullage.text import plain
from ullage.units import format_duration

_NARROWEST, _SHORTEST_NAME, _LONGEST_NAME, _INDENT = 30, 8, 24, "    "


@dataclass(frozen=True)
class JobColumn:
    """A column: its heading, its text for people, and its value for programs."""

    head: str
    text: Callable[[Job], str]
    value: Callable[[Job], Any]
    right: bool = False


def _state(job: Job) -> str:
    return str(job["state"]) if job.get("jobs", 1) == 1 else f"{job['state']} {job['jobs']:,}"


def _time(job: Job) -> float:
    waits = job["alone"] is None and job["ended"] is None
    return float((job["waited"] if waits else job["ran"]) or 0.0)


def _as_it_is(head: str, name: str, text: Callable[[Any], str] = str, right: bool = False) -> JobColumn:
    """Return a column of one value of a job; unknown values are empty."""
    return JobColumn(head, lambda job: "" if job[name] is None else text(job[name]), lambda job: job[name], right)


def _of(job: Job, name: str) -> float | None:
    """Return a figure of a job's activity on a GPU."""
    return job["utilization"][name] if job.get("utilization") else None


def _known(job: Job, name: str, text: Callable[[float], str]) -> str:
    value = _of(job, name)
    return "" if value is None else text(value)


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")


COLUMNS: dict[str, JobColumn] = {
    "id": JobColumn("job", reference, reference),
    "name": _as_it_is("name", "name"),
    "user": _as_it_is("user", "user"),
    "state": JobColumn("state", _state, lambda job: job["state"]),
    "jobs": JobColumn("jobs", lambda job: f"{job.get('jobs', 1):,}", lambda job: job.get("jobs", 1), right=True),
    "priority": _as_it_is("priority", "priority", right=True),
    "gpus": _as_it_is("GPUs", "gpus", right=True),
    "cores": _as_it_is("cores", "cores", right=True),
    "promise": JobColumn("promise", lambda job: memory(job["promise"]), lambda job: job["promise"], right=True),
    "used": _as_it_is("used", "used", memory, right=True),
    "step": JobColumn("step", lambda job: _known(job, "step_s", format_duration), lambda job: _of(job, "step_s"), True),
    "smact": JobColumn("SMACT", lambda job: _known(job, "smact", "{:.0%}".format), lambda job: _of(job, "smact"), True),
    "speed": _as_it_is("speed", "speed", "{:.0%}".format, right=True),
    "where": JobColumn("GPU", lambda job: ",".join(map(str, job["places"])), lambda job: ",".join(job["gpus_used"])),
    "time": JobColumn("time", lambda job: format_duration(round(_time(job))), _time, right=True),
    "submitted": _as_it_is("submitted", "submitted", _moment),
    "started": _as_it_is("started", "started", _moment),
    "ended": _as_it_is("ended", "ended", _moment),
    "waited": _as_it_is("waited", "waited", format_duration, right=True),
    "ran": _as_it_is("ran", "ran", format_duration, right=True),
    "took": _as_it_is("in all", "completion", format_duration, right=True),
    "exit": _as_it_is("exit", "exit_code", right=True),
    "estimate": _as_it_is("estimate", "estimate"),
    "why": JobColumn("why", why, why),
}
QUEUE = "id,user,name,state,gpus,promise,time,why"
OVER = "id,user,name,state,ended,waited,ran,why"
FORMAT_HELP = f"Columns to show: {', '.join(COLUMNS)}."


def chosen(names: str) -> list[str]:
    chosen_names = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen_names:
        if name not in COLUMNS:
            raise UnknownName("column", name, COLUMNS, hint="columns: " + ", ".join(COLUMNS))
    return chosen_names or list(COLUMNS)


def show(jobs: Sequence[Job], names: Sequence[str], foot: str = "") -> None:
    """Print jobs: to a terminal as a table, through a pager if long; otherwise as a line for each, with tabs."""
    if sys.stdout.isatty():
        text = table(jobs, names, shutil.get_terminal_size().columns)
        page(text + (f"\n{foot}" if foot else ""))
        return
    for job in jobs:
        print("\t".join(_value(COLUMNS[name].value(job)) for name in names))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "" if value is None else plain(str(value))


def table(jobs: Sequence[Job], names: Sequence[str], width: int) -> str:
    """Return jobs as a table. A last column `why` is wrapped, or moves below each job if there is no room."""
    last = names[-1] == "why"
    columns = [COLUMNS[name] for name in names]
    rows = [[column.head for column in columns]] + [[plain(column.text(job)) for column in columns] for job in jobs]
    fixed = len(columns) - last
    widths = [max(map(text_width, cells)) for cells in zip(*rows, strict=True)]
    for name in [name for name in ("name", "user") if name in names]:  # dropped if there is little room
        place = names.index(name)
        others = sum(widths[:fixed]) - widths[place] + 2 * fixed
        most = min(max(width - others, _SHORTEST_NAME), _LONGEST_NAME)
        rows = [
            [_shortened(cell, most) if number == place else cell for number, cell in enumerate(row)] for row in rows
        ]
        widths[place] = min(widths[place], most)
    room = width - sum(widths[:fixed]) - 2 * fixed
    lines: list[str] = []
    for row in rows:
        line = aligned(row[:fixed], widths[:fixed], [column.right for column in columns[:fixed]])
        if not last:
            lines.append(line.rstrip())
        elif room >= min(_NARROWEST, widths[-1]):
            words = _wrapped(row[-1], room)
            lines.append(f"{line}  {words[0]}".rstrip() if fixed else words[0])
            lines += [" " * (width - room) + word for word in words[1:]]
        else:
            lines.append(line.rstrip())
            if row is not rows[0]:
                lines += [_INDENT + word for word in _wrapped(row[-1], max(_NARROWEST, width - len(_INDENT)))]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) or [""]


def _shortened(name: str, most: int) -> str:
    if text_width(name) <= most:
        return name
    while text_width(name) >= most:
        name = name[:-1]
    return name + "…"


def page(text: str) -> None:
    """Print a text, through a pager if it does not fit the terminal, as git does (PAGER=cat: no pager)."""
    pager = shlex.split(os.environ.get("PAGER", "less"))
    if not sys.stdout.isatty() or text.count("\n") < shutil.get_terminal_size().lines - 1 or not pager:
        print(text)
        return
    try:
        subprocess.run(pager, input=text + "\n", text=True, env={"LESS": "FRX", **os.environ}, check=False)
    except OSError:
        print(text)
