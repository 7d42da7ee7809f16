"""`ullage edit`: other terms for a job that waits, and another run of one that runs or is over."""

from __future__ import annotations

import os
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.job_options import NONE, given, job_options
from ullage.cli.jobs import JOBS_HELP, client, print_each
from ullage.cli.options import Json, argument, option, with_options
from ullage.errors import InvalidValue
from ullage.jobs.job_files import EDITABLE
from ullage.units import parse_bytes


@with_options(job_options(set(EDITABLE) - {"requeue", "estimator"}))
def edit(
    jobs: Annotated[list[str], argument(JOBS_HELP, "JOB", completion.jobs_to_requeue)],
    hold: Annotated[bool, option("Do not start the jobs, also after --requeue.", "--hold")] = False,
    release: Annotated[bool, option("Let held jobs start.", "--release")] = False,
    requeue: Annotated[bool, option("Run finished or running jobs again.", "--requeue")] = False,
    never_again: Annotated[bool, option("Never start the job a second time.", "--no-requeue")] = False,
    as_json: Json = False,
    **fields: Any,
) -> None:
    """Change, hold, release or requeue jobs.

    Changes only waiting jobs, and only the options you give. 'none' resets an option. --requeue stops a running job,
    then runs it again under its number; it combines only with --hold and --memory.

    Examples:

      ullage edit 17 --time-limit 4h --memory none
      ullage edit 12_all --hold
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
        raise InvalidValue("edit needs an option to change, got none; type: ullage edit 17 --time-limit 4h")
    for name, value in changes.items():
        if value in (NONE, [NONE]) and name != "name":
            changes[name] = [] if name == "after" else None
    print_each(client().edit(*jobs, **changes), as_json)


def _check_one(release: bool, changes: bool, with_: str) -> None:
    if release or changes:
        raise InvalidValue(f"{with_} must stand alone, got {'--release' if release else 'other changes'} too")
