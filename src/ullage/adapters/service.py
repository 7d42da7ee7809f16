"""The daemon that adapters ask, and what they make of its answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ullage.errors import InvalidValue
from ullage.manager.client import Client

URL, TOKEN = "ULLAGE_URL", "ULLAGE_TOKEN"
Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Gives the answer to a question, as `Client.estimate` does."""


class MemoryNeed(NamedTuple):
    """What a job takes at most on one GPU, in bytes, and whether it fits there."""

    gpu: str
    upper: int
    fits: bool
    memory: int  # of the GPU


def daemon() -> Client:
    """The daemon that `ULLAGE_URL` and `ULLAGE_TOKEN` name; without them that of this machine."""
    return Client(url=os.environ.get(URL), token=os.environ.get(TOKEN))


def ask_daemon(question: dict[str, Any]) -> dict[str, Any]:
    """Ask it, and wait for the answer."""
    with daemon() as client:
        return client.estimate(**{"details": False, **question})


def is_remote() -> bool:
    """Whether the daemon may be on another machine, which does not see the files of this one."""
    return URL in os.environ


def needs_of(answer: dict[str, Any]) -> list[MemoryNeed]:
    """What an answer says of each GPU; `InvalidValue` says why there is none.

    >>> told = {"gpu": "T4", "upper": 5, "fits": True, "gpu_memory": 9}
    >>> needs_of({"state": "done", "reason": None, "estimates": [told]})
    [MemoryNeed(gpu='T4', upper=5, fits=True, memory=9)]
    """
    if answer["state"] != "done":
        raise InvalidValue(f"there is no estimate: {answer['reason'] or 'it is still being made'}")
    found = []
    for each in answer["estimates"]:
        upper = each.get("upper") or each.get("process_memory") or each.get("peak_reserved")
        if upper is None:
            raise InvalidValue(f"there is no estimate for {each['gpu']}: {'; '.join(each.get('notes', []))}")
        found.append(MemoryNeed(each["gpu"], upper, each["fits"] and upper <= each["gpu_memory"], each["gpu_memory"]))
    return found


def smallest(needs: list[MemoryNeed]) -> MemoryNeed:
    """The GPU with the least memory that the job fits on; `InvalidValue` if it fits on none.

    >>> smallest([MemoryNeed("A", 5, True, 40), MemoryNeed("B", 5, True, 16), MemoryNeed("C", 5, False, 4)]).gpu
    'B'
    """
    fitting = [need for need in needs if need.fits]
    if not fitting:
        most = max(needs, key=lambda need: need.memory)
        raise InvalidValue(
            f"the job fits on none of {', '.join(need.gpu for need in needs)}: it takes up to "
            f"{most.upper / (1 << 30):.1f} GiB, and {most.gpu} has {most.memory / (1 << 30):.1f} GiB"
        )
    return min(fitting, key=lambda need: need.memory)
