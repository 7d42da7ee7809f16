"""`ullage lab`: the commands of ullage-lab, where it is installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer

from ullage.errors import LAB, UllageError


def _missing(context: typer.Context) -> None:
    """Compare, measure and train estimators: comes with ullage-lab."""
    raise UllageError(f"the lab is a package of its own; type: pip install {LAB}")


_missing.context_settings = {"ignore_unknown_options": True, "allow_extra_args": True}  # type: ignore[attr-defined]


def _found() -> Any:
    """The group of commands that the entry point names; without it a command that says what to install."""
    return next((point.load() for point in entry_points(group="ullage.commands", name="lab")), _missing)


lab = _found()
