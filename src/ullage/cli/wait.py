"""`ullage wait`: until jobs are over."""

from __future__ import annotations

from typing import Annotated

import typer

from ullage.cli.job_client import JobNumbers, client
from ullage.cli.options import Json
from ullage.cli.waiting import exit_code, tell, wait_for
from ullage.units import parse_duration


def wait(
    jobs: JobNumbers,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after so long, such as 90s or 2h.", metavar="TIME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until jobs are over. Exits 0 if all are done, else with the job's own exit code, or 1.

    Examples:

      ullage wait 17

      ullage wait 12_all --timeout 2h
    """
    found = wait_for(client(), jobs, None if timeout is None else parse_duration(timeout))
    tell(found, as_json)
    raise typer.Exit(exit_code(found))
