"""`accelerate`: the figures of `accelerate estimate-memory` for a model.

The size of weights and buffers by type, the largest layer, and training with Adam: four times the size in 32 bits; with
16 bits the largest of weights (32 bits), gradients (1.5 times) and optimizer (twice), which the command takes one at a
time. No activations, whatever the batch.
"""

import time
from dataclasses import dataclass

from torch import nn

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options, supports_names
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.sources.build import build
from ullage.units import format_bytes
from ullage.virtual import VirtualGPU

SHARES = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A row of the command's table, in bytes; `training` is `None` if the command prints N/A."""

    dtype: str
    largest_layer: int
    total: int
    training: int | None


def sizes(model: nn.Module, dtype: str = "float32") -> Sizes:
    if dtype not in SHARES:
        raise InvalidValue(f"dtype must be one of {', '.join(SHARES)}, got {dtype!r}")
    tensors = [*model.parameters(), *model.buffers()]
    held = {id(tensor): tensor.numel() * 4 for tensor in tensors if tensor.is_floating_point()}
    total = sum(held.values()) + sum(tensor.nbytes for tensor in model.buffers() if not tensor.is_floating_point())
    training = {"float32": 4 * total, "float16": 2 * total, "bfloat16": 2 * total}.get(dtype)
    return Sizes(dtype, _largest(model) // SHARES[dtype], total // SHARES[dtype], training)


def _largest(model: nn.Module) -> int:
    """Return the size of the largest layer: one without inner layers, or one that the model must not split."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    largest = 0
    for module in model.modules():
        if type(module).__name__ in whole or not any(True for _ in module.children()):
            largest = max(largest, sum(4 * tensor.numel() for tensor in module.parameters()))
    return largest


@estimator(
    "accelerate",
    title="model size times four, as accelerate estimate-memory",
    source="Hugging Face Accelerate, src/accelerate/commands/estimate.py and docs/source/usage_guides/"
    "model_size_estimator.md",
    needs="the model",
    supports=supports_names,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate a model; option: dtype (float32, float16, bfloat16), by default that of the precision."""
    begin = time.perf_counter()
    assert request.model is not None
    types = request.model.types
    dtype = read_options("accelerate", request.options, {"dtype": types.autocast or types.weights})["dtype"]
    with VirtualGPU(gpu, limited=False):
        row = sizes(build(request.model), dtype)
    if row.training is None:
        raise InvalidValue(f"accelerate gives no training memory for {dtype}")
    if dtype == "float32":
        parts = {"parameters": row.total, "gradients": row.total, "optimizer": 2 * row.total}
    else:
        parts = {"optimizer": row.training}  # the largest of its three stages, not their sum
    notes = [
        f"accelerate's 'Training using Adam' in {dtype}; no activations, no batch, no temporaries, no context",
        f"model {format_bytes(row.total)}, largest layer {format_bytes(row.largest_layer)}",
    ]
    return answer("accelerate", gpu, "allocated", parts, seconds=time.perf_counter() - begin, notes=notes)
