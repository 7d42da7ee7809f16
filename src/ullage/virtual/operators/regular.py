"""Kernels whose requests follow from their arguments in one regular way: a table instead of a rule for each.

A row lists allocations in this order: copies of arguments whose layout does not suit the kernel, the outputs, copies of
further arguments, and temporaries. Everything but the outputs is freed at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ullage.virtual.call.plan import (
    Call,
    Output,
    Plan,
    Steps,
    accumulate_type,
    bytes_of,
    contiguous,
    kernel,
    like,
    new,
    suggested_format,
)

Arguments = Callable[..., Any]  # gets all arguments of a call by place


@dataclass(frozen=True, slots=True)
class Regular:
    """The allocations of some operators. Arguments are given by their places. `outputs` returns the outputs if PyTorch
    infers others, `order` is their order, `temporaries` returns sizes in bytes. The strides of the argument `layout`
    suggest the layout of the copies; without it, they are contiguous."""

    operators: str  # without "aten." and ".default"
    source: str  # its file in aten/src/ATen/native, in cuda/ by default, and its allocations
    before: Sequence[int] = ()
    outputs: Arguments | None = None
    order: Sequence[int] | None = None
    copies: Sequence[int] = ()
    layout: int | None = None
    temporaries: Arguments | None = None

    def names(self) -> list[str]:
        return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in self.operators.split()]

    def plan(self, call: Call) -> Plan:
        args = call.args
        outputs: list[Output] = self.outputs(*args) if self.outputs else call.infer().outputs
        wanted = torch.contiguous_format if self.layout is None else suggested_format(args[self.layout])
        steps = Steps().copies(*(args[place] for place in self.before), layout=wanted)
        steps.output(*(range(len(outputs)) if self.order is None else self.order))
        steps.copies(*(args[place] for place in self.copies), layout=wanted)
        if self.temporaries:
            steps.temporary(*self.temporaries(*args))
        return steps.plan(*outputs)


def _with_mask(source: torch.Tensor, *rest: Any) -> list[Output]:
    return [like(source), like(source, torch.bool)]


def _first(source: torch.Tensor, *rest: Any) -> list[Output]:
    return [contiguous(source)]


def _second(first: Any, source: torch.Tensor, *rest: Any) -> list[Output]:
    return [contiguous(source)]


_TABLE = (
    Regular(
        "native_dropout", "Dropout.cu: the mask, a byte an element, is taken first.", outputs=_with_mask, order=(1, 0)
    ),
    Regular("pow.Scalar", "Pow.cpp: the base becomes a tensor on the GPU.", temporaries=lambda *args: (8,)),
    Regular(
        "_cdist_backward",
        "../Distance.cpp, DistanceKernel.cu: the gradient of every pair before it is summed.",
        temporaries=lambda grad, left, right, *_: (bytes_of(left) * right.shape[-2],),
    ),
    Regular(
        "unfold_backward",
        "UnfoldBackward.h: an index along the unfolded dimension.",
        temporaries=lambda grad, size, dim, length, step: (8 * ((grad.shape[dim] - 1) * step + length),),
    ),
    Regular(
        "log_sigmoid_forward",
        "Activation.cpp, log_sigmoid_forward_cuda: the buffer of the CPU kernel stays empty.",
        outputs=lambda source: [like(source), new((0,), source.dtype)],
    ),
    Regular("glu_backward", "Activation.cpp, glu_backward_cuda: contiguous, whatever the input is.", outputs=_second),
    Regular("rrelu_with_noise", "RreluWithNoise.cu: works on contiguous tensors.", outputs=_first, copies=(0,)),
    Regular(
        "_weight_norm_interface",
        "WeightNorm.cu: norms of half-precision weights are kept in single precision.",
        outputs=lambda direction, length, *_: [like(direction), contiguous(length, accumulate_type(length.dtype))],
    ),
    Regular(
        "_weight_norm_interface_backward",
        "WeightNorm.cu, weight_norm_cuda_backward; older releases have no shape inference for it.",
        outputs=lambda grad, direction, length, *_: [contiguous(direction), contiguous(length)],
    ),
    Regular(
        "_standard_gamma _standard_gamma_grad _dirichlet_grad binomial",
        "Distributions.cpp, _s_gamma_cuda and others: contiguous, whatever the parameters are.",
        outputs=_first,
    ),
    Regular(
        "_sample_dirichlet",
        "Distributions.cpp, _s_dirichlet_cuda: samples of gamma distributions are divided by their sums.",
        outputs=_first,
        temporaries=lambda source, *_: (source.numel() // max(1, source.shape[-1]) * source.element_size(),),
    ),
    # Numbers rounded as if they were quantized, for quantization-aware training.
    Regular(
        "fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "../quantized/FakeQuantPerTensorAffine.cpp: the rounded numbers, and which of them were in range.",
        outputs=_with_mask,
    ),
    Regular(
        "_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine",
        "../quantized/FakeQuantPerTensorAffine.cpp: which numbers were in range is found out and forgotten.",
        outputs=lambda source, *_: [like(source)],
        temporaries=lambda source, *_: (source.numel(),),
    ),
    # Losses and softmax.
    Regular(
        "multi_margin_loss_backward multilabel_margin_loss_backward",
        "MultiMarginLoss.cu, MultiLabelMarginCriterion.cu: PyTorch has no shape inference for these.",
        outputs=_second,
    ),
    Regular("nll_loss2d_forward", "NLLLoss2d.cu: the total weight is made first.", order=(1, 0)),
    Regular("_softmax _log_softmax", "SoftMax.cu, host_softmax: works on a contiguous copy of its input.", copies=(0,)),
    Regular("_log_softmax_backward_data", "SoftMax.cu, log_softmax_backward_cuda_out", copies=(0, 1)),
    # Pooling, padding, resizing.
    Regular(
        "avg_pool2d max_pool2d_with_indices max_pool3d_with_indices",
        "AveragePool2d.cu, DilatedMaxPool2d.cu: the input in the layout that its strides suggest.",
        copies=(0,),
        layout=0,
    ),
    Regular(
        "avg_pool2d_backward",
        "AveragePool2d.cu, avg_pool2d_backward_out_cuda: input and gradient in the input's layout.",
        copies=(1, 0),
        layout=1,
    ),
    Regular(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
        "DilatedMaxPool2d.cu, max_pool2d_with_indices_backward_out_cuda",
        copies=(1, 0, -1),
        layout=1,
    ),
    Regular(
        "avg_pool3d avg_pool3d_backward adaptive_max_pool3d reflection_pad2d",
        "AveragePool3d.cu, AdaptiveMaxPooling3d.cu, ReflectionPad.cu: a contiguous input or gradient.",
        copies=(0,),
    ),
    Regular(
        "upsample_bicubic2d_backward upsample_nearest3d_backward _upsample_bilinear2d_aa_backward "
        "_upsample_bicubic2d_aa_backward",
        "UpSampleBicubic2d.cu, UpSampleNearest3d.cu, UpSampleBilinear2d.cu: a contiguous gradient.",
        copies=(0,),
    ),
    Regular(
        "_adaptive_avg_pool3d",
        "AdaptiveAveragePooling3d.cu: the input is copied before the output is made.",
        before=(0,),
    ),
    Regular(
        "fractional_max_pool3d_backward", "FractionalMaxPool3d.cu: as large as the input, contiguous.", outputs=_second
    ),
)

for _row in _TABLE:
    kernel(*_row.names())(_row.plan)


# Temporaries that depend on more than sizes.


@kernel("aten.roll.default")
def roll(call: Call) -> Plan:
    """TensorTransformations.cu: one dimension at a time, each time from a contiguous tensor into a new one."""
    source, steps = call.args[0], Steps().copies(call.args[0])
    before = 0
    for _ in range(len(call.argument(2, "dims", [])) - 1):
        after = steps.take(bytes_of(source))
        steps.free(before)
        before = after
    return steps.output(0).plan(call.output)


@kernel("aten.abs.default")
def magnitude(call: Call) -> Plan:
    """UnaryOps.cpp, unary_op_impl_with_complex_to_float_out: complex results first, then their real part."""
    source = call.args[0]
    return Steps().output(0).temporary(bytes_of(source)).plan(call.output) if source.is_complex() else call.infer()


@kernel("aten.scatter_reduce.two")
def scatter_reduce(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, scatter_reduce_two: for a mean, the number of values for each place."""
    source, size = call.args[0], bytes_of(call.args[0])
    if call.args[4] != "mean":
        return call.infer()
    return Steps().output(0).temporary(size, size, source.numel()).plan(call.output)


_CHECKED = 4  # bytes of the result of a check of the zero points


@kernel("aten.fake_quantize_per_channel_affine_cachemask.default")
def fake_quantize_channels(call: Call) -> Plan:
    """FakeQuantPerChannelAffine.cpp: the zero points are checked first."""
    steps = Steps().temporary(_CHECKED, _CHECKED).free(-1, -2).output(0, 1)
    return steps.plan(like(call.args[0]), like(call.args[0], torch.bool))


@kernel(
    "aten._fake_quantize_learnable_per_tensor_affine_backward.default",
    "aten._fake_quantize_learnable_per_channel_affine_backward.default",
)
def fake_quantize_learned_backward(call: Call) -> Plan:
    """FakeQuantPerTensorAffine.cpp: the gradients of scale and zero point for each number, then summed."""
    outputs: list[Output] = [like(tensor) for tensor in call.args[1:4]]
    size = bytes_of(call.args[1])
    return Steps().output(0).temporary(size, size).output(1, 2).plan(*outputs)
