"""One question to one estimator, in plain values: what a process that knows only a row and two names can ask."""

from __future__ import annotations

from typing import Any

from ullage.errors import InvalidValue
from ullage.estimate.result import Estimate
from ullage.estimators.registry import Workload, estimators, find
from ullage.gpus import gpu as find_gpu
from ullage.workload import Configuration


def ask(name: str, row: dict[str, Any], gpu: str) -> Estimate | str:
    """The estimate that the estimator `name` gives for a row, or the reason why it does not support it.

    A row is a configuration as measured files have it, or `{"script": "train.py", "args": [...]}`; for a script,
    `run` may hold what the virtual GPU takes (`module`, `timeout`, `steps`).

    >>> ask("ullage", {"model": "mlp:x", "widths": [8, 4], "batch": 2}, "T4").figure_kind
    'process'
    """
    found = find(name)
    workload = workload_of(row)
    reason = found.supports(workload)
    return reason if reason is not None else found.run(workload, find_gpu(gpu))


def workload_of(row: dict[str, Any]) -> Workload:
    """The workload of a row.

    >>> workload_of({"script": "train.py", "args": ["--epochs", "1"]}).args
    ('--epochs', '1')
    """
    run = dict(row.get("run", {}))
    if "script" in row:
        return Workload(script=str(row["script"]), args=tuple(row.get("args", ())), run=run)
    return Workload(configuration=Configuration.from_row(row), run=run)


def estimator_list(text: str) -> list[str]:
    """The estimators that "all" or names with commas mean, each once.

    >>> estimator_list("ullage, ullage")
    ['ullage']
    """
    if text.strip().casefold() == "all":
        return estimators()
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidValue(f"needed 'all' or names of estimators with commas; found {text!r}")
    return [find(name).name for name in names]
