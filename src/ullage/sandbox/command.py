"""A program, inside a child that has its rights, its folder and its limits already."""

from __future__ import annotations

import subprocess
from typing import Any


def run_command(request: dict[str, Any]) -> dict[str, Any]:
    """Run `command` in `env`, with `text` on its standard input; its exit code, or why it could not be run."""
    try:
        done = subprocess.run(
            request["command"], input=request["text"].encode(), env=request["env"], check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        return {"failed": f"cannot run {request['command'][0]}: {error.strerror}"}
    return {"code": done.returncode}
