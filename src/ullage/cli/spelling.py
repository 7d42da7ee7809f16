"""Older spellings of options: each is still understood, with a line that says what to type instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

# By command: the old word and the new one; "" for an option that is an argument now. They go with version 0.2.
_MODEL = {"-o": "-O", "--lora-rank": "--lora"}
_NAME = {"-n": "-N"}
OLD = {
    "estimate": _MODEL | {"--gpus": "--gpu"},
    "check": _MODEL,
    "max-batch": _MODEL,
    "serve": {"--config": "--settings"},
    "submit": _NAME,
    "shell": _NAME,
    "edit": _NAME,
    "queue": {"--gpus": "--show-gpus"},
    "logs": {"-e": "--stderr"},
    "reserve": _NAME | {"--gpus": "", "--from": "--begin"},
    "token create": _NAME,
    "top": {"--virtual": "--cards"},
}


def modern(command: str, words: Sequence[str]) -> list[str]:
    """The words of a command line with every old spelling before `--` in its new form, which is also said.

    >>> modern("top", ["--once", "--virtual=cards"])
    ['--once', '--cards=cards']
    """
    end = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    for word in words[:end]:
        before, now = _old(word, OLD.get(command, {}))
        if before and now:
            print(f"ullage: {before} is now called {now}", file=sys.stderr)
            found.append(now + word.removeprefix(before))
        elif before:
            print(f"ullage: {before} is not typed any more, only what follows it", file=sys.stderr)
            found += [word.removeprefix(f"{before}=")] if word != before else []
        else:
            found.append(word)
    return [*found, *words[end:]]


def _old(word: str, old: dict[str, str]) -> tuple[str, str]:
    """The old spelling that a word is, and the new one."""
    for before, now in old.items():
        joined = f"{before}=" if before.startswith("--") else before  # the value of a letter may follow at once: -oadam
        if word == before or word.startswith(joined):
            return before, now
    return "", ""


_PYTHONS = ("python", "python3")
_OF_SCRIPTS = ("estimate", "check", "max-batch")
_NAMES_FOLLOW = ("--estimator", "-e")


def with_launcher_apart(command: str, words: Sequence[str]) -> list[str]:
    """The words of a command line with `--` before a launcher: what follows it is the launcher's and the script's.

    >>> with_launcher_apart("estimate", ["-g", "H100", "torchrun", "--nproc-per-node", "8", "train.py"])[:4]
    ['-g', 'H100', '--', 'torchrun']
    >>> with_launcher_apart("estimate", ["--estimator", "accelerate", "gpt2"])  # an estimator of that name
    ['--estimator', 'accelerate', 'gpt2']
    """
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
