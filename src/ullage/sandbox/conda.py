"""Find a conda environment as conda would. Only the standard library is used."""

import os
import stat
from collections.abc import Mapping

_CONDA_ROOTS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".conda", "micromamba")
_LARGEST_LIST = 1 << 20  # bytes of conda's list of environments


def in_conda(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program in a conda environment, given by its path or name; no shell is started.

    It reads files that `env` names, so only a process with the rights of the owner of `env` may call it.
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
    raise LookupError(f"there is no conda environment named {name!r} (looked in {looked})")


def conda_names(env: Mapping[str, str]) -> list[str]:
    return sorted({os.path.basename(line) for line in _conda_list(env.get("HOME", "/nonexistent"))} - {""})


def _conda_list(home: str) -> list[str]:
    """Read conda's list of environments. A pipe or a device in that place is not read."""
    try:
        descriptor = os.open(os.path.join(home, ".conda/environments.txt"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(_LARGEST_LIST).decode(errors="replace").splitlines() if plain else []
