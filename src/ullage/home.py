"""The folders where Ullage keeps its files: `$ULLAGE_HOME`, or the user's state and cache folders."""

import os
from pathlib import Path

SYSTEM_HOME = Path("/var/lib/ullage")  # of a daemon for all users (examples/systemd/ullage.service)


def home() -> Path:
    """Return the folder for Ullage's state; it may not exist yet.

    >>> import os; os.environ["ULLAGE_HOME"] = "/srv/ullage"; str(home())
    '/srv/ullage'
    >>> del os.environ["ULLAGE_HOME"]
    """
    given = os.environ.get("ULLAGE_HOME")
    if given:
        return Path(given).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ullage"


def cache() -> Path:
    """Return the folder for files that Ullage can recreate; it may not exist yet.

    >>> import os; os.environ["ULLAGE_HOME"] = "/srv/ullage"; str(cache())
    '/srv/ullage/cache'
    >>> del os.environ["ULLAGE_HOME"]
    """
    if os.environ.get("ULLAGE_HOME"):
        return home() / "cache"
    parent = os.environ.get("XDG_CACHE_HOME")
    return (Path(parent) if parent else Path.home() / ".cache") / "ullage"
