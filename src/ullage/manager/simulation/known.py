"""Published training jobs, for traces that name no model.

`data/known_workloads.toml` has the published figures; benchmarks/training/known_workloads.py writes
`data/known_workloads.json` from it, with the memory by several estimators and the activity alone on a GPU.
"""

import functools
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.estimation.asking import answer_request
from ullage.estimation.estimators.registry import check_name
from ullage.jobs.job import request_of
from ullage.manager.simulation.trace import JobKind
from ullage.performance.result import Utilization
from ullage.units import MIB

SIZES = ("light", "medium", "large")
MEASURED_ON = "A100-40GB"


@dataclass(frozen=True, eq=False)
class KnownWorkload:
    """A measured training job: its `kind`, `size` ("light", "medium" or "large"), GPUs, time of an epoch and numbers of
    epochs. `training` has its options for `ullage.estimate`, `step_s` is the time of a step, and `prepares_data` says
    whether the host makes batches meanwhile. `published` and `batch_size` identify it in the authors' traces;
    `in_table`: it is in Table 6.2."""

    kind: JobKind
    size: str
    gpus: int
    epoch_s: float
    epochs: tuple[int, ...]
    step_s: float
    prepares_data: bool
    published: str
    batch_size: int
    in_table: bool
    training: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.kind.name


@functools.cache
def known_workloads() -> Mapping[str, KnownWorkload]:
    """Return the known workloads by name.

    >>> resnet = known_workloads()["resnet50 b128"]
    >>> resnet.size, resnet.gpus, round(resnet.epoch_s / 60)
    ('medium', 1, 35)
    """
    followed = json.loads(_data("known_workloads.json"))["workloads"]
    return {workload.name: _with_figures(workload, followed[workload.name]) for workload in published_workloads()}


def known_workload(name: str) -> KnownWorkload:
    """Return the known workload with this name.

    >>> known_workload("bert_large b8").size
    'large'
    """
    workload = known_workloads().get(name)
    if workload is None:
        raise UnknownName("known workload", name, list(known_workloads()))
    return workload


def published_workloads() -> list[KnownWorkload]:
    tables = tomllib.loads(_data("known_workloads.toml"))
    return [
        _published(table, batch, tables["data"][table["data"]])
        for table in tables["workload"]
        for batch in table["batches"]
    ]


def _published(table: Mapping[str, Any], batch: Mapping[str, Any], data: Mapping[str, Any]) -> KnownWorkload:
    gpus, per_gpu = table.get("gpus", 1), batch.get("per_gpu", batch["size"])
    epoch_s = 60 * batch["epoch_min"]
    return KnownWorkload(
        kind=JobKind(f"{table['name']} b{batch['size']}", memory=batch["memory_mib"] * MIB),
        size=table["size"],
        gpus=gpus,
        epoch_s=epoch_s,
        epochs=tuple(table["epochs"]),
        step_s=epoch_s / math.ceil(data["samples"] / (gpus * per_gpu)),
        prepares_data=not data.get("prepared", False),
        published=table["published"],
        batch_size=batch["size"],
        in_table="table_mib" in batch,
        training={**table["training"], "batch_size": per_gpu},
    )


def _with_figures(workload: KnownWorkload, figures: Mapping[str, Any]) -> KnownWorkload:
    alone = {gpu: Utilization.from_dict({"gpu": gpu, **values}) for gpu, values in figures["alone"].items()}
    return replace(workload, kind=replace(workload.kind, alone=alone, estimates=figures["estimates"]))


def _data(name: str) -> str:
    return (resources.files("ullage.manager.simulation") / "data" / name).read_text()


def promise_of(kind: JobKind, estimator: str) -> int | None:
    """Return the promise by an estimator in bytes; None without an estimate. "oracle" knows the truth, "none" nothing.

    If an estimator returns a range, its upper end is the promise. If the trace has no estimate, the estimator is run
    for known workloads, as on an A100-40GB.

    >>> kind = JobKind("toy", memory=3 << 30, estimates={"horus": 5 << 30})
    >>> promise_of(kind, "oracle") >> 30, promise_of(kind, "none"), promise_of(kind, "horus") >> 30
    (3, None, 5)
    """
    if estimator == "oracle":
        return kind.memory
    if estimator == "none":
        return None
    if estimator in kind.estimates:
        return kind.estimates[estimator]
    check_name(estimator)
    known = known_workloads().get(kind.name)
    if known is None or "model" not in known.training:
        names = ", ".join(["oracle (true memory)", "none", *kind.estimates])
        needed = f"the trace has no estimate by {estimator} for jobs like {kind.name}"
        raise InvalidValue(f"{needed}: name another estimator, of {names}")
    return _answer(kind.name, estimator)


@functools.cache
def _answer(name: str, estimator: str) -> int | None:
    options = dict(known_workloads()[name].training)
    model = options.pop("model")
    request = request_of(model, options, estimator)
    try:
        return answer_request(request, MEASURED_ON).bound
    except UllageError:
        return None
