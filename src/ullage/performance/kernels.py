"""The kernels behind operator calls, by their length: what jobs that share a GPU have to wait for.

A convolution is several kernels: cuDNN brings its tensors into another order and back, and the gradients of data and
weights are kernels of their own. Calls of optimizers on lists take as many as their tensors do not fit into one. The
shares of a call's time are those of 52 steps that were profiled on an H200 (benchmarks/data/steps_h200.jsonl.xz), as
`benchmarks/training/kernels_of_calls.py` prints them, rounded by hand. Nothing here imports PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ullage.performance.rates import Floats
from ullage.performance.result import FILLS, KernelGroup
from ullage.performance.work import Work

_ONE = (1.0,)
_CONVOLUTION: Mapping[str, tuple[float, ...]] = {
    "depthwise": (0.84, 0.16),
    "grouped": (0.4, 0.3, 0.1, 0.1, 0.05, 0.05),
    "of single places": (0.75, 0.25),
    "channels last": (0.98, 0.02),
    "": (0.65, 0.2, 0.1, 0.05),
}
_CONVOLUTION_BACKWARD: Mapping[str, tuple[float, ...]] = {
    "depthwise": (0.55, 0.37, 0.08),
    "grouped": (0.19, 0.14, 0.13, 0.1, 0.08, 0.08, 0.08, 0.05, 0.05, 0.05, 0.05),
    "of single places": (0.48, 0.35, 0.14, 0.03),
    "channels last": (0.7, 0.25, 0.05),
    "": (0.45, 0.27, 0.1, 0.06, 0.05, 0.03, 0.02, 0.02),
}
_OPERATORS: Mapping[str, tuple[float, ...]] = {
    "native_layer_norm_backward": (0.6, 0.4),
    "native_batch_norm": (0.58, 0.35, 0.07),
    "_softmax_backward_data": (0.5, 0.5),
    "silu_": (0.53, 0.47),
    "masked_fill": (0.77, 0.23),
    "slice_backward": (0.66, 0.34),
    "select_backward": (0.63, 0.37),
    "nll_loss_backward": (0.83, 0.17),
    "_scaled_dot_product_cudnn_attention": (0.96, 0.04),
    "_scaled_dot_product_cudnn_attention_backward": (0.76, 0.1, 0.1, 0.04),
    "_scaled_dot_product_flash_attention_backward": (0.1, 0.8, 0.1),
    "_scaled_dot_product_efficient_attention_backward": (0.02, 0.95, 0.03),
    "_index_put_impl_": (0.5, *(0.05,) * 10),
    "index_put": (0.5, *(0.05,) * 10),
    "embedding_dense_backward": (0.6, 0.27, 0.05, 0.05, 0.03),
}
_RECURRENT = (0.05,) * 20
_TENSORS, _NUMBERS = 128, 2 * 320 * 65536  # that one kernel takes of lists: tensors of two lists, blocks of 65,536


def parts_of(work: Work) -> Sequence[float]:
    """The kernels of a call, as shares of its time."""
    if work.kind in ("convolution", "convolution_backward"):
        known = _CONVOLUTION if work.kind == "convolution" else _CONVOLUTION_BACKWARD
        return known[_kind_of_convolution(work.shape)]
    if work.kind == "lists":
        tensors, numbers = 2 ** work.shape["tensors"], 2 ** work.shape["numbers"]
        count = max(1, math.ceil(tensors / _TENSORS), math.ceil(numbers / _NUMBERS))
        return (1 / count,) * count
    return _RECURRENT if work.kind == "recurrent" else _OPERATORS.get(work.operator, _ONE)


def _kind_of_convolution(shape: Mapping[str, float]) -> str:
    if shape["depthwise"]:
        return "depthwise"
    if shape["groups"]:
        return "grouped"
    if not shape["window"]:
        return "of single places"
    return "channels last" if shape["layout"] else ""


def groups_of(works: Sequence[Work], counts: Floats, times: Floats, fills: Floats) -> list[KernelGroup]:
    """The kernels of a step, each group within a factor of two, those that fill the SMs apart from the others.

    Each of the works comes so many times (`counts`), takes so many seconds, and fills so much of the SMs meanwhile.
    """
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
