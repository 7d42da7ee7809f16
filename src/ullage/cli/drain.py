"""`ullage drain`: give a GPU no new jobs; those that are there go on."""

from __future__ import annotations

from typing import Annotated

import typer

from ullage.cli.job_client import client, print_json
from ullage.cli.options import Json


def drain(
    gpu: Annotated[str, typer.Argument(help="The GPU, by its index or its UUID.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why, for those who read it.")] = "",
    as_json: Json = False,
) -> None:
    """Give a GPU no new jobs; those that are there go on.

    Example:

      ullage drain 2 --reason "the fan is loud"
    """
    answer = client().call("drain", gpu=gpu, reason=reason)
    if as_json:
        print_json(answer)
    else:
        print(f"GPU {answer['index']} ({answer['gpu']}) gets no new jobs")
