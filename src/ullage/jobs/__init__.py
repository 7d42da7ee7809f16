"""Descriptions of jobs: models, scripts, job files, and the loop that trains a model.

The names below are loaded on first use, because the command line needs its option names without PyTorch.
"""

from typing import TYPE_CHECKING

from ullage.lazy import loaded_on_first_use

if TYPE_CHECKING:
    from ullage.jobs.job import JobRequest as JobRequest
    from ullage.jobs.job import Script as Script
    from ullage.jobs.model import Model as Model
    from ullage.jobs.model import read_rows as read_rows
    from ullage.jobs.sources.build import build as build
    from ullage.jobs.training import train as train

_LAZY_IMPORTS = {
    "Model": "model",
    "JobRequest": "job",
    "Script": "job",
    "build": "sources.build",
    "read_rows": "model",
    "train": "training",
}

__all__ = [*_LAZY_IMPORTS]
__getattr__ = loaded_on_first_use(__name__, _LAZY_IMPORTS)
