"""Recurrent networks by cuDNN, and PyTorch's fused cells (aten/src/ATen/native/cudnn/RNN.cpp, cuda/RNN.cu).

cuDNN's own memory is not documented; `benchmarks/training/cudnn_figures.py` fits its figures (`cudnn/data`) to calls on
an H200. Of 600 other calls, drawn at random, 557 are exact in every size; the peak of the step is exact for 588 and
within 1% for 599 of them (`benchmarks/accuracy/operators.py compare-recurrent`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ullage.hardware import GPU
from ullage.hardware.specification import MEASURED_CAPABILITY
from ullage.units import ceil_div, round_up
from ullage.virtual.call.plan import (
    CUDNN,
    Alias,
    Call,
    Output,
    Plan,
    Steps,
    contiguous,
    contiguous_strides,
    copy_size,
    kernel,
    new,
    twin,
)
from ullage.virtual.cudnn.plans import figures_of
from ullage.virtual.operators.reductions import add_sum

RELU, TANH, LSTM, GRU = range(4)  # cudnnRNNMode_t
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_NAMES = {RELU: "plain", TANH: "plain", LSTM: "lstm", GRU: "gru"}
_FIGURES = figures_of("recurrent")
_PERSISTENT_SMS = 98
_VOLTA_PERSISTS = ((40, 128), (20, 96), (10, 32))  # the fewest steps, and the largest batch


def _aligned(size: int) -> int:
    return round_up(size, _FIGURES["alignment"])


@dataclass(frozen=True, slots=True)
class RecurrentNetwork:
    """The shape of a recurrent network and of its input, which decide its memory."""

    mode: int
    inputs: int
    hidden: int
    projected: int
    layers: int
    directions: int
    dtype: torch.dtype
    steps: int = 1
    batch: int = 1
    tokens: int = 1  # steps times batch, fewer for sequences of different lengths
    packed: bool = False
    dropout: bool = False
    train: bool = True
    gpu: GPU | None = None  # `None`: as on the GPU that was measured

    @property
    def deep(self) -> bool:
        return self.layers > 1

    def matrices(self) -> int:
        out = self.projected or self.hidden
        total = 0
        for layer in range(self.layers):
            inputs = self.inputs if layer == 0 else out * self.directions
            total += _GATES[self.mode] * self.hidden * (inputs + out) + self.projected * self.hidden
        return total * self.directions

    def parameters(self) -> int:
        """Return the elements of the flat weight buffer: cuDNN has two biases for every gate, used or not."""
        return self.matrices() + 2 * _GATES[self.mode] * self.hidden * self.layers * self.directions

    def reserve(self) -> int:
        """Return the bytes kept for the backward pass: gates, cells, values between layers, and dropout masks."""
        unit = self.tokens * self.hidden * self.directions * self.dtype.itemsize
        gates = 6 if self.mode == GRU else _GATES[self.mode]
        size = int(_FIGURES["header"]) + _aligned(gates * unit * self.layers) + _aligned(unit * (self.layers - 1))
        if self.mode == LSTM:
            size += _aligned(unit * self.layers)
        if self.projected:
            projected = self.tokens * self.projected * self.directions * self.dtype.itemsize
            size += _aligned(unit * self.layers) + _aligned(projected * self.layers)
        if self.dropout and self.deep:
            bits = self.steps * self.batch * self.hidden * self.directions * (self.layers - 1)
            size += self.directions * _aligned(ceil_div(bits, 8))
        return size

    def workspace(self, backward: bool = False) -> int:
        """Return the bytes of cuDNN's workspace: a fixed part, and the buffers of the pass that needs more."""
        values, row = self.values(), self.row(backward)
        passes = ("forward", "backward") if self.train else ("forward",)
        return self.fixed() + max(buffer_bytes(row[each], values) for each in passes)

    def fixed(self) -> int:
        """Return the bytes of a workspace that do not depend on the steps: a part of the library, and the weights."""
        lengths = 0 if self.packed else _aligned(8 * self.batch)
        weights = _aligned(self.matrices() * self.dtype.itemsize)
        return int(_FIGURES["header"] + _FIGURES["library"] * self.layers * self.directions) + lengths + weights

    def values(self) -> dict[str, int]:
        """Return the bytes of what the buffers of a workspace hold."""
        once, cell = (rows * self.hidden * self.dtype.itemsize for rows in (self.tokens, self.batch))
        token, given = once * self.directions, self.tokens * self.inputs * self.dtype.itemsize
        step = next(step for step in _FIGURES["window"] if self.batch <= step.get("batch", self.batch))
        window = (step["first"] + step["each"] * self.layers) * cell * self.directions
        projected = self.projected * self.directions * self.dtype.itemsize
        return {
            "once": once,
            "token": token,
            "given": given,
            "widest": max(token, given * self.directions),
            "window": min(token, window) if self.deep else token,
            "deep": 2 * token if self.deep else token,
            "dropped": token if self.deep and self.dropout else 0,
            "state": cell * self.directions * self.layers,
            "projected": self.tokens * projected,
            "projected_state": self.batch * projected * self.layers,
        }

    def _persists(self) -> bool:
        """RNN.cpp, get_algo: one layer of half precision may stay on the multiprocessors."""
        fits = self.layers == self.directions == 1 and self.hidden <= 1024 and not self.projected
        even = self.hidden % 128 == self.inputs % 128 == 0
        return self.dtype is torch.float16 and fits and even and self._gpu_persists()

    def _gpu_persists(self) -> bool:
        """RNN.cpp, use_persist_device_heuristics: not on Turing, 8.6, and cards of fewer than 98 multiprocessors."""
        capability, sms = MEASURED_CAPABILITY, _PERSISTENT_SMS
        if self.gpu is not None:
            capability, sms = self.gpu.capability, self.gpu.multiprocessors
        if capability[0] == 7 and capability != (7, 5):
            even = (self.batch % 16 == 0 and self.batch not in (80, 112)) or self.batch == 8
            return even and any(self.steps >= steps and self.batch <= most for steps, most in _VOLTA_PERSISTS)
        if capability[0] < 8 or capability[1] == 6 or sms < _PERSISTENT_SMS or self.mode == GRU:
            return False
        few = self.mode == LSTM or self.batch < 96 or self.hidden < 896
        return self.batch % 8 == 0 and self.batch <= 128 and few

    def row(self, backward: bool) -> dict[str, Any]:
        """Return the buffers of this kind of network; small ones stay on the multiprocessors for all steps."""
        most = _FIGURES["small"]["backward" if backward else "forward"][_GATES[self.mode] == 1]
        small = self.hidden <= most and self.dtype is not torch.bfloat16 and not self.projected
        words = {_NAMES[self.mode], "both" if self.directions == 2 else "one", "packed" if self.packed else "padded"}
        words |= {"small" if small or self._persists() else "large", "projected" if self.projected else "whole"}
        return next(row for row in _FIGURES["buffers"] if words.issuperset(row["words"].split()))


def buffer_bytes(counts: Mapping[str, Sequence[int]], values: Mapping[str, int]) -> int:
    """Return the bytes of buffers that each hold a value some times."""
    return sum(_aligned(count * values[name]) for name, several in counts.items() for count in several)


def network_of(call_args: Any, gpu: GPU, offset: int = 0) -> RecurrentNetwork:
    """Return the network of a call of `_cudnn_rnn`; `_cudnn_rnn_backward` has `offset` more arguments before."""
    source = call_args[0]
    mode, hidden, projected, layers, batch_first, dropout, train, both, sizes = call_args[6 + offset : 15 + offset]
    if len(sizes):
        steps, batch, tokens = len(sizes), sizes[0], source.shape[0]
    else:
        steps, batch = (source.shape[1], source.shape[0]) if batch_first else source.shape[:2]
        tokens = steps * batch
    return RecurrentNetwork(
        mode,
        source.shape[-1],
        hidden,
        projected,
        layers,
        directions=2 if both else 1,
        dtype=source.dtype,
        steps=steps,
        batch=batch,
        tokens=tokens,
        packed=bool(len(sizes)),
        dropout=dropout > 0 and train,
        train=train,
        gpu=gpu,
    )


def time_first_copy(source: torch.Tensor, batch_first: bool, packed: bool) -> int:
    return copy_size(twin(source).transpose(0, 1) if batch_first and not packed else source)


_FITTED = ("recurrent", "what cuDNN takes for recurrent networks follows fitted formulas, which are not always exact")


@kernel("aten._cudnn_rnn.default")
def cudnn_rnn(call: Call) -> Plan:
    """RNN.cpp, _cudnn_rnn."""
    source, weights, _, flat, hx, cx = call.args[:6]
    batch_first = call.args[10]
    network = network_of(call.args, call.gpu)
    width = (network.projected or network.hidden) * network.directions
    packed = network.packed
    out_size = (network.tokens, width) if packed else (network.steps, network.batch, width)
    out = new(out_size, source.dtype)
    if batch_first and not packed:
        stride = contiguous_strides(out_size)
        out = out._replace(size=(out_size[1], out_size[0], width), stride=(stride[1], stride[0], 1))
    cells = contiguous(cx) if cx is not None else new((0,), hx.dtype)
    reserve = new((network.reserve() if network.train else 0,), torch.uint8)
    steps = Steps().temporary(time_first_copy(source, batch_first, packed)).copies(hx, cx).output(0, 1, 2)
    buffer: Output
    if flat is None:
        buffer = new((network.parameters(),), weights[0].dtype)
        steps.output(4)
    else:
        buffer = Alias(3, tuple(flat.shape), flat.stride(), 0, flat.dtype)
    workspace = steps.take(network.workspace())
    steps.output(3).free(workspace)
    return steps.plan(out, contiguous(hx), cells, reserve, buffer, library=CUDNN, note=_FITTED)


@kernel("aten._thnn_fused_lstm_cell.default")
def lstm_cell(call: Call) -> Plan:
    """RNN.cu, _thnn_fused_lstm_cell_cuda: the workspace for the backward pass is made first."""
    gates, state = call.args[0], contiguous(call.args[2])
    return Steps().output(2, 0, 1).plan(state, state, contiguous(gates))


@kernel("aten._thnn_fused_lstm_cell_backward_impl.default")
def lstm_cell_backward(call: Call) -> Plan:
    """RNN.cu, _thnn_fused_lstm_cell_backward_impl_cuda."""
    cx, workspace, has_bias = call.args[2], call.args[4], call.args[5]
    steps = Steps().output(0, 1)
    bias = new((workspace.shape[1],), workspace.dtype) if has_bias else None
    if has_bias:
        add_sum(steps.output(2), call, workspace, [0], workspace.dtype)
    return steps.plan(contiguous(workspace), contiguous(cx), bias)


@kernel("aten._thnn_fused_gru_cell.default")
def gru_cell(call: Call) -> Plan:
    """RNN.cu, _thnn_fused_gru_cell_cuda: five numbers a hidden unit are kept."""
    hx = call.args[2]
    batch, hidden = hx.shape
    return Steps().output(1, 0).plan(contiguous(hx), new((batch, 5 * hidden), hx.dtype))


@kernel("aten._thnn_fused_gru_cell_backward.default")
def gru_cell_backward(call: Call) -> Plan:
    """RNN.cu, _thnn_fused_gru_cell_backward_cuda."""
    grad, _, has_bias = call.args
    batch, hidden = grad.shape
    gates = new((batch, 3 * hidden), grad.dtype)
    bias = new((3 * hidden,), grad.dtype) if has_bias else None
    steps = Steps().output(0, 1, 2)
    for place in (3, 4) if has_bias else ():
        steps.output(place)
        add_sum(steps, call, torch.empty(gates.size, dtype=grad.dtype, device="meta"), [0], grad.dtype)
    return steps.plan(gates, gates, contiguous(grad), bias, bias)
