"""Commands about GPUs that are kept for some users for a time: `ullage reserve`, `reservations` and `unreserve`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import client, print_json
from ullage.cli.options import Json
from ullage.text import plain
from ullage.units import format_moment, parse_duration


def reserve(
    gpus: Annotated[
        list[str], typer.Argument(help="The GPUs: their indices or UUIDs.", metavar="GPU", show_default=False,
                                  autocompletion=completion.cards)
    ],
    length: Annotated[
        str, typer.Option("--for", help="How long, such as 4h or 2d.", metavar="TIME", show_default=False)
    ],
    users: Annotated[
        list[str] | None, typer.Option("--user", "-u", help="Reserve for this user. Can be given more than once.",
                                       metavar="NAME")
    ] = None,
    groups: Annotated[
        list[str] | None, typer.Option("--group", help="Reserve for this group. Can be given more than once.",
                                       metavar="NAME")
    ] = None,
    begin: Annotated[
        str | None, typer.Option(help="From when: 2026-11-20T08:00, 22:00 or now+2h.", metavar="TIME",
                                 show_default="now")
    ] = None,
    name: Annotated[str, typer.Option("--name", "-N", help="Name the reservation.", metavar="NAME")] = "",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Reserve GPUs for users and groups. For operators.

    Until the end, no job of anybody else is started there that might still run when the reservation begins: give jobs
    a time limit if they are to use the GPUs before. Jobs that run there already go on.

    Examples:

      ullage reserve 0 1 --user ann --begin 2026-11-20T08:00 --for 4h --name demo
      ullage reserve 3 --group vision --for 2d
    """
    from ullage.jobs.schedules import parse_start

    words = [word.strip() for given in gpus for word in given.split(",") if word.strip()]
    start = None if begin is None else parse_start(begin, time.time())
    made = client().reserve(words, parse_duration(length), start, users or (), groups or (), name)
    print_json(made) if as_json else print(_sentence(made))


def unreserve(
    reservation: Annotated[
        str, typer.Argument(help="The reservation: its number or its name.", show_default=False, metavar="RESERVATION",
                            autocompletion=completion.reservations)
    ],
    as_json: Json = False,
) -> None:  # fmt: skip
    """Take a reservation back. For operators.

    Example:

      ullage unreserve demo
    """
    gone = client().unreserve(reservation)
    print_json(gone) if as_json else print(f"{_sentence(gone)}: taken back")


def reservations(as_json: Json = False) -> None:
    """Show which GPUs are reserved, for whom and when.

    Example:

      ullage reservations
    """
    found = client().reservations()
    if as_json:
        print_json(found)
    else:
        print("\n".join(map(_sentence, found)) or "no GPUs are reserved")


def _sentence(each: dict[str, Any]) -> str:
    places = zip(each["gpus"], each["indices"], strict=True)
    gpus = ", ".join(uuid if index is None else str(index) for uuid, index in places)
    who = " and ".join([*each["users"], *(f"group {name}" for name in each["groups"])])
    name = f" ({plain(each['name'])})" if each["name"] else ""
    span = f"{format_moment(each['begin'])} to {format_moment(each['end'])}"
    return f"reservation {each['id']}{name}: GPU{'' if len(each['gpus']) == 1 else 's'} {gpus} for {who}, {span}"
