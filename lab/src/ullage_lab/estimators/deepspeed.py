"""`deepspeed`: the figures of DeepSpeed's own estimator for the model states under ZeRO.

Weights, gradients and optimizer states of 16-bit training with Adam, per GPU and node; no activations. Stages 2 and 3
follow DeepSpeed's estimator, stages 0 and 1, for which it has none, the ZeRO paper (2 bytes of weights and 2 of
gradients a parameter, 12 of optimizer states).
"""

import time
from dataclasses import dataclass
from typing import Any

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

BUFFER = 1.5  # DeepSpeed's safety factor for CPU memory
DEFAULTS: dict[str, Any] = {
    "stage": 2,
    "gpus": 1,
    "nodes": 1,
    "offload": False,
    "offload_params": False,
    "zero_init": True,
}


@dataclass(frozen=True, slots=True)
class States:
    """Bytes for the model states on one GPU, by kind, and in the CPU memory of one node."""

    weights: int
    gradients: int
    optimizer: int
    cpu: int

    @property
    def gpu(self) -> int:
        return self.weights + self.gradients + self.optimizer


def model_states(
    params: int,
    largest_layer: int | None = None,
    *,
    stage: int = 2,
    gpus: int = 1,
    nodes: int = 1,
    offload: bool = False,
    offload_params: bool = False,
    zero_init: bool = True,
) -> States:
    """Return the model states of `params` parameters on `nodes` nodes of `gpus` GPUs each.

    Stage 3 needs the parameters of the largest layer: that layer is gathered. `offload` puts the optimizer on the CPU,
    `offload_params` the weights too (stage 3); `zero_init` builds the model in parts (stage 3).
    """
    total = _check(stage, gpus, nodes, offload, offload_params)
    building = 4 * gpus  # every process of a node builds the model in 32 bits
    if stage < 2:
        optimizer = 12 * params if stage == 0 else 12 * params // total
        return States(2 * params, 2 * params, optimizer, int(params * building * BUFFER))
    if stage == 2:
        if offload:
            return States(2 * params, 0, 0, int(params * max(building, 16) * BUFFER))
        shard = params / total
        # 4·P + 16·P/n: 2 of weights and 2 of gradients whole, then 4 + 4 + 8 of 32-bit values in parts
        return States(
            2 * params + int(4 * shard), 2 * params + int(4 * shard), int(8 * shard), int(params * building * BUFFER)
        )
    if largest_layer is None:
        raise InvalidValue("stage 3 needs the parameters of the largest layer")
    return _stage_3(params, largest_layer, gpus, total, offload, offload_params, zero_init)


def _stage_3(
    params: int, largest: int, gpus: int, total: int, offload: bool, offload_params: bool, zero_init: bool
) -> States:
    """4 bytes a parameter of the largest layer, gathered, and of all others a GPU's part."""
    layer, share = 2 * largest, gpus / total
    if offload:
        bytes_each = 18 if offload_params else 16
        factor = bytes_each * share if zero_init else max(4 * gpus, bytes_each * share)
        weights = 0 if offload_params else int(2 * params / total)
        return States(layer + weights, layer, 0, int(params * factor * BUFFER))
    gpu = 4 * largest + int(18 * params / total)
    gradients, optimizer = layer + int(4 * params / total), int(8 * params / total)
    built = largest if zero_init else params
    return States(gpu - gradients - optimizer, gradients, optimizer, int(built * 4 * gpus * BUFFER))


def _check(stage: int, gpus: int, nodes: int, offload: bool, offload_params: bool) -> int:
    if stage not in (0, 1, 2, 3):
        raise InvalidValue(f"stage of ZeRO must be 0, 1, 2 or 3, got {stage!r}")
    if gpus < 1 or nodes < 1:
        raise InvalidValue(f"GPUs and nodes must be at least 1, got {gpus} and {nodes}")
    if offload and stage < 2:
        raise InvalidValue("DeepSpeed's estimator offloads with stages 2 and 3 only")
    if offload_params and not (offload and stage == 3):
        raise InvalidValue("offload_params goes with stage=3 and offload=True")
    return gpus * nodes


def count(model: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters, shared ones once, and that of the largest layer."""
    whole = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    own = (sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules())
    return whole, max(own)


@estimator(
    "deepspeed",
    title="model states under ZeRO, without activations",
    source="DeepSpeed, docs/code-docs/source/memory.rst; stages 0 and 1: Rajbhandari et al., ZeRO, SC 2020",
    needs="the number of parameters and of the largest layer",
    supports=supports_names,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate a model; options: stage, gpus (per node), nodes, offload, offload_params, zero_init."""
    begin = time.perf_counter()
    assert request.model is not None
    options = read_options("deepspeed", request.options, DEFAULTS)
    with VirtualGPU(gpu, limited=False):
        params, largest = count(build(request.model))
    states = model_states(params, largest, **options)
    parts = {"parameters": states.weights, "gradients": states.gradients, "optimizer": states.optimizer}
    notes = [
        f"model states of 16-bit training with Adam on one of {options['gpus'] * options['nodes']} GPUs, ZeRO stage "
        f"{options['stage']}; no activations, no temporaries, no context",
        f"CPU memory a node: {format_bytes(states.cpu)}",
        f"{params:,} parameters, {largest:,} in the largest layer",
    ]
    return answer("deepspeed", gpu, "allocated", parts, seconds=time.perf_counter() - begin, notes=notes)
