"""The environment of a child: it imports this Ullage, and otherwise the packages of its user."""

import os
import site
from collections.abc import Iterable, Mapping
from pathlib import Path

import ullage

HOME = str(Path(__file__).resolve().parents[2])  # the folder that `ullage` is imported from


def environment(
    base: Mapping[str, str] | None = None, *, import_from: Iterable[str] = (), ours: bool = True
) -> dict[str, str]:
    """Return the variables for a child process, from `base` or this process's own.

    `import_from` adds folders to import from. `ours` says whether the child runs in this Python; another one gets
    Ullage from `boot`. Output is unbuffered by default, so that the last output of a killed process is known.
    """
    base = os.environ if base is None else base
    is_found = not ours or is_guest() or HOME in _installed()
    own = [] if is_found else [HOME]  # site-packages in front would hide the user's packages
    places = [*own, *(place or os.getcwd() for place in import_from)]
    places += filter(None, base.get("PYTHONPATH", "").split(os.pathsep))
    variables = {"PYTHONUNBUFFERED": "1", **base}
    if places:
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    return variables


def is_guest() -> bool:
    """Return whether this Python is not Ullage's own, and `boot` has loaded Ullage into it."""
    return getattr(ullage, "is_guest", False)


def _installed() -> list[str]:
    return [os.path.realpath(place) for place in site.getsitepackages()]
