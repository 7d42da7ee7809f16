"""`ullage release`: let held jobs go on."""

from __future__ import annotations

from ullage.cli.job_client import JobNumbers, client, print_each
from ullage.cli.options import Json


def release(jobs: JobNumbers, as_json: Json = False) -> None:
    """Let held jobs go on.

    Examples:

      ullage release 17

      ullage release 12_all
    """
    print_each(client().call("release", jobs=jobs), as_json)
