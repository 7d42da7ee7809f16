"""`ullage queue`: jobs that are not over, where they run and why they wait."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ullage.cli.job_client import client, label, memory, print_json
from ullage.cli.options import Json
from ullage.units import format_duration


def queue(
    user: Annotated[str | None, typer.Option("--user", "-u", help="Only this user's jobs.")] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="The GPUs too: what is used, promised and left.")] = False,
    as_json: Json = False,
) -> None:
    """Show jobs that wait or run.

    Examples:

      ullage queue

      ullage queue --user ada --gpus
    """
    daemon = client()
    jobs = daemon.call("queue", user=user)
    cards = daemon.call("gpus")
    if as_json:
        print_json({"jobs": jobs, "gpus": cards} if gpus else jobs)
        return
    from rich.console import Console

    console = Console()
    console.print(_job_table(jobs, {card["id"]: card["index"] for card in cards}) if jobs else "no jobs wait or run")
    if gpus:
        console.print(_gpu_table(cards))


def _job_table(jobs: list[dict[str, Any]], index: dict[str, int]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("job", "user", "name", "state", "GPU", "needs", "time", "why it waits, or where"):
        table.add_column(name, justify="right" if name in ("GPU", "needs", "time") else "left", no_wrap=name != "name")
    table.columns[-1].no_wrap = False
    for job in jobs:
        places = ", ".join(f"GPU {index.get(place, place)}" for place in job["gpus_used"])
        waits = not places
        words = job["reason"] if waits else f"on {places}" + (", alone" if job["alone"] else "")
        again = "again, " if job["recovery"] and waits else ""
        seconds = job["waited"] if waits else job["ran"]
        table.add_row(
            label(job), job["user"], Text(job["name"]), job["state"], str(job["gpus"]), memory(job["need"]),
            format_duration(round(seconds or 0.0)), Text(f"{again}{words or ''}"),
        )  # fmt: skip
    return table


def _gpu_table(cards: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("GPU", "name", "memory", "used", "promised", "left", "jobs", ""):
        table.add_column(name, justify="right" if name in ("GPU", "memory", "used", "promised", "left") else "left")
    for card in cards:
        state = "lost" if card["lost"] else "drained" if card["drained"] else ""
        table.add_row(
            str(card["index"]), card["name"], memory(card["total"]), memory(card["used"]), memory(card["promised"]),
            memory(card["free"]), " ".join(map(str, card["jobs"])), f"{state} {card['drain_reason'] or ''}".strip(),
        )  # fmt: skip
    return table
