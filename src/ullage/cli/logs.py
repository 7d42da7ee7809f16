"""`ullage logs`: what a job prints."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ullage.cli.job_client import JobNumber, client, print_json
from ullage.cli.options import Json

_WAIT = 0.5  # seconds between two looks at an output that grows


def logs(
    job: JobNumber,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    errors: Annotated[bool, typer.Option("--stderr", "-e", help="Standard error instead of output.")] = False,
    attempt: Annotated[int | None, typer.Option(help="Of this attempt; the newest by default.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Show the output of a job, from its beginning; -f goes on as it grows, over attempts too.

    Examples:

      ullage logs 17

      ullage logs -f 17

      ullage logs 17 --stderr --attempt 1
    """
    daemon, stream = client(), "stderr" if errors else "stdout"
    if as_json:
        print_json(
            {
                "job": job,
                "stream": stream,
                "text": "".join(piece["text"] for piece in _all(daemon, job, attempt, stream)),
            }
        )
        return
    for piece in _following(daemon, job, attempt, stream) if follow else _all(daemon, job, attempt, stream):
        sys.stdout.write(piece["text"])
        sys.stdout.flush()


def _all(daemon: Any, job: str, attempt: int | None, stream: str) -> Any:
    offset = 0
    while True:
        piece = daemon.call("logs", job=job, attempt=attempt, stream=stream, offset=offset)
        if not piece["text"]:
            return
        yield piece
        attempt, offset = piece["attempt"], piece["offset"]


def _following(daemon: Any, job: str, attempt: int | None, stream: str) -> Any:
    """Until there will be no more. A new attempt begins a new file."""
    fixed, seen, offset = attempt, None, 0
    last = daemon.call("ping")["last_event"]
    while True:
        piece = daemon.call("logs", job=job, attempt=fixed or seen, stream=stream, offset=offset)
        if piece["text"]:
            yield piece
        seen, offset = piece["attempt"], piece["offset"]
        if not piece["over"] or fixed is not None:
            if piece["over"]:
                return
            if not piece["text"]:
                last = daemon.call("events", since=last, wait=_WAIT)["last"]
            continue
        newest = daemon.call("logs", job=job, stream=stream)
        if newest["attempt"] == seen and newest["over"] | (newest["offset"] <= offset):
            if _is_over(daemon, job):
                return
            last = daemon.call("events", since=last, wait=_WAIT)["last"]
        elif newest["attempt"] != seen:
            seen, offset = newest["attempt"], 0


def _is_over(daemon: Any, job: str) -> bool:
    return bool(daemon.call("status", job=job)[0]["ended"])
