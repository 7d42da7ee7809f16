"""What a manager ran, as `ullage simulate --from-history --save-history` writes it and its API tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Assignment
from ullage.manager.simulation.formats.files import head, opened
from ullage.manager.simulation.history import trace_of_history
from ullage.manager.simulation.trace import JobTrace

NAME, TITLE = "history", "what a manager ran (--save-history, or GET /v1/trace)"
FILES: tuple[str, ...] = ()
_KEYS = ("since", "policy", "sharing", "gpus", "works", "jobs")


def recognises(text: str) -> bool:
    return text.startswith('{"since":') and '"policy"' in text and '"sharing"' in text


def read(path: Path, assignment: Assignment) -> JobTrace:
    """Jobs do what they did; nothing is drawn."""
    return trace_of_history(read_history(path), path.name)


def is_history(path: Path) -> bool:
    """Whether a file looks like one."""
    return path.is_file() and recognises(head(path))


def read_history(path: Path) -> dict[str, Any]:
    """What `Client.trace()` gave, from a file."""
    with opened(path) as file:
        try:
            told = json.load(file)
        except ValueError as error:
            raise InvalidValue(f"{path} is not JSON: {error}") from None
    missing = [key for key in _KEYS if not isinstance(told, dict) or key not in told]
    if missing:
        raise InvalidValue(f"needed what a manager ran in {path}; found no {', '.join(missing)}")
    return dict(told)


def write_history(told: dict[str, Any], path: Path) -> None:
    """Write what `Client.trace()` gave to a file; one that is something else is left alone."""
    if path.exists() and not is_history(path):
        raise InvalidValue(f"{path} is there and is no history: it is left as it is; name another file")
    try:
        path.write_text(json.dumps(told))
    except OSError as error:
        raise InvalidValue(f"cannot write the history to {path}: {error.strerror}") from None
