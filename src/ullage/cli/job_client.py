"""What commands that speak to the daemon share: the client, jobs as arguments, and answers in lines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage.manager.client import Client

JobNumber = Annotated[
    str, typer.Argument(help="A job: 17, 12_3 (of an array), or its name.", autocompletion=completion.jobs,
                        show_default=False, metavar="JOB")
]  # fmt: skip
JobNumbers = Annotated[
    list[str], typer.Argument(help="Jobs: 17, 12_3, 12_all (an array), or names.", autocompletion=completion.jobs,
                              show_default=False, metavar="JOB...")
]  # fmt: skip


def client() -> Client:
    """Who speaks to the daemon of this home."""
    from ullage.manager.client import Client

    return Client()


def print_json(answer: Any) -> None:
    """An answer of the daemon as it is."""
    print(json.dumps(answer))


def print_each(answers: list[dict[str, Any]], as_json: bool) -> None:
    """A line a job; exit code 1 if something could not be done for one of them."""
    if as_json:
        print_json(answers)
    else:
        for answer in answers:
            out = sys.stdout if answer["done"] else sys.stderr
            print(f"job {answer['job']} {answer['text']}" if answer["done"] else f"ullage: job {answer['job']}: "
                  f"{answer['text']}", file=out)  # fmt: skip
    if not all(answer["done"] for answer in answers):
        raise typer.Exit(1)


def memory(need: int | None) -> str:
    """A need in a table."""
    return "unknown" if need is None else format_bytes(need)


def label(job: dict[str, Any]) -> str:
    """A job's number in a table, with its place in an array."""
    return str(job["id"]) if job["array_id"] is None else f"{job['id']} ({job['array_id']}_{job['array_index']})"
