"""Losses. Some return a single number whose storage is that of the values before the reduction.

aten/src/ATen/native/Loss.cpp, aten/src/ATen/native/cuda/Loss.cu, MultiMarginLoss.cu, MultiLabelMarginCriterion.cu,
NLLLoss2d.cu, LossCTC.cu
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.plan import Call, New, Plan, Steps, copy_size, kernel, new, twin
from ullage.virtual.kernels.reductions import Kind, add_buffers, add_sum

_MEAN = 1  # at::Reduction: none, mean, sum


def _elementwise(*tensors: Any) -> torch.Tensor:
    """The result of an elementwise operator over these tensors, on "meta"."""
    result = twin(tensors[0])
    for tensor in tensors[1:]:
        result = result + twin(tensor)
    return result


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@kernel("aten.mse_loss.default", "aten.smooth_l1_loss.default")
def squared_or_smooth(call: Call) -> Plan:
    """Loss.cpp: the output is made as large as the input and then shrunk to one number, which keeps its memory."""
    plan = call.infer()
    if call.argument(2, "reduction", _MEAN) == 0:
        return plan
    values = _elementwise(*call.args[:2])
    steps = Steps().output(0).temporary(_bytes(values))
    add_sum(steps, call, values, [], values.dtype)
    return Plan([New((), (), values.dtype, _bytes(values))], steps.steps, single=True)


@kernel("aten.huber_loss.default")
def huber(call: Call) -> Plan:
    """Loss.cpp, huber_loss."""
    plan = call.infer()
    if call.argument(2, "reduction", _MEAN) == 0:
        return plan
    values = _elementwise(*call.args[:2])
    steps = Steps().temporary(_bytes(values)).output(0)
    add_sum(steps, call, values, [], values.dtype)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.binary_cross_entropy.default", "aten.soft_margin_loss.default")
def shrunk_to_a_number(call: Call) -> Plan:
    """Loss.cu, binary_cross_entropy_cuda; Loss.cpp, soft_margin_loss_out: the unreduced loss becomes the number."""
    plan = call.infer()
    place = 3 if call.func._schema.name.endswith("entropy") else 2
    if call.argument(place, "reduction", _MEAN) == 0:
        return plan
    values = torch.empty_like(twin(call.args[0]))
    steps = Steps().output(0)
    number = steps.take(values.element_size())
    add_sum(steps, call, values, [], values.dtype)
    return Plan([New((), (), values.dtype, _bytes(values))], steps.free(number).steps, single=True)


@kernel("aten.binary_cross_entropy_with_logits.default")
def cross_entropy_with_logits(call: Call) -> Plan:
    """Loss.cpp, binary_cross_entropy_with_logits."""
    plan = call.infer()
    source, target = call.args[:2]
    positive = call.argument(3, "pos_weight")
    values = _elementwise(source, target)
    size = _bytes(values)
    steps = Steps()
    logarithm = steps.take(_bytes(source))
    if positive is not None:
        steps.temporary(_bytes(positive), size).free(-2, -1)
    if call.argument(4, "reduction", _MEAN) == 0:
        return Plan(plan.outputs, steps.output(0).steps, single=True)
    loss = steps.take(size)
    steps.output(0)
    add_sum(steps, call, values, [], values.dtype)
    return Plan(plan.outputs, steps.free(loss, logarithm).steps, single=True)


@kernel("aten.soft_margin_loss_backward.default")
def soft_margin_backward(call: Call) -> Plan:
    """Loss.cpp, soft_margin_loss_backward_out: three steps, each with a tensor of its own."""
    plan = call.infer()
    source, target = call.args[1:3]
    size = _bytes(_elementwise(source, target))
    steps = Steps().temporary(_bytes(target), size, size).free(-2, -3).output(0)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.multi_margin_loss.default")
def multi_margin(call: Call) -> Plan:
    """MultiMarginLoss.cu: one number a row, then their sum."""
    plan = call.infer()
    source = call.args[0]
    if call.argument(5, "reduction", _MEAN) == 0 or source.dim() < 2:
        return plan
    rows = torch.empty(source.shape[0], dtype=source.dtype, device="meta")
    steps = Steps().output(0).temporary(_bytes(rows))
    add_sum(steps, call, rows, [], source.dtype)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.multilabel_margin_loss_forward.default")
def multilabel_margin(call: Call) -> Plan:
    """MultiLabelMarginCriterion.cu: flags of the labels, one number a row, then their sum."""
    plan = call.infer()
    source = call.args[0]
    if source.dim() < 2:
        return Plan([new((), source.dtype), plan.outputs[1]], Steps().output(1, 0).steps)
    if call.argument(2, "reduction", _MEAN) == 0:
        return Plan(plan.outputs, Steps().output(1, 0).steps)
    rows = torch.empty(source.shape[0], dtype=source.dtype, device="meta")
    steps = Steps().output(1).temporary(_bytes(rows)).output(0)
    add_sum(steps, call, rows, [], source.dtype)
    return Plan(plan.outputs, steps.steps)


@kernel("aten.multi_margin_loss_backward.default", "aten.multilabel_margin_loss_backward.default")
def margin_backward(call: Call) -> Plan:
    """MultiMarginLoss.cu, MultiLabelMarginCriterion.cu: PyTorch has no shape inference for these."""
    source = call.args[1]
    return Plan([new(tuple(source.shape), source.dtype)], single=True)


@kernel("aten.nll_loss2d_forward.default")
def nll_2d(call: Call) -> Plan:
    """NLLLoss2d.cu: the total weight is made first."""
    return Plan(call.infer().outputs, Steps().output(1, 0).steps)


# LossCTC.cu: lengths and offsets on the GPU, 64 bits each, three a sample.


def _ctc_sizes(log_probs: torch.Tensor, targets: torch.Tensor, target_lengths: Any) -> tuple[int, int]:
    batch = log_probs.shape[1]
    longest = max(target_lengths) if len(target_lengths) else targets.numel() // max(1, batch)
    return batch, longest


@kernel("aten._ctc_loss.default")
def ctc(call: Call) -> Plan:
    """LossCTC.cu, ctc_loss_gpu_template: likelihoods of every prefix of the labels, with blanks in between."""
    log_probs, targets, _, target_lengths = call.args[:4]
    batch, longest = _ctc_sizes(log_probs, targets, target_lengths)
    prefixes = new((batch, log_probs.shape[0], 2 * longest + 1), log_probs.dtype)
    steps = Steps().temporary(8 * batch, 8 * batch, 8 * batch).output(1, 0).free(1, 0, 2)
    return Plan([new((batch,), log_probs.dtype), prefixes], steps.steps)


@kernel("aten._ctc_loss_backward.default")
def ctc_backward(call: Call) -> Plan:
    """LossCTC.cu, ctc_loss_backward_gpu_template: for large problems the gradient is put together by operators."""
    _, log_probs, targets, _, target_lengths, _, prefixes = call.args[:7]
    batch, longest = _ctc_sizes(log_probs, targets, target_lengths)
    steps = Steps().temporary(8 * batch, 8 * batch, 8 * batch)
    suffixes = steps.take(_bytes(prefixes))
    out = new(tuple(log_probs.shape), log_probs.dtype)
    is_large = 2 * log_probs.shape[0] + 24 * batch // 10 + 2 * log_probs.shape[2] // 10 > 450
    filtered = is_large and call.argument(8, "zero_infinity", False)
    raw = steps.take(out.nbytes) if filtered else -1
    if not filtered:
        steps.output(0)
    if is_large:
        _add_blank_sum(steps, call, batch, log_probs, longest)
    if filtered:
        steps.temporary(log_probs.element_size(), batch).output(0).free(-1, -2, raw)
    return Plan([out], steps.free(suffixes, 1, 0, 2).steps, single=True)


def _add_blank_sum(steps: Steps, call: Call, batch: int, log_probs: torch.Tensor, longest: int) -> None:
    """The logarithm of a sum over the blanks."""
    itemsize, rows = log_probs.element_size(), batch * log_probs.shape[0]
    blanks = torch.empty(batch, log_probs.shape[0], longest + 1, dtype=log_probs.dtype, device="meta")
    total = steps.take(_bytes(blanks))
    largest = steps.take(rows * itemsize)
    add_buffers(steps, call, blanks, [2], Kind(itemsize, itemsize), itemsize)
    steps.temporary(rows * itemsize, rows).free(-1, -2)
    difference, result = steps.take(_bytes(blanks)), steps.take(rows * itemsize)
    add_sum(steps, call, blanks, [2], log_probs.dtype)
    steps.free(difference, largest, result, total)


@kernel("aten._cudnn_ctc_loss.default")
def cudnn_ctc(call: Call) -> Plan:
    """cudnn/LossCTC.cpp. The workspace was found from three calls on an H200: probabilities, prefixes twice, labels."""
    log_probs, _, _, target_lengths = call.args[:4]
    steps_, batch, classes = log_probs.shape
    longest = max(target_lengths)
    sample = 4 * steps_ * classes + 8 * steps_ * (2 * longest + 1) + 12 * longest + 20
    grad = new(tuple(log_probs.shape), log_probs.dtype)
    steps = Steps().output(1).temporary(batch * sample).output(0)
    return Plan([new((batch,), log_probs.dtype), grad], steps.steps)


# Softmax and its relatives (aten/src/ATen/native/cuda/SoftMax.cu).


@kernel("aten._softmax.default", "aten._log_softmax.default")
def softmax(call: Call) -> Plan:
    """host_softmax: works on a contiguous copy of its input."""
    plan = call.infer()
    copy = copy_size(call.args[0])
    return Plan(plan.outputs, Steps().output(0).temporary(copy).steps if copy else None, single=True)


@kernel("aten._softmax_backward_data.default")
def softmax_backward(call: Call) -> Plan:
    """softmax_backward_cuda_out: the gradient times the output is a tensor of its own, then contiguous copies."""
    plan = call.infer()
    grad, output = call.args[:2]
    product = twin(grad) * twin(output)
    steps = Steps().output(0).temporary(product.numel() * product.element_size())
    for tensor in (product, output):
        if not tensor.is_contiguous():
            steps.temporary(copy_size(tensor))
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten._log_softmax_backward_data.default")
def log_softmax_backward(call: Call) -> Plan:
    """log_softmax_backward_cuda_out: contiguous copies where needed."""
    plan = call.infer()
    copies = [copy_size(tensor) for tensor in call.args[:2]]
    return Plan(plan.outputs, Steps().output(0).temporary(*[size for size in copies if size]).steps, single=True)


@kernel("aten._safe_softmax.default")
def safe_softmax(call: Call) -> Plan:
    """attention.cpp, _safe_softmax: rows that are masked out wholly become zero."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    rows = source.numel() // max(1, source.shape[call.args[1]])
    steps = Steps().output(0).temporary(source.numel(), rows, source.element_size())
    return Plan(plan.outputs, steps.steps, single=True)
