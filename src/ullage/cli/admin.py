"""`ullage admin`: drains of GPUs, for operators, and tokens for the HTTP API."""

import datetime
import sys
import time
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.jobs import Scope, of_verb, option_of, print_json
from ullage.cli.options import Json, argument, command_group, option
from ullage.cli.tables import fitted
from ullage.jobs.schedules import START_FORMS, parse_start
from ullage.manager import verbs
from ullage.manager.client import Client
from ullage.text import plain, plain_values
from ullage.units import parse_duration

admin = command_group("Drain and resume GPUs, and manage tokens for the HTTP API.")
token = command_group("Create, list and revoke tokens for the HTTP API.")
admin.add_typer(token, name="token")

Cards = Annotated[list[str], argument("GPU indices or UUIDs.", "GPU", complete=completion.cards)]


@admin.command()
def drain(
    gpus: Cards,
    reason: Annotated[str, option_of(verbs.Reason, "TEXT")] = "",
    begin: Annotated[str | None, option(f"Start of the drain: {START_FORMS}.", "--from TIME", default="now")] = None,
    until: Annotated[str | None, option("End of the drain.", "TIME", default="'ullage admin resume'")] = None,
    allow: Annotated[list[str] | None, option_of(verbs.Allowed, "USER|@GROUP")] = None,
    as_json: Json = False,
) -> None:
    """Keep new jobs off GPUs, now or for a time. Running jobs continue.

    Before a drain begins, a job starts only if its time limit ends by then. Drains survive a restart of the daemon.
    Repeat --allow for several users.

    Examples:

      ullage admin drain 2 --reason "loud fan"
      ullage admin drain 0 1 --from 2026-11-20T08:00 --until 2026-11-20T12:00 --allow @vision
    """
    now = time.time()
    begins, ends = (None if text is None else parse_start(text, now) for text in (begin, until))
    answers = [Client().drain(gpu, reason, begins, ends, allow or ()) for gpu in gpus]
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        print(f"GPU {answer['index']} ({answer['gpu']}) {plain(answer['text'])}")


def _resumed(answer: dict[str, Any]) -> str:
    left = f"; it {answer['text']}" if answer["text"] else ""
    return f"GPU {answer['index']} ({answer['gpu']}) gets new jobs again{left}"


_RESUME = """Let new jobs start on drained GPUs again.

    Example:

      ullage admin resume 2
    """
_LATER = {"later": (Annotated[bool, option_of(verbs.Later, "--all -a")], False)}
admin.command("resume")(of_verb("resume", _RESUME, Cards, _resumed, _LATER))


@token.command()
def create(
    name: Annotated[str, option_of(verbs.TokenName, "--name -N NAME")] = "",
    scope: Scope = "submit",
    expires: Annotated[str | None, option("Lifetime, such as 12h or 30d.", "TIME", default="unlimited")] = None,
    user: Annotated[str | None, option_of(verbs.Owner, "--user -u NAME", default="you")] = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It is shown only once.

    Examples:

      ullage admin token create --name laptop --expires 30d
      ullage admin token create --name prometheus --scope read
    """
    lasts = None if expires is None else parse_duration(expires)
    made = Client().token_create(name=name, scope=scope, lasts=lasts, user=user)
    if as_json:
        print_json(made)
        return
    print(made["token"])
    until = "" if made["expires"] is None else f", valid until {_time(made['expires'])}"
    notice = f"ullage: token {made['id']} of {made['user']}, scope {made['scope']}{until}; it is not shown again"
    print(notice, file=sys.stderr)


@token.command("list")
def list_tokens(
    everybody: Annotated[bool, option_of(verbs.Everybody, "--all -a")] = False,
    as_json: Json = False,
) -> None:
    """List your tokens by number, without their secrets.

    Example:

      ullage admin token list
    """
    token_records = Client().tokens(everybody=everybody)
    if as_json:
        print_json(token_records)
        return
    heads = ["token", "user", "name", "scope", "made", "valid until"]
    rows = [
        [str(each["id"]), each["user"], each["name"], each["scope"], _time(each["made"]), _valid(each)]
        for each in plain_values(token_records)
    ]
    print(
        fitted(heads, rows, left=heads) if rows else "there are no tokens; create one with 'ullage admin token create'"
    )


_REVOKE = """Revoke tokens.

    Example:

      ullage admin token revoke 3 4
    """
_TOKENS = Annotated[list[int], argument("Token numbers from 'ullage admin token list'.", "TOKEN", completion.tokens)]
token.command("revoke")(of_verb("token_revoke", _REVOKE, _TOKENS, "token {id} of {user} is revoked".format_map))


def _valid(each: dict[str, Any]) -> str:
    if each["revoked"] is not None:
        return f"revoked {_time(each['revoked'])}"
    return "always" if each["expires"] is None else _time(each["expires"])


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
