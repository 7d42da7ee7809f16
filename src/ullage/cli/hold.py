"""`ullage hold`: keep waiting jobs from starting."""

from __future__ import annotations

from ullage.cli.job_client import JobNumbers, client, print_each
from ullage.cli.options import Json


def hold(jobs: JobNumbers, as_json: Json = False) -> None:
    """Keep waiting jobs from starting.

    Examples:

      ullage hold 17

      ullage hold 12_all
    """
    print_each(client().call("hold", jobs=jobs), as_json)
