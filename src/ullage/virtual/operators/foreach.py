"""Operators over lists of tensors: the foreach and fused kernels of optimizers, and those of GradScaler.

Kernels that work in place need no memory of their own (aten/src/ATen/native/cuda/ForeachFunctors.cuh); the others
allocate one output for each tensor, in order.
"""

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ullage.virtual.call.plan import accumulate_type, span_of_elements, written_places
from ullage.virtual.operators.copies import layout_of_copy
from ullage.virtual.state import GPUState


def is_list_operator(name: str) -> bool:
    """Check for operators over lists of tensors, handled by `list_operator`."""
    return name.startswith(("aten._foreach_", "aten._fused_ada", "aten._fused_sgd", "aten._amp_foreach"))


_layouts: dict[Any, Any] = {}  # of outputs; they depend on nothing but the key


def list_operator(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = next((value for value in args if isinstance(value, list | tuple)), ())
    if not (tensors and tensors[0].is_cuda):
        gpu.host.fill_all((args, kwargs))
        return func(*args, **kwargs)
    gpu.operator = str(func)
    returns = func._schema.returns
    if not returns:
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            gpu.values.set(args[1], torch.zeros(()))  # no infinity was found
        else:
            lists = [args[place] for place in written_places(func)[0]]
            written = [tensor for each in lists for tensor in (each if isinstance(each, list | tuple) else [each])]
            gpu.values.follow_in_place(func, args, kwargs, written)
            if func._schema.name.startswith("aten::_foreach_") and not written[0].is_inference():
                increment_version(written)  # these kernels increment it themselves: ForeachUtils.h
        return None
    if "norm" in func._schema.name or func._schema.name.endswith("_max"):
        return _foreach_norm(gpu, func, args, kwargs)
    memory = gpu.memory
    outputs = []
    for tensor in tensors:
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        layout = _layouts.get(key)
        if layout is None:
            size, stride = layout_of_copy(tensor, None)
            layout = (size, stride, tensor.dtype, span_of_elements(size, stride) * tensor.element_size())
            _layouts[key] = layout
        outputs.append(memory.tensor(*layout))
    return outputs


_CHUNK = 65536  # elements a block works on; aten/src/ATen/native/cuda/MultiTensorApply.cuh


def _foreach_norm(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """ForeachReduceOp.cu: one partial result a chunk of the longest tensor, then one number a tensor."""
    tensors = args[0]
    dtype = kwargs.get("dtype") or tensors[0].dtype
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    partial_type = accumulate_type(dtype)
    with gpu.memory.holding(max(1, chunks) * len(tensors) * partial_type.itemsize):
        return [gpu.memory.tensor((), (), dtype, dtype.itemsize) for _ in tensors]
