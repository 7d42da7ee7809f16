"""`ullage serve`: run jobs on this machine's GPUs, or on virtual ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ullage.cli import completion
from ullage.cli.jobs import client, print_json
from ullage.cli.options import Json


def serve(
    virtual: Annotated[
        str | None, typer.Option(help="Virtual GPUs instead of real ones, such as 4xA100-40GB.", metavar="GPUS")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Where jobs go: ullage, exclusive, round-robin, magm, lug, mug.", metavar="NAME",
                                 autocompletion=completion.policies)
    ] = None,
    sharing: Annotated[
        str | None, typer.Option(help="How jobs share a GPU: time-slicing, or mps.", metavar="time-slicing|mps")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option("--estimator", "-e", help="Who estimates on the way in: ullage, another of 'ullage "
                                 "compare', or none.", metavar="NAME", autocompletion=completion.estimators)
    ] = None,
    api: Annotated[
        str | None, typer.Option(help="Answer HTTP requests on this port of 127.0.0.1, or on HOST:PORT.",
                                 metavar="[HOST:]PORT")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The site's settings (docs/manager.md).", metavar="FILE.toml")
    ] = None,
) -> None:  # fmt: skip
    """Run a daemon that takes jobs and runs them on shared GPUs without overbooking them.

    It stays in the foreground; Ctrl-C ends it and leaves running jobs alone. The next one adopts them.

    Examples:

      ullage serve

      ullage serve --virtual 4xA100-40GB

      ullage serve --policy magm --sharing mps --estimator horus

      ullage serve --api 8600

      ullage serve --config /etc/ullage.toml
    """
    import asyncio
    import gc

    from ullage.home import home
    from ullage.manager.core.daemon import make_daemon, usable_home
    from ullage.manager.settings import read_settings

    settings = read_settings(config, virtual=virtual, policy=policy, sharing=sharing, estimator=estimator,
                             listen=api)  # fmt: skip
    with usable_home(home()):
        daemon = make_daemon(home(), settings, _say)

    def ready() -> None:
        # The collector of garbage would walk through every waiting job again and again: 40 ms for 10,000 of them.
        gc.freeze()
        gc.set_threshold(100_000, 20, 100)
        about = daemon.orders.about()
        kind = f"virtual {about['virtual']}" if about["virtual"] else f"{about['gpus']} GPUs"
        if daemon.api is not None:
            _say(f"the API is at {daemon.api.url}; its token is in {home() / 'run' / 'api-token'}")
        _say(f"serving {kind} with policy {about['policy']} from {home()}; stop with Ctrl-C")

    with usable_home(home()):
        asyncio.run(daemon.run(ready))


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# `ullage drain`: give a GPU no new jobs; those that are there go on.


def drain(
    gpu: Annotated[str, typer.Argument(help="The GPU, by its index or its UUID.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why, for those who read it.")] = "",
    as_json: Json = False,
) -> None:
    """Give a GPU no new jobs; those that are there go on.

    Example:

      ullage drain 2 --reason "the fan is loud"
    """
    answer = client().drain(gpu, reason)
    if as_json:
        print_json(answer)
    else:
        print(f"GPU {answer['index']} ({answer['gpu']}) gets no new jobs")


# `ullage resume`: give a drained GPU new jobs again.


def resume(
    gpu: Annotated[str, typer.Argument(help="The GPU, by its index or its UUID.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Give a drained GPU new jobs again.

    Example:

      ullage resume 2
    """
    answer = client().resume(gpu)
    if as_json:
        print_json(answer)
    else:
        print(f"GPU {answer['index']} ({answer['gpu']}) gets jobs again")
