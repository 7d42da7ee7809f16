"""Small parts: `torch.cuda.jiterator`, targets of an adaptive softmax, and nested tensors."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.cuda import jiterator

from ullage.virtual.call.native import any_on_gpu
from ullage.virtual.call.plan import LOW_PRECISION, handler, like, twin
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState
from ullage.virtual.values.known_values import is_unknown

_LARGEST_HEAD = 256  # of attention kernels for jagged tensors, which consist of other kernels and need no more memory


def install_jiterator(gpu: GPUState, replacements: Replacements) -> None:
    """`torch.cuda.jiterator`: nothing is compiled; sizes and types of outputs follow from the inputs."""

    def call(self: Any, *tensors: torch.Tensor, **numbers: Any) -> Any:
        gpu.operator = f"jiterator.{self.kernel_name}"
        together = functools.reduce(torch.add, map(twin, tensors))
        outputs = [gpu.memory.tensor(*like(together)) for _ in range(self.num_outputs)]
        return outputs[0] if self.num_outputs == 1 else tuple(outputs)

    replacements.put(jiterator._JittedFunction, "__call__", call)


def install_targets(gpu: GPUState, replacements: Replacements) -> None:
    """Give unknown targets values when a loss splits them: each class gets the same share. Targets computed on the GPU
    have no data, and `AdaptiveLogSoftmaxWithLoss` rejects targets that do not add up."""
    forward = nn.AdaptiveLogSoftmaxWithLoss.forward

    @functools.wraps(forward)
    def split_evenly(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
        if is_unknown(target_):
            gpu.note("values", "targets of an adaptive softmax have no data: all classes are assumed equally frequent")
            spread = torch.arange(target_.numel(), device="cpu") * self.n_classes // max(1, target_.numel())
            target_ = gpu.values.tensor(spread.view(target_.shape).to(target_.dtype))
        return forward(self, input_, target_)

    replacements.put(nn.AdaptiveLogSoftmaxWithLoss, "forward", split_evenly)


def install_nested(gpu: GPUState, replacements: Replacements) -> None:
    ampere = gpu.spec.told_capability >= (8, 0)

    def can_use_flash_attention(params: Any, debug: bool = False) -> bool:
        serves = params.query.dtype in LOW_PRECISION and params.attn_mask is None
        return bool(ampere and serves and params.query.shape[-1] <= _LARGEST_HEAD and torch._C._get_flash_sdp_enabled())

    def can_use_efficient_attention(params: Any, debug: bool = False) -> bool:
        types = (torch.float32, *LOW_PRECISION) if ampere else (torch.float32, torch.float16)
        return bool(params.query.dtype in types and torch._C._get_mem_efficient_sdp_enabled())

    def can_use_cudnn_attention(params: Any, debug: bool = False) -> bool:
        return False

    def answer(module: ModuleType) -> None:
        for function in (can_use_flash_attention, can_use_efficient_attention, can_use_cudnn_attention):
            replacements.put_existing(module, function.__name__, function)

    replacements.when_imported("torch.nested._internal.sdpa", answer)


@handler(
    "aten._nested_tensor_from_tensor_list.default",
    "aten._nested_view_from_buffer.default",
    "aten._nested_view_from_buffer_copy.default",
    "aten._nested_tensor_from_mask.default",
    "aten._nested_from_padded.default",
)
def strided(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse nested tensors of the strided layout: they are C++ objects with a storage on a real GPU."""
    if not any_on_gpu((*args, *kwargs.values())):
        return gpu.host.call(func, args, kwargs)
    gpu.refuse("a nested tensor of the strided layout", "give layout=torch.jagged")
