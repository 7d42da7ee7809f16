"""Recurrent networks: operators that hand out parts of one buffer, or that need the values of lengths.

aten/src/ATen/native/cudnn/RNN.cpp, aten/src/ATen/native/PackedSequence.cpp, aten/src/ATen/native/LossCTC.cpp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.kernels.layouts import elements
from ullage.virtual.kernels.plan import contiguous_strides
from ullage.virtual.kernels.rnn import Network, network_of, time_first_copy
from ullage.virtual.native import view_without_data
from ullage.virtual.special import special

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


def _tensor(gpu: VirtualGPU, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return gpu.memory.tensor(tuple(size), contiguous_strides(size), dtype, elements(size) * dtype.itemsize)


def parts_of(buffer: torch.Tensor, weights: Sequence[torch.Tensor], stride: int) -> list[torch.Tensor]:
    """The places of the weights in the flat buffer: all matrices, then all biases."""
    biases = _biases(len(weights), stride)
    parts: list[Any] = [None] * len(weights)
    offset = 0
    for index in (*[index for index in range(len(weights)) if index not in biases], *biases):
        size = tuple(weights[index].shape)
        parts[index] = view_without_data(buffer, size, contiguous_strides(size), offset)
        offset += elements(size)
    return parts


def _biases(count: int, stride: int) -> list[int]:
    """Each layer and direction has `stride` weights: two matrices, two biases if any, a projection if any."""
    return [index for index in range(count) if stride >= 4 and index % stride in (2, 3)]


@special("aten._cudnn_rnn_flatten_weight.default")
def flatten_weight(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """RNN.cpp, _cudnn_rnn_flatten_weight: the parameters move into one buffer."""
    weights, stride, inputs, mode, hidden, projected, layers, _, both = args
    network = Network(
        mode, inputs, hidden, projected, layers, 2 if both else 1, 1, 1, 1, False, False, True, weights[0].dtype
    )
    buffer = _tensor(gpu, (network.parameters(),), weights[0].dtype)
    for weight, part in zip(weights, parts_of(buffer, weights, stride), strict=True):
        weight.data = part
    if any(isinstance(weight, torch.nn.Parameter) for weight in weights):
        gpu.mark_parameter(buffer)
    return buffer


@special("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """RNN.cpp, _cudnn_rnn_backward: gradients of the input first, then those of the weights, which share a buffer."""
    source, weights, stride, _, hx, cx, _, grad, grad_hy, grad_cy = args[:10]
    batch_first, mask = args[14], args[21]
    network = network_of(args, offset=4)
    if grad is None and grad_hy is None and grad_cy is None:
        return None, None, None, [None] * len(weights)
    memory = gpu.memory
    kept = [memory.take(hx.numel() * hx.element_size())] if grad_hy is None else []
    if cx is not None and grad_cy is None:
        kept.append(memory.take(cx.numel() * cx.element_size()))
    source_copy = time_first_copy(source, batch_first, network.packed)
    copies = [source_copy, time_first_copy(grad, batch_first, network.packed) if grad is not None else 0]
    taken = [memory.take(size) for size in copies if size]
    grad_source = _time_first(gpu, source, batch_first and not network.packed)
    grad_hx = _tensor(gpu, hx.shape, hx.dtype)
    grad_cx = _tensor(gpu, cx.shape, cx.dtype) if cx is not None else None
    taken.append(memory.take(network.workspace(backward=True)))
    for temporary in reversed(taken):
        memory.give_back(temporary)
    grads: list[Any] = [None] * len(weights)
    if mask[3]:
        grads = _weight_gradients(gpu, network, weights, stride, source_copy)
    for temporary in reversed(kept):
        memory.give_back(temporary)
    return grad_source, grad_hx, grad_cx, grads


def _weight_gradients(
    gpu: VirtualGPU, network: Network, weights: Sequence[torch.Tensor], stride: int, source_copy: int
) -> list[torch.Tensor]:
    memory = gpu.memory
    copy = memory.take(source_copy) if source_copy else None
    buffer = _tensor(gpu, (network.parameters(),), weights[0].dtype)
    workspace = memory.take(network.workspace(backward=True))
    if _biases(len(weights), stride):
        grads = parts_of(buffer, weights, stride)
    else:  # without biases, the buffer is larger than the gradients: they are copied out of it
        grads = [_tensor(gpu, weight.shape, weight.dtype) for weight in weights]
    memory.give_back(workspace)
    del buffer
    if copy is not None:
        memory.give_back(copy)
    return grads


def _time_first(gpu: VirtualGPU, source: torch.Tensor, transposed: bool) -> torch.Tensor:
    size = (source.shape[1], source.shape[0], *source.shape[2:]) if transposed else tuple(source.shape)
    made = _tensor(gpu, size, source.dtype)
    if not transposed:
        return made
    stride = contiguous_strides(size)
    return view_without_data(made, tuple(source.shape), (stride[1], stride[0], *stride[2:]), 0)


@special("aten._pack_padded_sequence.default")
def pack_padded_sequence(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PackedSequence.cpp: a piece for every length, then all of them in one tensor."""
    source, lengths, batch_first = args
    if not source.is_cuda:
        return NotImplemented
    by_batch = lengths_of(gpu, lengths, source.shape[1] if batch_first else source.shape[0])
    with gpu.counting():
        timed = source.transpose(0, 1) if batch_first else source
        pieces: list[Any] = []
        sizes, before = [], 0
        for place, length in enumerate(reversed(by_batch)):
            if length > before:
                batch = len(by_batch) - place
                pieces.append(timed[before:length, :batch].contiguous().view(-1, *timed.shape[2:]))
                sizes += [batch] * (length - before)
                before = length
        packed = torch.cat(pieces)
        for place in range(len(pieces)):
            pieces[place] = None  # freed from the first to the last, as a C++ vector does
        return packed, torch.tensor(sizes, dtype=torch.int64)


def lengths_of(gpu: VirtualGPU, lengths: torch.Tensor, longest: int) -> list[int]:
    """Lengths as numbers; those on the GPU whose values nobody knows are taken as the longest possible."""
    if not lengths.is_cuda:
        gpu.host.fill(lengths)
        return [int(length) for length in lengths.tolist()]
    known = gpu.values.known(lengths)
    if known is not None:
        return [int(length) for length in known.tolist()]
    gpu.note("values", f"{lengths.numel()} sequence lengths on the GPU taken as {longest} each")
    return [longest] * lengths.numel()


@special("aten._ctc_loss.Tensor", "aten._ctc_loss_backward.Tensor")
def ctc_by_tensors(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """LossCTC.cpp: lengths in tensors become lists of numbers."""
    first = 0 if func is torch.ops.aten._ctc_loss.Tensor else 1
    log_probs, targets = args[first : first + 2]
    if not log_probs.is_cuda:
        return NotImplemented
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel() // max(1, log_probs.shape[1])
    numbers = [
        lengths_of(gpu, args[first + 2], log_probs.shape[0]),
        lengths_of(gpu, args[first + 3], longest),
    ]
    packet = torch.ops.aten._ctc_loss if first == 0 else torch.ops.aten._ctc_loss_backward
    with gpu.counting():
        return packet.default(*args[: first + 2], *numbers, *args[first + 4 :], **kwargs)


@special("aten._use_cudnn_ctc_loss.default", "aten._use_cudnn_ctc_loss.Tensor")
def use_cudnn_ctc(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """cudnn/LossCTC.cpp, _use_cudnn_ctc_loss: only for targets on the CPU, in one row, of 32-bit numbers."""
    log_probs, targets, _, target_lengths, blank = args
    usable = blank == 0 and targets.dim() == 1 and log_probs.dtype is torch.float32
    usable = usable and targets.dtype is torch.int32 and not targets.is_cuda and log_probs.is_cuda
    if usable and isinstance(target_lengths, list | tuple):
        usable = max(target_lengths, default=0) <= 256
    return bool(usable and torch._C._get_cudnn_enabled())


@special("aten._use_miopen_ctc_loss.default", "aten._use_miopen_ctc_loss.Tensor")
def use_miopen_ctc(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """There is no MIOpen on an NVIDIA GPU."""
    return False
