"""`ullage token`: tokens for the HTTP API."""

from __future__ import annotations

import datetime
import sys
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import client, print_json
from ullage.cli.options import Json
from ullage.text import plain_values
from ullage.units import parse_duration

token = typer.Typer(
    help="Make, list and revoke tokens for the HTTP API.", no_args_is_help=True, rich_markup_mode="rich"
)


@token.command()
def create(
    name: Annotated[str, typer.Option("--name", "-N", help="A name to know it by.", metavar="NAME")] = "",
    scope: Annotated[
        str, typer.Option(help="What it allows: read (see jobs and GPUs), submit (also submit and change jobs), or "
                          "operate (all that its user may do).", metavar="read|submit|operate",
                          autocompletion=lambda: ["read", "submit", "operate"])
    ] = "submit",
    expires: Annotated[
        str | None, typer.Option(help="How long it is valid, such as 12h or 30d.", metavar="TIME",
                                 show_default="always")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-u", help="Make it for another user. For operators.", metavar="NAME",
                                 show_default="you")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a token and print it. It is shown only this once.

    Examples:

      ullage token create --name laptop --expires 30d
      ullage token create --scope read --name prometheus
      ullage token create --user ann
    """
    lasts = None if expires is None else parse_duration(expires)
    made = client().token_create(name=name, scope=scope, lasts=lasts, user=user)
    if as_json:
        print_json(made)
        return
    print(made["token"])
    until = "" if made["expires"] is None else f", valid until {_time(made['expires'])}"
    print(f"ullage: token {made['id']} of {made['user']}, scope {made['scope']}{until}; "
          "it is not shown again", file=sys.stderr)  # fmt: skip


@token.command("list")
def list_tokens(
    everybody: Annotated[
        bool, typer.Option("--all", "-a", help="Show the tokens of all users. For operators.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show your tokens, without the tokens themselves.

    Examples:

      ullage token list
      ullage token list --all
    """
    found = client().tokens(everybody=everybody)
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("token", "user", "name", "scope", "made", "valid until"):
        table.add_column(column)
    for each in plain_values(found):
        table.add_row(str(each["id"]), Text(each["user"]), Text(each["name"]), each["scope"], _time(each["made"]),
                      _valid(each))  # fmt: skip
    Console().print(table if found else "there are no tokens; 'ullage token create' makes one")


@token.command()
def revoke(
    tokens: Annotated[list[int], typer.Argument(help="Numbers from 'ullage token list'.", metavar="TOKEN",
                                                show_default=False, autocompletion=completion.tokens)],
    as_json: Json = False,
) -> None:  # fmt: skip
    """Revoke tokens: they are worth nothing from now on.

    Examples:

      ullage token revoke 3
      ullage token revoke 3 4
    """
    manager = client()
    done = [manager.token_revoke(number) for number in tokens]
    if as_json:
        print_json(done)
        return
    for each in done:
        print(f"token {each['id']} of {each['user']} is revoked")


def _valid(each: dict[str, Any]) -> str:
    if each["revoked"] is not None:
        return f"revoked {_time(each['revoked'])}"
    return "always" if each["expires"] is None else _time(each["expires"])


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
