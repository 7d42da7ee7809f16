"""What a watcher saw, for the users whose jobs it was: a file for each of them in a folder that all machines share.

Only a watcher that runs as root can give a file to its user; nobody else can read it. Root reads what the watcher keeps
itself (`runs.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.manager.slurm.runs import RunRecord

HISTORY = "history"  # the folder, in the one that all nodes share
MOST = 1000  # runs of a user


def tell_user(folder: Path, user: str, runs: Sequence[RunRecord]) -> None:
    """Write the newest runs of a user into the file that is the user's alone."""
    try:
        known = pwd.getpwnam(user)
    except KeyError:
        return  # this machine does not know who that is
    place = folder / HISTORY
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
        place.chmod(0o711)  # whatever the umask is: users read their own file, and see no other
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InvalidValue(f"needed a folder {place} that nobody else can write to; found another one")
    descriptor, name = tempfile.mkstemp(dir=place, prefix=".new-")  # for its owner only
    try:
        with open(descriptor, "w") as file:
            json.dump([asdict(run) for run in runs[:MOST]], file)
            os.fchown(descriptor, known.pw_uid, known.pw_gid)
            os.fchmod(descriptor, 0o400)
        os.replace(name, place / f"{known.pw_uid}.json")
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def told(folder: Path) -> list[RunRecord] | None:
    """The runs that a watcher has told this user of, the newest first; `None` if it has told of none."""
    file = folder / HISTORY / f"{os.getuid()}.json"
    try:
        return [RunRecord(**values) for values in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InvalidValue(f"{file} cannot be read as what 'ullage slurm watch' writes: {error}") from None
