"""Policies by name (`magm`), or by a function in a Python file (`my_policy.py:choose`), which runs as the user who
loads it (`ullage.manager.placement.custom_policies`)."""

import importlib.util
import inspect
import os
import stat
import sys
from pathlib import Path
from types import ModuleType

from ullage.errors import InvalidValue, NotAllowed, UllageError, UnknownName
from ullage.manager.placement.custom_policies import custom_policy
from ullage.manager.placement.policies import Policy, find_policy

_SUFFIX = ".py"


def load_policy(reference: str, guarded: bool = False) -> Policy:
    """Return the policy of a name, or of a function in a file. If `guarded`, refuse a file that others than root and
    this user can change."""
    place, _, name = reference.rpartition(":")
    if reference.endswith(_SUFFIX):
        raise InvalidValue(f"the function must be given, too: {reference}:choose")
    if not place.endswith(_SUFFIX):
        return find_policy(reference)
    file = Path(place).expanduser()
    if not file.is_file():
        raise InvalidValue(f"no file {file}; it must be a Python file with the function {name} (job, gpus, now)")
    if guarded:
        _guard(file.resolve())
    module = _module(file)
    functions = [known for known, value in vars(module).items() if inspect.isfunction(value) and known[:1] != "_"]
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise UnknownName(f"function in {file}", name, functions)
    try:
        inspect.signature(function).bind("job", "gpus", "now")
    except TypeError as error:
        raise InvalidValue(f"the function in {file} must be {name}(job, gpus, now): {error}") from None
    return custom_policy(str(own_name(reference)), function)


def own_name(reference: str) -> str | None:
    """Return the name of a policy in a file, without the folder; None for a policy of Ullage.

    >>> own_name("/etc/ullage/my_policy.py:choose"), own_name("magm")
    ('my_policy.py:choose', None)
    """
    place, _, name = reference.rpartition(":")
    return f"{Path(place).name}:{name}" if place.endswith(_SUFFIX) else None


def located(reference: str, folder: Path) -> str:
    """Return the reference to a policy, with a relative path of its file resolved against a folder.

    >>> located("my_policy.py:choose", Path("/etc/ullage")), located("magm", Path("/etc/ullage"))
    ('/etc/ullage/my_policy.py:choose', 'magm')
    """
    place, colon, name = reference.rpartition(":")
    return f"{folder / Path(place).expanduser()}{colon}{name}" if place.endswith(_SUFFIX) else reference


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_policy_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # a name that ends in .py always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # needed by dataclasses in the file
    sys.path.insert(0, str(file.parent.resolve()))  # as if the file was run
    try:
        spec.loader.exec_module(module)
    except UllageError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue(f"cannot load the policy in {file}: {type(error).__name__}: {reason}") from error
    finally:
        sys.path.pop(0)
    return module


def _guard(file: Path) -> None:
    """Refuse a file that other users can change or replace: they would run code as this user."""
    for path in (file, file.parent):
        status = path.stat()
        others = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        group = status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.getegid())
        if status.st_uid not in (0, os.geteuid()):
            raise NotAllowed(f"{path} belongs to another user; a policy runs as the daemon, so keep a copy of your own")
        if others or group:
            raise NotAllowed(f"others can change {path}; a policy runs as the daemon, so type: chmod go-w {path}")
