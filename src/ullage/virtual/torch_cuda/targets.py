"""Targets without data, where a loss splits them: each class gets the same share.

`torch.nn.AdaptiveLogSoftmaxWithLoss` computes each cluster of classes for its own rows, and refuses targets that do not
add up. Targets come from the CPU as a rule, and are known. Those that the GPU itself computed have no data.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState
from ullage.virtual.values.known_values import is_unknown


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Give such targets values as this loss begins."""
    forward = nn.AdaptiveLogSoftmaxWithLoss.forward

    @functools.wraps(forward)
    def split_evenly(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
        if is_unknown(target_):
            gpu.note("values", "targets of an adaptive softmax have no data: each class was given the same share")
            spread = torch.arange(target_.numel(), device="cpu") * self.n_classes // max(1, target_.numel())
            target_ = gpu.values.tensor(spread.view(target_.shape).to(target_.dtype))
        return forward(self, input_, target_)

    replacements.put(nn.AdaptiveLogSoftmaxWithLoss, "forward", split_evenly)
