"""The features of many runs as columns of a data set, in several processes where there are many."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ullage.errors import UllageError

FEW = 150  # so many runs take less time than starting processes
AT_ONCE = 16  # runs that a process is handed at a time


def feature_rows(configurations: Sequence[str], processes: int | None = None) -> Iterator[dict[str, Any] | str]:
    """For every configuration (as JSON), in their order, its columns; a text where the model does not run.

    >>> row = next(feature_rows(['{"model": "mlp:x", "widths": [8, 4], "batch": 2}']))
    >>> row["parameters"], [(layer["type"], layer["activations"], layer["parameters"]) for layer in row["layers"]]
    (36, [('linear', 4, 36)])
    """
    if len(configurations) < FEW:
        yield from map(feature_row, configurations)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # Spawned: a process that has run PyTorch has threads, which a fork would not have.
    processes = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin) as pool:
        yield from pool.map(feature_row, configurations, chunksize=AT_ONCE)


def _begin() -> None:
    """What a process does first: one thread, and PyTorch's many objects out of the collector's way."""
    import gc

    import torch

    import ullage.estimators.walknet_features  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a model is thousands of objects, looked at again and again


def feature_row(configuration: str) -> dict[str, Any] | str:
    """The columns of one configuration, or why there are none."""
    from ullage.estimators.walknet_rows import row_of
    from ullage.workload.configuration import Configuration

    try:
        return row_of(Configuration.from_row(json.loads(configuration)))
    except UllageError as error:
        return str(error).splitlines()[0]
