"""The folder where Ullage keeps its files: `$ULLAGE_HOME`, or the user's state folder."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM_HOME = Path("/var/lib/ullage")  # of a daemon for all users (examples/systemd/ullage.service)


def home() -> Path:
    """The folder; it may not exist yet.

    >>> import os; os.environ["ULLAGE_HOME"] = "/srv/ullage"; str(home())
    '/srv/ullage'
    >>> del os.environ["ULLAGE_HOME"]
    """
    given = os.environ.get("ULLAGE_HOME")
    if given:
        return Path(given).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ullage"
