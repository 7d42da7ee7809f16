"""The Python that runs a script: one that the user names, the active environment's, or Ullage's own.

Nothing is started here. `boot` checks, in the process itself, whether a file is a Python that can be used.
"""

import glob
import os
import re
import shutil
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ullage.errors import InvalidValue
from ullage.sandbox.conda import in_conda

_PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
_ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
_BESIDE = (".venv", "venv", "env")  # the usual names of an environment in a project's folder


class Interpreter(NamedTuple):
    """A Python, and the variables for programs that it runs."""

    path: str
    env: dict[str, str]

    @property
    def is_ours(self) -> bool:
        """Whether it is this process's Python; another environment may use the same program by a link."""
        here, there = os.path.abspath(sys.executable), os.path.abspath(self.path)
        same_place = os.path.realpath(os.path.dirname(here)) == os.path.realpath(os.path.dirname(there))
        return same_place and os.path.realpath(here) == os.path.realpath(there)


def find_interpreter(named: str, env: Mapping[str, str] | None = None) -> Interpreter:
    """Find a Python by its path or command, by the folder of an environment, or by conda's name for one."""
    env = dict(os.environ if env is None else env)
    path = os.path.expanduser(named)
    if os.path.isdir(path):
        folder = os.path.abspath(path)
        if os.path.isdir(os.path.join(folder, "conda-meta")):
            env = in_conda(folder, env)
        return _checked(os.path.join(folder, "bin", "python"), env)
    if os.sep in path or os.path.isfile(path):
        return _checked(os.path.abspath(path), env)
    program = shutil.which(named, path=env.get("PATH")) if _PYTHON.fullmatch(named) else None
    if program is not None:
        return _checked(os.path.abspath(program), env)
    try:
        env = in_conda(named, env)
    except LookupError:
        raise InvalidValue(
            f"a Python must be a path, the folder of an environment, or the name of a conda environment, got {named!r}"
        ) from None
    return _checked(os.path.join(env["CONDA_PREFIX"], "bin", "python"), env)


def _checked(path: str, env: dict[str, str]) -> Interpreter:
    if not os.path.isfile(path):
        raise InvalidValue(f"a Python must be a program; there is no file {path}")
    if not os.access(path, os.X_OK):
        raise InvalidValue(f"a Python must be a program; {path} is not one")
    return Interpreter(path, env)


def active_environment(env: Mapping[str, str] | None = None) -> str | None:
    """Return the folder of the user's active environment, if it is not Ullage's and has PyTorch."""
    env = os.environ if env is None else env
    folders = [env[name] for name in _ACTIVE if env.get(name)]
    path = env.get("PATH", "").split(os.pathsep)
    first = [folder for place in path for folder in folders if os.path.join(folder, "bin") == place]
    folder = next(iter(first + folders), None)  # of two environments, the first on PATH
    if folder is None or os.path.realpath(folder) == os.path.realpath(sys.prefix):
        return None
    return folder if has_package(folder, "torch") else None


def environment_with(package: str, script: str, env: Mapping[str, str] | None = None) -> str | None:
    """Find an environment that has a package: the active one, or one in the script's folder or above it."""
    env = os.environ if env is None else env
    here = os.path.dirname(os.path.abspath(script))
    folders = [env.get(name, "") for name in _ACTIVE]
    while True:
        folders += [os.path.join(here, name) for name in _BESIDE]
        if here == os.path.dirname(here) or os.path.exists(os.path.join(here, ".git")):
            break
        here = os.path.dirname(here)
    return next((folder for folder in folders if folder and has_package(folder, package)), None)


def has_package(folder: str, package: str) -> bool:
    """Return whether the environment in a folder has a package, by its files."""
    if not os.path.exists(os.path.join(folder, "bin", "python")):
        return False
    prefixes = [folder]
    try:
        with open(os.path.join(folder, "pyvenv.cfg")) as file:
            settings = file.read()
        home = re.search(r"^home\s*=\s*(.+?)\s*$", settings, re.M)
        if home and re.search(r"^include-system-site-packages\s*=\s*true", settings, re.M | re.I):
            prefixes.append(os.path.dirname(home[1]))
    except (OSError, ValueError):
        pass  # conda's have none
    return any(
        glob.glob(f"{glob.escape(prefix)}/lib/python3*/*-packages/{package}{end}")
        for prefix in prefixes
        for end in ("", ".py")
    )
