"""`torch.cuda.jiterator`: kernels of the user, compiled as they are called, that work on each element."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.cuda import jiterator

from ullage.virtual.call.plan import like, twin
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Nothing is compiled: the outputs are allocated, with the size and type that their inputs have together."""

    def call(self: Any, *tensors: torch.Tensor, **numbers: Any) -> Any:
        gpu.operator = f"jiterator.{self.kernel_name}"
        together = functools.reduce(torch.add, map(twin, tensors))
        outputs = [gpu.memory.tensor(*like(together)) for _ in range(self.num_outputs)]
        return outputs[0] if self.num_outputs == 1 else tuple(outputs)

    replacements.put(jiterator._JittedFunction, "__call__", call)
