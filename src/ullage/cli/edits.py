"""Commands that give jobs other terms: `ullage edit` a job that waits, `ullage requeue` one that runs or is over."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import JobNumbers, client, print_each
from ullage.cli.options import Json
from ullage.errors import InvalidValue
from ullage.units import parse_bytes

_NONE = "none"  # the word that takes a value back


def edit(
    jobs: JobNumbers,
    name: Annotated[str | None, typer.Option("--name", "-N", help="Name the job.", metavar="NAME")] = None,
    priority: Annotated[
        int | None, typer.Option(help="Jobs with a higher priority start first.", metavar="N")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.", metavar="N")] = None,
    memory: Annotated[
        str | None, typer.Option(help="GPU memory to promise the job on each GPU, such as 6GiB; none: estimate it.",
                                 metavar="SIZE")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Processor cores to promise the job.", metavar="N")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory to promise the job, such as 32GiB; none: the server's default.",
                                 metavar="SIZE")
    ] = None,
    exclusive: Annotated[
        bool | None, typer.Option("--exclusive/--shared", help="Give the job GPUs of its own, or let it share them.",
                                  show_default=False)
    ] = None,
    min_speed: Annotated[
        str | None, typer.Option(help="Share a GPU only where the job keeps at least this much of its speed, such as "
                                 "0.8; none: as the server's settings have it.", metavar="SHARE")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", "-t", help="Stop the job after this long, such as 90m; none: no "
                                 "limit.", metavar="TIME")
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(help="Start after these jobs (17, any:17, 12_3, 12_all or a name) instead of "
                                       "those it waits for now; none: wait for no job. Can be given more than once.",
                                       metavar="JOB", autocompletion=completion.jobs)
    ] = None,
    begin: Annotated[
        str | None, typer.Option(help="Do not start before this time: 2026-11-20T08:00, 22:00 or now+2h; none: at "
                                 "once.", metavar="TIME")
    ] = None,
    throttle: Annotated[
        str | None, typer.Option(help="How many jobs of the array run at once; none: any number. Goes for the whole "
                                 "array.", metavar="N")
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="If the job fails by itself, try it again up to this many times.", metavar="N")
    ] = None,
    requeue: Annotated[
        bool | None, typer.Option("--requeue/--no-requeue", help="Whether the job may be started again, after whatever "
                                  "failure.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Change jobs that wait.

    Only what is named is changed. A job that runs cannot be changed.

    Examples:

      ullage edit 17 --time-limit 4h --priority -5
      ullage edit 17 --memory 12GiB
      ullage edit 17 --memory none --after none
      ullage edit 12_all --throttle 4
    """
    given: dict[str, Any] = {
        "name": name, "priority": priority, "gpus": gpus, "memory": memory, "cores": cores, "host_memory": host_memory,
        "exclusive": exclusive, "min_speed": min_speed,
        "time_limit": time_limit, "after": after or None, "begin": begin, "throttle": throttle,
        "retries": retries, "requeue": requeue,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise InvalidValue("needed something to change, such as --time-limit 4h; 'ullage edit --help' lists it")
    for name, value in changes.items():
        if value in (_NONE, [_NONE]) and name != "name":
            changes[name] = [] if name == "after" else None
    print_each(client().edit(*jobs, **changes), as_json)


def requeue(
    jobs: Annotated[
        list[str], typer.Argument(help="The jobs: numbers (17), places in an array (12_3), whole arrays (12_all) or "
                                  "names.", autocompletion=completion.jobs_to_requeue, show_default=False,
                                  metavar="JOB")
    ],
    hold: Annotated[bool, typer.Option("--hold", help="Do not start them before 'ullage release'.")] = False,
    memory: Annotated[
        str | None, typer.Option(help="GPU memory to promise them on each GPU from now on, such as 12GiB. For jobs "
                                 "that are over.", metavar="SIZE", show_default="as before")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Put jobs into the queue again.

    A job that is over is run again under its number, as a new attempt, as if it had been submitted now. If its
    environment variables are not kept any more, it gets those of this shell. A job that runs is stopped first. A job
    that was submitted with --no-requeue is refused.

    Examples:

      ullage requeue 17
      ullage requeue 12_3 12_7 --hold
      ullage requeue 17 --memory 12GiB
    """
    size = None if memory is None else parse_bytes(memory)
    print_each(client().requeue(*jobs, hold=hold, env=dict(os.environ), memory=size), as_json)
