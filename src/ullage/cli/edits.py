"""`ullage edit`: other terms for a job that waits, and another run of one that runs or is over."""

from __future__ import annotations

import os
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.job_options import NONE, given, with_job_options
from ullage.cli.jobs import client, print_each
from ullage.cli.options import Json, argument, option
from ullage.errors import InvalidValue
from ullage.jobs.job_files import EDITABLE
from ullage.units import parse_bytes


@with_job_options((name for name in EDITABLE if name not in ("requeue", "estimator")), editing=True)
def edit(
    jobs: Annotated[
        list[str],
        argument(
            "The jobs: numbers (17), places in an array (12_3), whole arrays (12_all) or names.",
            "JOB",
            complete=completion.jobs_to_requeue,
        ),
    ],
    hold: Annotated[bool, option("Keep waiting jobs, or those to --requeue, from starting.", "--hold")] = False,
    release: Annotated[bool, option("Let held jobs start.", "--release")] = False,
    requeue: Annotated[
        bool, option("Run finished or running jobs again; can be combined with --hold and --memory.", "--requeue")
    ] = False,
    never_again: Annotated[bool, option("Never start the job a second time.", "--no-requeue")] = False,
    as_json: Json = False,
    **fields: Any,
) -> None:
    """Change, hold, release or requeue jobs.

    Changes only the named settings of waiting jobs. --requeue runs a finished job again under its number, with this
    shell's environment variables if its own are gone. It stops a running job first, and refuses one submitted with
    --no-requeue.

    Examples:

      ullage edit 17 --time-limit 4h --priority -5
      ullage edit 17 --memory none --after none
      ullage edit 12_all --throttle 4
      ullage edit 12_all --hold
      ullage edit 12_all --release
      ullage edit 17 --requeue --memory 12GiB
    """
    changes = given(fields) | ({"requeue": False} if never_again else {})
    if requeue:
        memory = changes.pop("memory", None)
        size = None if memory is None else parse_bytes(memory)
        _check_one(release=release, changes=bool(changes), with_="--requeue")
        print_each(client().requeue(*jobs, hold=hold, env=dict(os.environ), memory=size), as_json)
        return
    if hold or release:
        _check_one(release=hold and release, changes=bool(changes), with_="--hold" if hold else "--release")
        print_each(client().hold(*jobs) if hold else client().release(*jobs), as_json)
        return
    if not changes:
        raise InvalidValue("needed something to change, such as --time-limit 4h; 'ullage edit --help' lists it")
    for name, value in changes.items():
        if value in (NONE, [NONE]) and name != "name":
            changes[name] = [] if name == "after" else None
    print_each(client().edit(*jobs, **changes), as_json)


def _check_one(release: bool, changes: bool, with_: str) -> None:
    if release or changes:
        raise InvalidValue(f"needed {with_} alone; found {'--release' if release else 'something to change'} too")
