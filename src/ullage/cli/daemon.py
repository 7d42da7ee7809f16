"""`ullage serve`: run the daemon."""

import asyncio
import contextlib
import gc
import importlib.util
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ullage.cli import completion
from ullage.cli.options import option
from ullage.home import home

if TYPE_CHECKING:
    from ullage.manager.settings import ManagerSettings

DEFAULT_PAGE_PORT = 8601


_POLICY = (
    "Placement policy: ullage, exclusive, round-robin, magm, lug, mug, or a function in a Python file. By the true "
    "memory in job files: first-fit, best-fit, worst-fit, least-utilized."
)
_POLICY_FORM = "NAME|FILE.py:FUNCTION"
_SHARING = "How jobs share a GPU: time-slicing or mps."
_ESTIMATOR = "Estimator for submitted jobs, such as ullage, horus or none."
_PAGE = "Serve the web page at this address (needs the extra 'page'), or off."


def serve(
    virtual: Annotated[str | None, option("Serve virtual GPUs instead, such as 4xA100-40GB.", "GPUS")] = None,
    policy: Annotated[str | None, option(_POLICY, _POLICY_FORM, default="ullage", complete=completion.policies)] = None,
    sharing: Annotated[
        str | None, option(_SHARING, "WAY", default="time-slicing", complete=["time-slicing", "mps"])
    ] = None,
    estimator: Annotated[
        str | None, option(_ESTIMATOR, "--estimator -e NAME", default="ullage", complete=completion.estimators)
    ] = None,
    api: Annotated[str | None, option("Serve the HTTP API at this address.", "[HOST:]PORT")] = None,
    page: Annotated[str | None, option(_PAGE, "[HOST:]PORT|off", default="8601 in a terminal")] = None,
    settings: Annotated[Path | None, option("Read settings from this file.", "FILE.toml")] = None,
    new_database: Annotated[bool, option("Start with an empty database if it is missing.", "--new-database")] = False,
) -> None:
    """Run the daemon that schedules jobs on this machine's GPUs.

    Ctrl-C stops the daemon but not its jobs; the next daemon adopts them. An address without HOST is on 127.0.0.1.

    A job of unknown memory may take an idle GPU alone while it is estimated. With the setting estimating.wait = true,
    it waits for its estimate.

    Examples:

      ullage serve
      ullage serve --virtual 4xA100-40GB --policy magm --page 8601 --api 8600
    """
    from ullage.manager.core.daemon import make_daemon, usable_home
    from ullage.manager.settings import read_settings

    read = read_settings(
        settings, virtual=virtual, policy=policy, sharing=sharing, estimator=estimator, listen=api, page=page
    )
    read = _with_page(read)
    with usable_home(home()):
        daemon = make_daemon(home(), read, _say, new=new_database)

    def ready() -> None:
        # The garbage collector would scan every waiting job again and again: 40 ms for 10,000 of them.
        gc.freeze()
        gc.set_threshold(100_000, 20, 100)
        about = daemon.orders.about()
        kind = f"virtual {about['virtual']}" if about["virtual"] else f"{about['gpus']} GPUs"
        if daemon.api is not None and read.api.listen is not None:
            _say(f"the API is at {daemon.api.url}; its token is in {home() / 'run' / 'api-token'}")
        _say(f"serving {kind} with policy {about['policy']} from {home()}; stop with Ctrl-C")

    with usable_home(home()):
        asyncio.run(daemon.run(ready))


def _with_page(settings: "ManagerSettings") -> "ManagerSettings":
    """Return the settings with a decision about the page: on by default in a terminal, off in a service."""
    listen = settings.page.listen
    if listen == "off":
        listen = None
    elif listen is None and sys.stderr.isatty() and importlib.util.find_spec("nicegui") is not None:
        listen = _free_port(DEFAULT_PAGE_PORT)
    return settings.model_copy(update={"page": settings.page.model_copy(update={"listen": listen})})


def _free_port(wanted: int) -> str:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", wanted)):
        return str(wanted)
    return "0"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
