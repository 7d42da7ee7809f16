"""What the trainings of gpumemnet and walknet differ in: what is read of a row, the network, its classes, its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.estimators.gpumemnet import networks as gpumemnet_networks
from ullage.estimation.estimators.gpumemnet.features import summary_of_row
from ullage.estimation.estimators.gpumemnet.networks import SummaryBatch, jobs_of
from ullage.estimation.estimators.weights import ModelCard
from ullage.units import GIB
from ullage_lab.estimators.walknet import networks
from ullage_lab.estimators.walknet.inputs import inputs_of
from ullage_lab.estimators.walknet.networks import WalknetBatch, batched
from ullage_lab.train.fitting import (
    GPUMEMNET_SCHEDULES,
    WALKNET_SCHEDULES,
    Schedule,
    fit_gpumemnet,
    fit_walknet,
)

MOST_MEMORY = 160 * GIB  # walknet's bins reach further than any GPU of today, so that large jobs are told apart too
Rows = Sequence[Mapping[str, Any]]
Memory = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Method:
    """A way to classify jobs into bins of memory.

    `bins` says how many there are for a width and the memory of the examples, `widths` (GiB) which widths a family and
    an estimator have networks for, the usual one first, `sums` whether wider bins are summed up from these, `drawn_by`
    which width of bins the test part is drawn by (`None`: the network's).

    >>> method_of("gpumemnet").widths("cnn", "mlp"), method_of("walknet").widths("cnn", "mlp")
    ((8, 1), (1,))
    """

    name: str
    jobs: Callable[[Rows], Any]
    build: Callable[[ModelCard], nn.Module]
    fit: Callable[..., Any]
    save: Callable[[Any, ModelCard, Path], None]
    load: Callable[[Path], tuple[Any, ModelCard]]
    shipped: Callable[[str, str, int], Path]
    widths: Callable[[str, str], tuple[int, ...]]
    sums: bool
    bins: Callable[[int, Memory], int]
    schedules: Mapping[str, Schedule]
    drawn_by: int | None = None


def method_of(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    return METHODS[name]


def _walknet_jobs(rows: Rows) -> WalknetBatch:
    return batched([inputs_of(row) for row in rows])


def _gpumemnet_jobs(rows: Rows) -> SummaryBatch:
    families = sorted({str(row["family"]) for row in rows})
    if len(families) > 1:
        raise InvalidValue(f"needed rows of one family; found {', '.join(families)}")
    return jobs_of([summary_of_row(row) for row in rows], families[0])


WALKNET = Method(
    name="walknet",
    jobs=_walknet_jobs,
    build=networks.build,
    fit=fit_walknet,
    save=networks.save,
    load=networks.load,
    shipped=lambda family, estimator, width: networks.shipped(family, estimator),
    widths=lambda family, estimator: (1,),
    sums=True,
    bins=lambda width, memory: max(2, MOST_MEMORY // width),
    schedules=WALKNET_SCHEDULES,
)
GPUMEMNET = Method(
    name="gpumemnet",
    jobs=_gpumemnet_jobs,
    build=gpumemnet_networks.build,
    fit=fit_gpumemnet,
    save=gpumemnet_networks.save,
    load=gpumemnet_networks.load,
    shipped=gpumemnet_networks.shipped,
    widths=lambda family, estimator: gpumemnet_networks.WIDTHS[family, estimator],
    sums=False,
    bins=lambda width, memory: max(2, int(-(-memory.max() // width))),  # the classes that occur, as published
    schedules=GPUMEMNET_SCHEDULES,
    drawn_by=GIB,  # so that networks of all widths, and walknet, are judged on the same rows
)
METHODS = {method.name: method for method in (GPUMEMNET, WALKNET)}
