"""`ullage page`: the web page of a daemon."""

import contextlib
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ullage.cli.jobs import Scope
from ullage.cli.options import option
from ullage.errors import InvalidValue, MissingPackage, NoDaemon, UllageError
from ullage.home import home
from ullage.manager.client import Client
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.manager.page.sessions import Sessions

ESTIMATES = "estimates"  # folder of answers, in ULLAGE_HOME
SESSIONS = "page-sessions"  # folder of encrypted sessions
DEFAULT_LISTEN = "127.0.0.1:8601"


def page(
    listen: Annotated[str, option("Address of the page; without HOST on 127.0.0.1.", "[HOST:]PORT")] = DEFAULT_LISTEN,
    url: Annotated[str | None, option("URL of the daemon's HTTP API.", "URL", default="that of your daemon")] = None,
    scope: Scope = "submit",
    session: Annotated[str, option("Time after which users have to sign in again.", "TIME")] = "12h",
    of_daemon: Annotated[bool, typer.Option("--of-daemon", hidden=True)] = False,
) -> None:
    """Serve a web page that shows GPUs and jobs.

    Prints a link that signs you in once, within 10 minutes, with the rights of --scope. Others sign in with a token
    from 'ullage admin token create'. The page needs the daemon's API ('ullage serve --api 8600'); without a daemon, it
    only estimates models and scripts. Ctrl-C stops the page but not the daemon.

    Examples:

      ullage page --listen 8700 --scope read
      ullage page --url http://gpu-server:8600
    """
    if importlib.util.find_spec("nicegui") is None:
        raise MissingPackage("nicegui", "web pages")
    door, sessions = _beside_daemon() if of_daemon else _alone(listen, parse_duration(session), scope, url)

    def ready(address: str) -> None:
        _say(f"the page is at {address}{'' if of_daemon else '; stop it with Ctrl-C'}")
        if url is None:
            _say(f"sign in, once and within 10 minutes: {address}/sign-in#code={sessions.new_code()}")
        if url is None and not of_daemon:
            try:
                _api()
            except NoDaemon as error:
                _say(f"the page only estimates, until a daemon answers: {error}")

    from ullage.manager.page.server import serve_page

    serve_page(door, sessions, _say, ready)


def _alone(listen: str, lasts: float, scope: str, url: str | None) -> "tuple[socket.socket, Sessions]":
    """Return the socket and the sessions of a page that a user started."""
    from ullage.manager.api.server import listen_at
    from ullage.manager.page.questions import OwnEstimates
    from ullage.manager.page.sessions import KeptSessions, Sessions

    here = None if url else OwnEstimates(home() / ESTIMATES)
    stored = KeptSessions(home() / SESSIONS, url or "")
    make_token = None if url else _token_maker(scope, lasts)
    return listen_at(listen, "--listen", "the page", _say), Sessions(
        lambda: url or _api(), lasts, make_token, here=here, store=stored
    )


def _beside_daemon() -> "tuple[socket.socket, Sessions]":
    """Return the socket and the sessions of a daemon's page, from its message on standard input."""
    from ullage.sandbox.kernel import die_with_parent, hide_memory

    die_with_parent(15)
    hide_memory()
    os.nice(5)  # the daemon has priority
    handed = json.loads(sys.stdin.readline())
    from ullage.manager.page.sessions import KeptSessions, Sessions

    stored = KeptSessions(Path(handed["kept"]))
    url, lasts, token = handed["url"], handed["session"], handed["token"]
    return socket.socket(fileno=handed["fd"]), Sessions(lambda: url, lasts, lambda: (token, lambda: None), store=stored)


def _api() -> str:
    with Client() as manager:
        try:
            return str(manager.call("api")["url"])
        except InvalidValue as error:  # the daemon has no API
            raise NoDaemon(str(error)) from None


def _token_maker(scope: str, lasts: float) -> Callable[[], tuple[str, Callable[[], None]]]:
    """Return a function that makes a token for this user through the daemon's socket, and a function to revoke it."""

    def make() -> tuple[str, Callable[[], None]]:
        with Client() as manager:
            made = manager.token_create(name="page", scope=scope, lasts=lasts)

        def forget() -> None:
            with contextlib.suppress(UllageError), Client() as manager:
                manager.token_revoke(made["id"])

        return made["token"], forget

    return make


def _say(text: str) -> None:
    print(f"ullage: {text}", file=sys.stderr, flush=True)
