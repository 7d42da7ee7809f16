"""`ullage serve`: run the manager."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ullage.cli import completion
from ullage.cli.options import option

if TYPE_CHECKING:
    from ullage.manager.settings import ManagerSettings

DEFAULT_PAGE_PORT = 8601


def serve(
    virtual: Annotated[
        str | None, option("Serve virtual GPUs instead of this machine's, such as 4xA100-40GB.", "GPUS")
    ] = None,
    policy: Annotated[
        str | None,
        option(
            "How GPUs are chosen for jobs: ullage, exclusive, round-robin, magm, lug or mug; or a function of "
            "your own in a Python file.",
            "NAME|FILE.py:FUNCTION",
            default="ullage",
            complete=completion.policies,
        ),
    ] = None,
    sharing: Annotated[
        str | None,
        option(
            "How jobs share a GPU: time-slicing, or through NVIDIA's MPS with mps.",
            "WAY",
            default="time-slicing",
            complete=lambda: ["time-slicing", "mps"],
        ),
    ] = None,
    estimator: Annotated[
        str | None,
        option(
            "Which estimator to use for submitted jobs: ullage, another one such as horus, or none.",
            "--estimator -e NAME",
            default="ullage",
            complete=completion.estimators,
        ),
    ] = None,
    api: Annotated[
        str | None, option("Serve the REST API on this port of 127.0.0.1, or on HOST:PORT.", "[HOST:]PORT")
    ] = None,
    page: Annotated[
        str | None,
        option(
            "Serve a web page on this port of 127.0.0.1, or on HOST:PORT, and print its link; off: none.",
            "[HOST:]PORT|off",
            default="8601 or another port in a terminal, if ullage[page] is installed",
        ),
    ] = None,
    settings: Annotated[Path | None, option("Read the settings from this file.", "FILE.toml")] = None,
    new_database: Annotated[
        bool,
        option(
            "Begin with an empty database where the old one is missing. Without this, a home that has jobs or "
            "copies and no database is left alone.",
            "--new-database",
        ),
    ] = False,
) -> None:
    """Run the server that schedules jobs on this machine's GPUs.

    Ctrl-C stops the server but not its jobs; the next server adopts them.

    Examples:

      ullage serve
      ullage serve --virtual 4xA100-40GB
      ullage serve --policy magm --sharing mps --estimator horus
      ullage serve --policy my_policy.py:choose
      ullage serve --page 8601 --api 8600
      ullage serve --settings /etc/ullage.toml
    """
    import asyncio
    import gc

    from ullage.home import home
    from ullage.manager.core.daemon import make_daemon, usable_home
    from ullage.manager.settings import read_settings

    read = read_settings(
        settings, virtual=virtual, policy=policy, sharing=sharing, estimator=estimator, listen=api, page=page
    )
    read = _with_page(read)
    with usable_home(home()):
        daemon = make_daemon(home(), read, _say, new=new_database)

    def ready() -> None:
        # The collector of garbage would walk through every waiting job again and again: 40 ms for 10,000 of them.
        gc.freeze()
        gc.set_threshold(100_000, 20, 100)
        about = daemon.orders.about()
        kind = f"virtual {about['virtual']}" if about["virtual"] else f"{about['gpus']} GPUs"
        if daemon.api is not None and read.api.listen is not None:
            _say(f"the API is at {daemon.api.url}; its token is in {home() / 'run' / 'api-token'}")
        _say(f"serving {kind} with policy {about['policy']} from {home()}; stop with Ctrl-C")

    with usable_home(home()):
        asyncio.run(daemon.run(ready))


def _with_page(settings: ManagerSettings) -> ManagerSettings:
    """Settings that say whether there is a page: in a terminal it is expected, a service has to ask for it."""
    import importlib.util

    listen = settings.page.listen
    if listen == "off":
        listen = None
    elif listen is None and sys.stderr.isatty() and importlib.util.find_spec("nicegui") is not None:
        listen = _free_port(DEFAULT_PAGE_PORT)
    return settings.model_copy(update={"page": settings.page.model_copy(update={"listen": listen})})


def _free_port(wanted: int) -> str:
    """That port of this machine if nobody has it, and any other one otherwise."""
    import socket

    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", wanted)):
        return str(wanted)
    return "0"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
