"""What `fast` reads of a job: totals alone, no sequence, and the closed formula over them. It takes microseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.estimators.walknet_names import (
    COUNTS,
    ONE_BY_ONE,
    OPTIMIZERS,
    PRECISIONS,
    STATES,
    TEMPORARIES,
    optimizer_of,
)
from ullage.units import MIB

WORKSPACES = 66 * MIB  # cuBLAS in both passes on compute capability 9, and the smallest segments of the allocator
_SIZES = ("batch_size", "input_elements", "sequence_length", "parameters", "activations", "depth")
NAMES = (
    *_SIZES, *COUNTS, "weights", "state", "kept", "masks", "norms", "widest", "kept_share", "widest_share",
    "weights_share", "closed_formula", "kept_each", "weights_each",
    *(f"optimizer_{name}" for name in OPTIMIZERS), "optimizer_fused", *(f"precision_{name}" for name in PRECISIONS),
)  # fmt: skip


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The closed formula's terms in bytes.

    `kept` is what the backward pass needs (the numbers that autograd keeps where the row tells, else all activations),
    `widest` the largest output of a layer, of which a gradient or a copy is alive as well.

    >>> row = {"batch_size": 2, "parameters": 10, "kept_numbers": 3, "kept_bytes": 1, "optimizer": "sgd"}
    >>> parts_of(row | {"precision": "fp32", "layers": []})["kept"]
    26.0
    """
    precision = str(row.get("precision") or "fp32")
    low, amp = precision in ("bf16", "fp16"), precision.startswith("amp")
    width, narrow = (2 if low else 4), (2 if low or amp else 4)
    name, fused = optimizer_of(row)
    batch, parameters = int(row["batch_size"]), float(row["parameters"])
    trainable = float(row.get("trainable") or parameters)
    numbers = row.get("kept_numbers")
    masks = float(row.get("kept_bytes") or 0) * batch
    kept = float(row.get("activations") or 0 if numbers is None else numbers) * batch * narrow + masks
    norms = float(row.get("norm_numbers") or 0) * batch * 2 if amp else 0.0
    widest = max((int(layer["activations"]) for layer in row.get("layers") or ()), default=0) * batch * narrow
    return {
        "weights": parameters * width + (parameters * 2 if amp else 0.0),
        "gradients": trainable * width,
        "state": trainable * width * STATES.get(name, 2),
        "temporaries": 0.0 if fused or name == ONE_BY_ONE else trainable * width * TEMPORARIES.get(name, 1),
        "kept": kept + norms,
        "masks": masks,
        "norms": norms,
        "widest": float(widest),
    }


def closed_bytes(parts: Mapping[str, float]) -> float:
    """The closed formula for reserved memory: weights, state, and the larger of two peaks.

    >>> closed_bytes({"weights": 1, "gradients": 1, "state": 2, "temporaries": 1, "kept": 9, "widest": 4}) - WORKSPACES
    16.0
    """
    peak = max(parts["kept"] + parts["widest"], parts["gradients"] + parts["temporaries"])
    return float(parts["weights"] + parts["state"] + peak + WORKSPACES)


def vector_of(row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float64], float]:
    """The features in the order of NAMES, and the closed formula in bytes."""
    parts = parts_of(row)
    closed = closed_bytes(parts)
    name, fused = optimizer_of(row)
    precision = str(row.get("precision") or "fp32")
    values = [math.log1p(float(row.get(size) or 0)) for size in _SIZES]
    values += [math.log1p(float(row.get(count) or 0)) for count in COUNTS]
    values += [math.log1p(parts[part]) for part in ("weights", "state", "kept", "masks", "norms", "widest")]
    values += [parts["kept"] / closed, parts["widest"] / closed, parts["weights"] / closed, math.log(closed)]
    depth = float(row.get("depth") or 1)
    values += [math.log1p(parts["kept"] / depth), math.log1p(parts["weights"] / depth)]
    values += [float(name == known) for known in OPTIMIZERS] + [float(fused)]
    values += [float(precision == known) for known in PRECISIONS]
    return np.array(values), closed
