"""The kernels behind operator calls, by length: jobs that share a GPU wait for them.

A convolution is several kernels, and so are optimizer calls on lists that do not fit into one. The shares of a call's
time are in `data/kernels-h200.toml`. Nothing here imports PyTorch.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ullage.performance.data_sheet import KERNELS
from ullage.performance.rates import Floats
from ullage.performance.result import FILLS, KernelGroup
from ullage.performance.work import Work

_ONE = (1.0,)
_TENSORS, _NUMBERS = 128, 2 * 320 * 65536  # that one kernel takes of lists: tensors of two lists, blocks of 65,536


def parts_of(work: Work) -> Sequence[float]:
    """The kernels of a call, as shares of its time."""
    if work.kind in ("convolution", "convolution_backward"):
        return tuple(KERNELS[work.kind][_kind_of_convolution(work.shape)])
    if work.kind == "lists":
        tensors, numbers = 2 ** work.shape["tensors"], 2 ** work.shape["numbers"]
        count = max(1, math.ceil(tensors / _TENSORS), math.ceil(numbers / _NUMBERS))
        return (1 / count,) * count
    known = KERNELS["recurrent"] if work.kind == "recurrent" else KERNELS["operators"].get(work.operator, _ONE)
    return tuple(known)


def _kind_of_convolution(shape: Mapping[str, float]) -> str:
    if shape["depthwise"]:
        return "depthwise"
    if shape["groups"]:
        return "grouped"
    if not shape["window"]:
        return "of single places"
    return "channels last" if shape["layout"] else ""


def groups_of(works: Sequence[Work], counts: Floats, times: Floats, fills: Floats) -> list[KernelGroup]:
    """Return the kernels of a step, grouped by factors of two in length, those that fill the SMs apart from the others.
    Each of the works comes `counts` times, takes `times` seconds, and fills the share `fills` of the SMs."""
    shares = [parts_of(work) for work in works]
    places = np.repeat(np.arange(len(works)), [len(parts) for parts in shares])
    if not len(places):
        return []
    each = times[places] * np.concatenate([np.asarray(parts) for parts in shares])
    keys = 2 * np.floor(np.log2(np.maximum(each, 1e-9))).astype(np.int64) + (fills[places] >= FILLS)
    _, group = np.unique(keys, return_inverse=True)
    count, fill = counts[places], fills[places]
    sums = [np.bincount(group, weights=values) for values in (count, count * each, count * each * fill)]
    return [KernelGroup(*(float(f"{value:.4g}") for value in row)) for row in zip(*sums, strict=True)]
