"""`ullage resume`: give a drained GPU new jobs again."""

from __future__ import annotations

from typing import Annotated

import typer

from ullage.cli.job_client import client, print_json
from ullage.cli.options import Json


def resume(
    gpu: Annotated[str, typer.Argument(help="The GPU, by its index or its UUID.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Give a drained GPU new jobs again.

    Example:

      ullage resume 2
    """
    answer = client().call("resume", gpu=gpu)
    if as_json:
        print_json(answer)
    else:
        print(f"GPU {answer['index']} ({answer['gpu']}) gets jobs again")
