"""What Ullage writes into a job's comment, where Slurm keeps it for whoever looks after the job later."""

from __future__ import annotations

import json
import re
from typing import Any

_MARK = "ullage:"


def write_comment(values: dict[str, Any], own: str = "") -> str:
    """A comment with plain values in it, behind what the user wrote.

    >>> write_comment({"upper": 5, "shards": 1}, "night run")
    'night run ullage:{"upper":5,"shards":1}'
    """
    before = _without(own)
    return f"{before} " * bool(before) + _MARK + json.dumps(values, separators=(",", ":"))


def read_comment(comment: str) -> dict[str, Any] | None:
    """The values that `write_comment` was given; `None` if the comment has none.

    >>> read_comment('night run ullage:{"upper":5}'), read_comment("night run")
    ({'upper': 5}, None)
    """
    match = re.search(rf"(?:^|\s){_MARK}(\{{.*\}})\s*$", comment, re.S)
    try:
        values = json.loads(match[1]) if match else None
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _without(comment: str) -> str:
    return re.sub(rf"(?:^|\s){_MARK}\{{.*\}}\s*$", "", comment, flags=re.S).strip()
