"""`ullage cancel`: take jobs out of the queue, or stop those that run (SIGTERM, then SIGKILL)."""

from __future__ import annotations

from ullage.cli.job_client import JobNumbers, client, print_each
from ullage.cli.options import Json


def cancel(jobs: JobNumbers, as_json: Json = False) -> None:
    """Take jobs out of the queue, or stop those that run (SIGTERM, then SIGKILL).

    Examples:

      ullage cancel 17 18

      ullage cancel 12_all
    """
    print_each(client().call("cancel", jobs=jobs), as_json)
