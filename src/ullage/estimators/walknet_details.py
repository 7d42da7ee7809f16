"""What tensors each layer makes in a training step, seen in one forward pass: beyond the three numbers of a sequence.

Whether the backward pass needs a layer's output, what else it needs beside (masks, sums and copies between layers), how
much the layer reads, and what cuDNN takes while a convolution runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

FREED, KEPT, SHARED = 0, 1, 2
MEASURED_ON = ((9, 0), 132)  # compute capability and multiprocessors of the GPU that workspaces are looked up for
_KINDS = {"fp32": "f32", "tf32": "f32", "amp_fp16": "f16", "fp16": "f16", "amp_bf16": "bf16", "bf16": "bf16"}


@dataclass(frozen=True, slots=True)
class Detail:
    """One layer's tensors: numbers a sample, but for workspaces, which are bytes for the whole batch.

    `output`: FREED after the next layer, KEPT until the backward pass, or SHARED with a tensor that was there before (a
    view, or work in place). `beside`: numbers kept that are no layer's output, `beside_bytes` the same in other types.

    >>> Detail(inputs=8, output=KEPT).workspaces
    (0, 0, 0)
    """

    inputs: int
    output: int
    beside: int = 0
    beside_bytes: int = 0
    workspaces: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Watch:
    """Notes of a forward pass: outputs in order, and when a storage was first kept. Tensors stay alive meanwhile."""

    outputs: list[torch.Tensor | None] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    convolutions: dict[int, Any] = field(default_factory=dict)
    kept: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    known: dict[int, torch.Tensor] = field(default_factory=dict)  # alive, or another tensor would get its place

    def keep(self, tensor: torch.Tensor) -> None:
        """Autograd keeps this tensor, in the layer that runs now or between two."""
        self.kept.setdefault(tensor.untyped_storage()._cdata, (len(self.outputs), tensor))

    def forget(self) -> None:
        """The last layer was noted too early."""
        for notes in (self.outputs, self.fresh, self.inputs):
            notes.pop()

    def layer(self, part: nn.Module | None, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """A layer has run; without a module it is attention by a function, which reads what it makes."""
        out = made[0] if made else None
        place = None if out is None else out.untyped_storage()._cdata
        if part is not None:
            self.known.update((tensor.untyped_storage()._cdata, tensor) for tensor in read)
        self.fresh.append(place is not None and place not in self.known)
        if out is not None and place is not None:
            self.known[place] = out
        if isinstance(part, nn.Conv2d) and out is not None and read:
            self.convolutions[len(self.outputs)] = (part, tuple(read[0].shape), tuple(out.shape))
        self.outputs.append(out)
        self.inputs.append(sum(tensor.numel() for tensor in read))

    def details(self, batch: int, precision: str, own: set[int]) -> list[Detail]:
        """The details of every layer; what is kept after the last one belongs to the loss and is left out."""
        beside, other = [0] * (len(self.outputs) + 1), [0] * (len(self.outputs) + 1)
        made = {out.untyped_storage()._cdata for out in self.outputs if out is not None}
        for place, (layer, tensor) in self.kept.items():
            if place in made or place in own:
                continue
            held = tensor.untyped_storage().nbytes()
            if tensor.is_floating_point():
                beside[layer] += held // tensor.element_size() // batch
            else:
                other[layer] += held // batch
        found = []
        for place, out in enumerate(self.outputs):
            state = SHARED if not self.fresh[place] else FREED
            if state == FREED and out is not None and out.untyped_storage()._cdata in self.kept:
                state = KEPT
            taken = self._workspaces(place, precision)
            found.append(Detail(self.inputs[place] // batch, state, beside[place], other[place], taken))
        return found

    def _workspaces(self, place: int, precision: str) -> tuple[int, int, int]:
        """What cuDNN takes for the output, the input's gradient and the filter's gradient, in bytes."""
        if place not in self.convolutions:
            return 0, 0, 0
        from ullage.virtual.kernels.cudnn_choice import workspace
        from ullage.virtual.kernels.cudnn_workspaces import DATA, FILTER, FORWARD, Problem

        part, source, out = self.convolutions[place]
        if part.groups == part.in_channels > 1:
            return 0, 0, 0  # PyTorch's own kernels
        padding = part.padding if isinstance(part.padding, tuple) else (0, 0)
        shared = (source, tuple(part.weight.shape), out, part.stride, padding, part.dilation, part.groups)
        sizes = [
            workspace(Problem(direction, *shared, _KINDS.get(precision, "f32"), False), *MEASURED_ON).size
            for direction in (FORWARD, DATA, FILTER)
        ]
        return sizes[0], sizes[1], sizes[2]
