"""The environment of a child: it imports this very Ullage, and otherwise what its user would import."""

from __future__ import annotations

import os
import site
from collections.abc import Iterable, Mapping
from pathlib import Path

import ullage

HOME = str(Path(__file__).resolve().parents[2])  # the folder that `ullage` is imported from


def environment(
    base: Mapping[str, str] | None = None, *, import_from: Iterable[str] = (), ours: bool = True
) -> dict[str, str]:
    """The variables of `base` (by default this process's own) for a child process.

    `import_from` names more places to import from, `sys.path` for a child that has to find what is importable here.
    `ours` is whether it runs in this Python; another one gets Ullage by other means (`boot`).
    Output is not buffered, unless `base` says so, so that the last words of a process that is killed are known.

    >>> environment({"PYTHONPATH": "/mine"}, import_from=["/models"])["PYTHONPATH"].endswith("/models:/mine")
    True
    """
    base = os.environ if base is None else base
    is_found = not ours or is_guest() or HOME in _installed()
    own = [] if is_found else [HOME]  # site-packages in front would hide what the user has
    places = [*own, *(place or os.getcwd() for place in import_from)]
    places += filter(None, base.get("PYTHONPATH", "").split(os.pathsep))
    found = {"PYTHONUNBUFFERED": "1", **base}
    if places:
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    return found


def is_guest() -> bool:
    """Whether this is another Python than Ullage's own, which `boot` has put it into."""
    return getattr(ullage, "is_guest", False)


def _installed() -> list[str]:
    return [os.path.realpath(place) for place in site.getsitepackages()]
