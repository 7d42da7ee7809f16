"""Command lines in which a launcher starts the script, such as `ullage estimate torchrun train.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

_PYTHONS = ("python", "python3")
_OF_SCRIPTS = ("estimate", "check", "max-batch")
_NAMES_FOLLOW = ("--estimator", "-e")


def with_launcher_apart(command: str, words: Sequence[str]) -> list[str]:
    """The words of a command line with `--` before a launcher: what follows it is the launcher's and the script's."""
    found = list(words)
    end = found.index("--") if "--" in found else len(found)
    if command in _OF_SCRIPTS:
        from ullage.jobs.ranks import LAUNCHERS, NOT_FOLLOWED

        for place, (before, word) in enumerate(pairwise(["", *found[:end]])):
            if before in _NAMES_FOLLOW:
                continue
            name = os.path.basename(word)
            if name in LAUNCHERS or name in NOT_FOLLOWED or (place == 0 and name in _PYTHONS):
                return [*found[:place], "--", *found[place:]]
    return found
