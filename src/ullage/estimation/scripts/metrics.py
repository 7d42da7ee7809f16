"""Metrics that a script loads by name, as `evaluate.load("accuracy")`: code of the hub that runs on the CPU.

Where the hub cannot be reached, a stand-in takes the predictions and gives zeros: what a metric says has no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ullage.virtual.replacements import Replacements


def install_metrics(note: Callable[[str, str], Any], replacements: Replacements) -> None:
    """Let `evaluate.load` give a stand-in for a metric of the hub that is neither here nor can be had."""

    def watch(evaluate: ModuleType) -> None:
        load = evaluate.load

        @functools.wraps(load)
        def load_or_stand_in(path: str, *args: Any, **options: Any) -> Any:
            try:
                return load(path, *args, **options)
            except (FileNotFoundError, ConnectionError):
                if path.startswith((".", "/")) or path.endswith(".py"):
                    raise
            note("metrics", f"the metric {path} was not downloaded: its scores are zeros")
            return _Metric(path)

        replacements.put(evaluate, "load", load_or_stand_in)

    replacements.when_imported("evaluate", watch)


class _Metric:
    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, *args: Any, **options: Any) -> None:
        """One prediction."""

    add_batch = add

    def compute(self, *args: Any, **options: Any) -> dict[str, float]:
        """Zero for each score that is asked for."""
        return _Scores({self.name: 0.0})


class _Scores(dict[str, float]):
    def __missing__(self, name: str) -> float:
        return 0.0
