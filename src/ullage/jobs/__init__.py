"""Descriptions of jobs: models, scripts, job files, and the loop that trains a model.

The names below are loaded on first use, because the command line needs the words of its options without PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.jobs.job import JobRequest, Script
    from ullage.jobs.model import Model, read_rows
    from ullage.jobs.sources.build import build
    from ullage.jobs.training import train

_HOMES = {
    "Model": "model",
    "JobRequest": "job",
    "Script": "job",
    "build": "sources.build",
    "read_rows": "model",
    "train": "training",
}

__all__ = ["JobRequest", "Model", "Script", "build", "read_rows", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ullage.jobs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ullage.jobs' has no attribute {name!r}")
