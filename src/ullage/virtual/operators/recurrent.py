"""Recurrent networks and CTC losses, decomposed into cuDNN's operators as in a CUDA build.

Weights share one flat buffer, and lengths are needed as numbers. aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl,
try_get_weight_buf, get_dropout_state), aten/src/ATen/native/RNN.cpp, PackedSequence.cpp and LossCTC.cpp,
aten/src/ATen/cudnn/AutocastRNN.cpp
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ullage.virtual.call.native import storage_of, view_without_data
from ullage.virtual.call.plan import HANDLERS, bytes_of, contiguous_strides, handler
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.operators.recurrent_kernels import (
    GRU,
    LSTM,
    RELU,
    TANH,
    RecurrentNetwork,
    network_of,
    time_first_copy,
)
from ullage.virtual.state import GPUState

# Not `from torch.backends.cudnn import rnn`, which in PyTorch 2.10 is a setting.
cudnn_rnn: Any = importlib.import_module("torch.backends.cudnn.rnn")


def _tensor(gpu: GPUState, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return gpu.memory.tensor(tuple(size), contiguous_strides(size), dtype, math.prod(size) * dtype.itemsize)


def parts_of(buffer: torch.Tensor, weights: Sequence[torch.Tensor], stride: int) -> list[torch.Tensor]:
    """Return the places of the weights in the flat buffer: all matrices, then all biases."""
    biases = _biases(len(weights), stride)
    parts: list[Any] = [None] * len(weights)
    offset = 0
    for index in (*[index for index in range(len(weights)) if index not in biases], *biases):
        size = tuple(weights[index].shape)
        parts[index] = view_without_data(buffer, size, contiguous_strides(size), offset)
        offset += math.prod(size)
    return parts


def _biases(count: int, stride: int) -> list[int]:
    """Return the places of biases: a layer and direction has `stride` weights, two matrices, then any biases and
    projection."""
    return [index for index in range(count) if stride >= 4 and index % stride in (2, 3)]


@handler("aten._cudnn_rnn_flatten_weight.default")
def flatten_weight(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """RNN.cpp, _cudnn_rnn_flatten_weight: the parameters move into one buffer."""
    weights, stride, inputs, mode, hidden, projected, layers, _, both = args
    network = RecurrentNetwork(mode, inputs, hidden, projected, layers, 2 if both else 1, weights[0].dtype)
    buffer = _tensor(gpu, (network.parameters(),), weights[0].dtype)
    for weight, part in zip(weights, parts_of(buffer, weights, stride), strict=True):
        weight.data = part
    if any(isinstance(weight, torch.nn.Parameter) for weight in weights):
        gpu.mark_parameter(buffer)
    return buffer


@handler("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """RNN.cpp, _cudnn_rnn_backward: gradients of the input first, then those of the weights, which share a buffer."""
    source, weights, stride, _, hx, cx, _, grad, grad_hy, grad_cy = args[:10]
    batch_first, mask = args[14], args[21]
    network = network_of(args, gpu.spec, offset=4)
    if grad is None and grad_hy is None and grad_cy is None:
        return None, None, None, [None] * len(weights)
    memory = gpu.memory
    state_grads = [memory.take(bytes_of(hx))] if grad_hy is None else []
    if cx is not None and grad_cy is None:
        state_grads.append(memory.take(bytes_of(cx)))
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
    for temporary in reversed(state_grads):
        memory.give_back(temporary)
    return grad_source, grad_hx, grad_cx, grads


def _weight_gradients(
    gpu: GPUState, network: RecurrentNetwork, weights: Sequence[torch.Tensor], stride: int, source_copy: int
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


def _time_first(gpu: GPUState, source: torch.Tensor, transposed: bool) -> torch.Tensor:
    size = (source.shape[1], source.shape[0], *source.shape[2:]) if transposed else tuple(source.shape)
    made = _tensor(gpu, size, source.dtype)
    if not transposed:
        return made
    stride = contiguous_strides(size)
    return view_without_data(made, tuple(source.shape), (stride[1], stride[0], *stride[2:]), 0)


@handler("aten._pack_padded_sequence.default")
def pack_padded_sequence(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PackedSequence.cpp: a piece for every length, then all of them in one tensor."""
    source, lengths, batch_first = args
    if not source.is_cuda:
        return NotImplemented
    by_batch = lengths_of(gpu, lengths, source.shape[1] if batch_first else source.shape[0])
    with gpu.mode:
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


def lengths_of(gpu: GPUState, lengths: torch.Tensor, longest: int) -> list[int]:
    """Return lengths as numbers; unknown ones on the GPU are assumed to be the longest possible."""
    if not lengths.is_cuda:
        gpu.host.fill(lengths)
        return [int(length) for length in lengths.tolist()]
    known = gpu.values.known(lengths)
    if known is not None:
        return [int(length) for length in known.tolist()]
    gpu.note("shapes", f"{lengths.numel()} sequence lengths on the GPU are assumed to be {longest} each")
    return [longest] * lengths.numel()


@handler("aten._ctc_loss.Tensor", "aten._ctc_loss_backward.Tensor")
def ctc_by_tensors(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """LossCTC.cpp: lengths in tensors become lists of numbers."""
    first = 0 if func is torch.ops.aten._ctc_loss.Tensor else 1
    log_probs, targets = args[first : first + 2]
    if not log_probs.is_cuda:
        return NotImplemented
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel() // max(1, log_probs.shape[1])
    numbers = [lengths_of(gpu, args[first + 2], log_probs.shape[0]), lengths_of(gpu, args[first + 3], longest)]
    packet = torch.ops.aten._ctc_loss if first == 0 else torch.ops.aten._ctc_loss_backward
    with gpu.mode:
        return packet.default(*args[: first + 2], *numbers, *args[first + 4 :], **kwargs)


@handler("aten._use_cudnn_ctc_loss.default", "aten._use_cudnn_ctc_loss.Tensor")
def use_cudnn_ctc(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """cudnn/LossCTC.cpp, _use_cudnn_ctc_loss: only for targets on the CPU, in one row, of 32-bit numbers."""
    log_probs, targets, _, target_lengths, blank = args
    usable = blank == 0 and targets.dim() == 1 and log_probs.dtype is torch.float32
    usable = usable and targets.dtype is torch.int32 and not targets.is_cuda and log_probs.is_cuda
    if usable and isinstance(target_lengths, list | tuple):
        usable = max(target_lengths, default=0) <= 256
    return bool(usable and torch._C._get_cudnn_enabled())


@handler("aten._use_miopen_ctc_loss.default", "aten._use_miopen_ctc_loss.Tensor")
def use_miopen_ctc(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return false: there is no MIOpen on an NVIDIA GPU."""
    return False


# The front ends: torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu and torch.ctc_loss.

_aten = torch.ops.aten
_MODES = {"rnn_relu": RELU, "rnn_tanh": TANH, "lstm": LSTM, "gru": GRU}
_ACCEPTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STATE_A_THREAD = 24  # bytes of cuDNN's random number generator for every thread that the GPU can hold


def install(gpu: GPUState, library: torch.library.Library, replacements: Replacements) -> None:
    networks = _Networks(gpu)
    for name in (f"{name}.{overload}" for name in _MODES for overload in ("input", "data")):
        front = networks.front(name)
        torch.library._impls.discard(f"aten/{name}/AutogradCUDA")
        library.impl(name, front, "AutogradCUDA")
        replacements.put_item(HANDLERS, f"aten.{name}", under_inference_mode(front))
    torch.library._impls.discard("aten/ctc_loss.Tensor/AutogradCUDA")
    library.impl("ctc_loss.Tensor", networks.ctc_loss, "AutogradCUDA")
    replacements.put(cudnn_rnn, "get_cudnn_mode", lambda name: _MODES[name.lower()])


def under_inference_mode(front: Callable[..., Any]) -> Callable[..., Any]:
    """Handle an operator that arrives whole, without autograd."""

    def handle(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args[0].is_cuda:
            return NotImplemented
        with gpu.mode:
            return front(*args, **kwargs)

    return handle


class _Networks:
    """The front ends of one virtual GPU, with cuDNN's dropout state, which stays once it is made."""

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self._dropout_state: torch.Tensor | None = None

    def front(self, operator: str) -> Callable[..., Any]:
        """Return `lstm.input` and the like, for sequences of one length, or `lstm.data`, for packed sequences."""
        name, _, overload = operator.partition(".")

        def run(source: Any, *args: Any) -> Any:
            # ConvUtils.h, cudnn_is_acceptable; else PyTorch's own cells, one step after another
            if not (torch._C._get_cudnn_enabled() and source.dtype in _ACCEPTABLE and source.numel() > 0):
                return getattr(getattr(_aten, name), overload).decompose(source, *args)
            sizes: list[int] = []
            if overload == "data":
                batch_sizes, *rest = args
                self._gpu.host.fill(batch_sizes)
                sizes, args = [int(size) for size in batch_sizes.tolist()], (*rest, False)
            return self._run(_MODES[name], sizes, source, *args)

        return run

    def ctc_loss(self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *settings: Any) -> Any:
        """LossCTC.cpp: lengths are brought to the CPU (under a mode PyTorch would keep them as tensors)."""
        batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
        longest = targets.shape[-1] if targets.dim() == 2 or batch == 1 else targets.numel() // max(1, batch)
        numbers = [
            lengths_of(self._gpu, input_lengths.reshape(-1), log_probs.shape[0]),
            lengths_of(self._gpu, target_lengths.reshape(-1), longest),
        ]
        return _aten.ctc_loss.IntList(log_probs, targets, *numbers, *settings)

    def _run(
        self,
        mode: int,
        sizes: list[int],
        source: Any,
        hidden: Any,
        params: Any,
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
        """RNN.cpp, _cudnn_impl."""
        hx, cx = hidden if mode == LSTM else (hidden, None)
        hidden_size, projected = hx.shape[2], 0
        if cx is not None and cx.shape[2] != hx.shape[2]:
            hidden_size, projected = cx.shape[2], hx.shape[2]
        stride = (4 if has_biases else 2) + (1 if projected else 0)
        directions = 2 if both else 1
        network = RecurrentNetwork(
            mode, source.shape[-1], hidden_size, projected, layers, directions, source.dtype, train=train
        )
        flat = _flat_buffer(params, network, stride)
        state = self._state(dropout, train)
        params = list(params)
        if torch.is_autocast_enabled("cuda") and source.dtype is not torch.float64:
            # AutocastRNN.cpp: everything becomes half precision, whatever autocast's type is
            params = list(_FlatHalf.apply(network.parameters(), stride, *params))
            flat = view_without_data(params[0].detach(), (network.parameters(),), (1,), 0)
            cx = cx if cx is None else cx.to(torch.float16)
            hx, source = hx.to(torch.float16), source.to(torch.float16)
        with torch.autocast("cuda", enabled=False):
            # Tuples of numbers only: a tuple of tensors would release them from the last on.
            shape, settings = (mode, hidden_size, projected, layers), (batch_first, dropout, train, both, sizes)
            out, hy, cy, _, _ = _aten._cudnn_rnn(source, params, stride, flat, hx, cx, *shape, *settings, state)
        return (out, hy, cy) if mode == LSTM else (out, hy)

    def _state(self, dropout: float, train: bool) -> torch.Tensor | None:
        """RNN.cpp, get_dropout_state: made at the first dropout, never freed."""
        if dropout > 0 and train and self._dropout_state is None:
            spec, memory = self._gpu.spec, self._gpu.memory
            memory.take_in_turn(8)
            size = spec.multiprocessors * spec.threads_per_sm * _STATE_A_THREAD
            self._dropout_state = memory.tensor((size,), (1,), torch.uint8, size)
        return self._dropout_state


def _flat_buffer(params: Sequence[Any], network: RecurrentNetwork, stride: int) -> torch.Tensor | None:
    """RNN.cpp, try_get_weight_buf: the buffer behind the parameters, if they lie in it as cuDNN needs them."""
    storage = storage_of(params[0])
    count = network.parameters()
    if storage.nbytes() < count * params[0].element_size():
        return None
    expected = parts_of(view_without_data(params[0].detach(), (count,), (1,), 0), params, stride)
    for param, part in zip(params, expected, strict=True):
        if storage_of(param)._cdata != storage._cdata or param.storage_offset() != part.storage_offset():
            return None
    return view_without_data(params[0].detach(), (count,), (1,), 0)


class _FlatHalf(torch.autograd.Function):
    """AutocastRNN.cpp, _cudnn_rnn_cast_reflatten: weights in half precision, in one buffer."""

    @staticmethod
    def forward(ctx: Any, count: int, stride: int, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.types = [param.dtype for param in params]
        buffer = torch.empty(count, dtype=torch.float16, device=params[0].device)
        return tuple(parts_of(buffer, params, stride))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made = [
            None if grad is None else grad.to(dtype) for grad, dtype in zip(grads[::-1], ctx.types[::-1], strict=True)
        ]
        return (None, None, *made[::-1])
