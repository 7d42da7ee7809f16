"""Operators that change a tensor's shape in place, such as `x.t_()` and `x.squeeze_()`.

PyTorch's own code for them touches nothing but sizes and strides, so it does for tensors without data and for
CPU tensors that are not filled yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.special import SPECIAL, special

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


@special(
    "aten.as_strided_.default",
    "aten.t_.default",
    "aten.transpose_.default",
    "aten.squeeze_.default",
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
    "aten.unsqueeze_.default",
)
def change_shape(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself, with its new shape."""
    return func(*args, **kwargs)


@special("aten.resize_as_.default")
def resize_as(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`resize_` to the size of another tensor."""
    if not args[0].is_cuda:
        return gpu.host.call(func, args, kwargs)
    resize = torch.ops.aten.resize_.default
    return SPECIAL[str(resize)](gpu, resize, (args[0], list(args[1].shape)), {})
