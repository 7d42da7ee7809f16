"""Finds a conda environment as conda would, with the rights of whoever asks. Only the standard library."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

_CONDA_ROOTS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".conda", "micromamba")
_LARGEST_LIST = 1 << 20  # bytes of conda's list of environments


def in_conda(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program in a conda environment, which is named by its path or its name; no shell is asked.

    It looks where `env` says, so only a process with the rights of whoever wrote `env` may call it.

    >>> in_conda("no-such-environment", {"HOME": "/nowhere"})
    Traceback (most recent call last):
    ...
    LookupError: needed a conda environment; found none named 'no-such-environment' (looked in /nowhere)
    """
    home = env.get("HOME", "/nonexistent")
    if os.path.isabs(name):
        places = [name]
    else:
        roots = [os.path.dirname(os.path.dirname(env.get("CONDA_EXE", "")))]
        roots += [env.get("MAMBA_ROOT_PREFIX", ""), env.get("CONDA_ROOT", "")]
        roots += [os.path.join(home, folder) for folder in _CONDA_ROOTS] + ["/opt/conda"]
        places = [os.path.join(root, "envs", name) for root in roots if root]
        places += [line for line in _conda_list(home) if os.path.basename(line) == name]
    for place in places:
        if os.path.isdir(os.path.join(place, "conda-meta")) or os.path.isdir(os.path.join(place, "bin")):
            path = os.pathsep.join(filter(None, (os.path.join(place, "bin"), env.get("PATH"))))
            return {**env, "PATH": path, "CONDA_PREFIX": place, "CONDA_DEFAULT_ENV": name}
    looked = name if os.path.isabs(name) else home
    raise LookupError(f"needed a conda environment; found none named {name!r} (looked in {looked})")


def conda_names(env: Mapping[str, str]) -> list[str]:
    """The names of the environments that conda wrote down.

    >>> conda_names({"HOME": "/nowhere"})
    []
    """
    return sorted({os.path.basename(line) for line in _conda_list(env.get("HOME", "/nonexistent"))} - {""})


def _conda_list(home: str) -> list[str]:
    """conda itself writes down where it made environments. A pipe or a device in that place is not read."""
    try:
        descriptor = os.open(os.path.join(home, ".conda/environments.txt"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(_LARGEST_LIST).decode(errors="replace").splitlines() if plain else []
