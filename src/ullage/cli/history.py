"""`ullage history`: jobs that are over, with the time they waited, ran and took in all."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import typer

from ullage.cli.job_client import client, label, print_json
from ullage.cli.options import Json
from ullage.units import format_duration


def history(
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many.", min=1)] = 20,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Only this user's jobs.")] = None,
    as_json: Json = False,
) -> None:
    """Show jobs that are over, the last one first.

    Examples:

      ullage history

      ullage history -n 1000 --json
    """
    jobs = client().call("history", limit=limit, user=user)
    if as_json:
        print_json(jobs)
        return
    from rich.console import Console

    Console().print(_table(jobs) if jobs else "no job is over yet")


def _table(jobs: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("job", "user", "name", "state", "ended", "waited", "ran", "in all", "why it ended"):
        table.add_column(name, justify="right" if name in ("waited", "ran", "in all") else "left", no_wrap=True)
    table.columns[-1].no_wrap = False
    for job in jobs:
        ended = datetime.datetime.fromtimestamp(job["ended"]).strftime("%m-%d %H:%M:%S")
        cause = job["cause"] or ""
        more = job["detail"] or ""
        words = cause if job["state"] == "done" or more == cause else f"{cause}: {more}" if cause else more
        table.add_row(
            label(job), job["user"], Text(job["name"]), job["state"], ended, format_duration(job["waited"]),
            format_duration(job["ran"]), format_duration(job["completion"]), Text(words),
        )  # fmt: skip
    return table
