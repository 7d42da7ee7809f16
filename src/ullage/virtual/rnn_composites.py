"""torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu as a CUDA build takes them apart: into cuDNN's networks.

aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl, try_get_weight_buf, get_dropout_state), aten/src/ATen/native/RNN.cpp,
aten/src/ATen/cudnn/AutocastRNN.cpp. torch.ctc_loss is here too: it wants the same lengths as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.backends.cudnn import rnn as cudnn_rnn

from ullage.virtual.kernels.rnn import GRU, LSTM, RELU, TANH, Network
from ullage.virtual.native import view_without_data
from ullage.virtual.recurrent import lengths_of, parts_of
from ullage.virtual.special import SPECIAL

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_aten = torch.ops.aten
_MODES = {"rnn_relu": RELU, "rnn_tanh": TANH, "lstm": LSTM, "gru": GRU}
_NAMES = {"RNN_RELU": RELU, "RNN_TANH": TANH, "LSTM": LSTM, "GRU": GRU}
_ACCEPTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STATE_A_THREAD = 24  # bytes of cuDNN's random number generator for every thread that the GPU can hold
_storage_of = torch._C.TensorBase.untyped_storage


def install(gpu: VirtualGPU, library: torch.library.Library) -> Callable[[], None]:
    """Register the front ends; returns what removes the rest."""
    networks = _Networks(gpu)
    handlers = {}
    for name, mode in _MODES.items():
        for overload, front in (("input", networks.padded(mode)), ("data", networks.packed(mode))):
            torch.library._impls.discard(f"aten/{name}.{overload}/AutogradCUDA")
            library.impl(f"{name}.{overload}", front, "AutogradCUDA")
            handlers[f"aten.{name}.{overload}"] = _under_inference_mode(front)
    torch.library._impls.discard("aten/ctc_loss.Tensor/AutogradCUDA")
    library.impl("ctc_loss.Tensor", networks.ctc_loss, "AutogradCUDA")
    before = {name: SPECIAL.get(name) for name in handlers}
    SPECIAL.update(handlers)
    get_mode = cudnn_rnn.get_cudnn_mode
    cudnn_rnn.get_cudnn_mode = lambda name: _NAMES[name]

    def remove() -> None:
        cudnn_rnn.get_cudnn_mode = get_mode
        for name, handler in before.items():
            if handler is None:
                SPECIAL.pop(name, None)
            else:
                SPECIAL[name] = handler

    return remove


def _under_inference_mode(front: Callable[..., Any]) -> Callable[..., Any]:
    """Without autograd the operator arrives whole at the virtual GPU's mode."""

    def handle(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args[0].is_cuda:
            return NotImplemented
        with gpu.counting():
            return front(*args, **kwargs)

    return handle


class _Networks:
    """The front ends of one virtual GPU, with the state of cuDNN's dropout, which stays once it is made."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self._gpu = gpu
        self._dropout_state: torch.Tensor | None = None

    def padded(self, mode: int) -> Callable[..., Any]:
        """lstm.input and its like: sequences of one length."""

        def front(
            source: Any, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool,
        ) -> Any:  # fmt: skip
            if not _acceptable(source):
                return _plain(mode, "input", source, hidden, params, has_biases, num_layers, dropout, train,
                              bidirectional, batch_first)  # fmt: skip
            return self._run(mode, source, hidden, params, has_biases, num_layers, dropout, train, bidirectional,
                             batch_first, [])  # fmt: skip

        return front

    def packed(self, mode: int) -> Callable[..., Any]:
        """lstm.data and its like: packed sequences."""

        def front(
            data: Any, batch_sizes: Any, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
            train: bool, bidirectional: bool,
        ) -> Any:  # fmt: skip
            if not _acceptable(data):
                return _plain(mode, "data", data, batch_sizes, hidden, params, has_biases, num_layers, dropout, train,
                              bidirectional)  # fmt: skip
            self._gpu.host.fill(batch_sizes)
            sizes = [int(size) for size in batch_sizes.tolist()]
            return self._run(mode, data, hidden, params, has_biases, num_layers, dropout, train, bidirectional, False,
                             sizes)  # fmt: skip

        return front

    def ctc_loss(
        self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Any:  # fmt: skip
        """LossCTC.cpp: lengths are brought to the CPU (under a mode PyTorch would keep them as tensors)."""
        batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
        longest = targets.shape[-1] if targets.dim() == 2 or batch == 1 else targets.numel() // max(1, batch)
        numbers = [
            lengths_of(self._gpu, input_lengths.reshape(-1), log_probs.shape[0]),
            lengths_of(self._gpu, target_lengths.reshape(-1), longest),
        ]
        return _aten.ctc_loss.IntList(log_probs, targets, *numbers, blank, reduction, zero_infinity)

    def _run(
        self, mode: int, source: Any, hidden: Any, params: Any, has_biases: bool, layers: int, dropout: float,
        train: bool, both: bool, batch_first: bool, sizes: list[int],
    ) -> Any:  # fmt: skip
        """RNN.cpp, _cudnn_impl."""
        hx, cx = hidden if mode == LSTM else (hidden, None)
        hidden_size, projected = hx.shape[2], 0
        if cx is not None and cx.shape[2] != hx.shape[2]:
            hidden_size, projected = cx.shape[2], hx.shape[2]
        stride = (4 if has_biases else 2) + (1 if projected else 0)
        network = Network(mode, source.shape[-1], hidden_size, projected, layers, 2 if both else 1, 1, 1, 1, False,
                          False, train, source.dtype)  # fmt: skip
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
            out, hy, cy, _, _ = _aten._cudnn_rnn(
                source, params, stride, flat, hx, cx, mode, hidden_size, projected, layers, batch_first, dropout,
                train, both, sizes, state,
            )  # fmt: skip
        return (out, hy, cy) if mode == LSTM else (out, hy)

    def _state(self, dropout: float, train: bool) -> torch.Tensor | None:
        """RNN.cpp, get_dropout_state: made at the first dropout, kept for ever."""
        if dropout > 0 and train and self._dropout_state is None:
            spec, memory = self._gpu.spec, self._gpu.memory
            memory.give_back(memory.take(8))
            size = (spec.sms or 1) * (spec.max_threads_per_sm or 2048) * _STATE_A_THREAD
            self._dropout_state = memory.tensor((size,), (1,), torch.uint8, size)
        return self._dropout_state


def _acceptable(source: Any) -> bool:
    """ConvUtils.h, cudnn_is_acceptable."""
    return bool(torch._C._get_cudnn_enabled() and source.dtype in _ACCEPTABLE and source.numel() > 0)


def _plain(mode: int, overload: str, *args: Any) -> Any:
    """PyTorch's own cells, one step after another."""
    name = {number: name for name, number in _MODES.items()}[mode]
    return getattr(getattr(_aten, name), overload).decompose(*args)


def _flat_buffer(params: Sequence[Any], network: Network, stride: int) -> torch.Tensor | None:
    """RNN.cpp, try_get_weight_buf: the buffer behind the parameters, if they lie in it as cuDNN wants them."""
    storage = _storage_of(params[0])
    count = network.parameters()
    if storage.nbytes() < count * params[0].element_size():
        return None
    expected = parts_of(view_without_data(params[0].detach(), (count,), (1,), 0), params, stride)
    for param, part in zip(params, expected, strict=True):
        if _storage_of(param)._cdata != storage._cdata or param.storage_offset() != part.storage_offset():
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
