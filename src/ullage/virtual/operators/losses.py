"""Losses. Some return a single number whose storage is that of the values before the reduction.

Those that need nothing but copies are in `regular.py`.
aten/src/ATen/native/Loss.cpp, aten/src/ATen/native/cuda/Loss.cu, MultiMarginLoss.cu, MultiLabelMarginCriterion.cu,
NLLLoss2d.cu, LossCTC.cu
"""

from typing import Any

import torch

from ullage.virtual.call.plan import Call, New, Plan, Steps, bytes_of, contiguous, kernel, new, twin
from ullage.virtual.operators.reductions import Kind, add_buffers, add_sum

_MEAN = 1  # at::Reduction: none, mean, sum


def _elementwise(*tensors: Any) -> torch.Tensor:
    """Return the result of an elementwise operator over these tensors, on "meta"."""
    result = twin(tensors[0])
    for tensor in tensors[1:]:
        result = result + twin(tensor)
    return result


def _shrunk(values: torch.Tensor) -> New:
    """Return a single number that keeps the memory of the values before the reduction."""
    return New((), (), values.dtype, bytes_of(values))


@kernel("aten.mse_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default")
def squared_or_smooth(call: Call) -> Plan:
    """Loss.cpp: the output is made as large as the input and then shrunk to one number, which keeps its memory; that of
    huber_loss is made after the values."""
    if call.argument(2, "reduction", _MEAN) == 0:
        return call.infer()
    values, is_huber = _elementwise(*call.args[:2]), call.func._schema.name == "aten::huber_loss"
    steps = Steps().temporary(bytes_of(values)).output(0)
    if not is_huber:
        steps = Steps().output(0).temporary(bytes_of(values))
    add_sum(steps, call, values, [], values.dtype)
    return steps.plan(call.output if is_huber else _shrunk(values))


@kernel("aten.binary_cross_entropy.default", "aten.soft_margin_loss.default")
def shrunk_to_a_number(call: Call) -> Plan:
    """Loss.cu, binary_cross_entropy_cuda; Loss.cpp, soft_margin_loss_out: the unreduced loss becomes the number."""
    place = 3 if call.func._schema.name.endswith("entropy") else 2
    if call.argument(place, "reduction", _MEAN) == 0:
        return call.infer()
    values = torch.empty_like(twin(call.args[0]))
    steps = Steps().output(0)
    number = steps.take(values.element_size())
    add_sum(steps, call, values, [], values.dtype)
    return steps.free(number).plan(_shrunk(values))


@kernel("aten.binary_cross_entropy_with_logits.default")
def cross_entropy_with_logits(call: Call) -> Plan:
    """Loss.cpp, binary_cross_entropy_with_logits."""
    source, target = call.args[:2]
    positive = call.argument(3, "pos_weight")
    values = _elementwise(source, target)
    size = bytes_of(values)
    steps = Steps()
    logarithm = steps.take(bytes_of(source))
    if positive is not None:
        steps.temporary(bytes_of(positive), size).free(-2, -1)
    if call.argument(4, "reduction", _MEAN) == 0:
        return steps.output(0).plan(call.output)
    loss = steps.take(size)
    steps.output(0)
    add_sum(steps, call, values, [], values.dtype)
    return steps.free(loss, logarithm).plan(call.output)


@kernel("aten.soft_margin_loss_backward.default")
def soft_margin_backward(call: Call) -> Plan:
    """Loss.cpp, soft_margin_loss_backward_out: three steps, each with a tensor of its own."""
    source, target = call.args[1:3]
    size = bytes_of(_elementwise(source, target))
    return Steps().temporary(bytes_of(target), size, size).free(-2, -3).output(0).plan(call.output)


@kernel("aten.multi_margin_loss.default")
def multi_margin(call: Call) -> Plan:
    """MultiMarginLoss.cu: one number a row, then their sum."""
    source = call.args[0]
    if call.argument(5, "reduction", _MEAN) == 0 or source.dim() < 2:
        return call.infer()
    rows = torch.empty(source.shape[0], dtype=source.dtype, device="meta")
    steps = Steps().output(0).temporary(bytes_of(rows))
    add_sum(steps, call, rows, [], source.dtype)
    return steps.plan(call.output)


@kernel("aten.multilabel_margin_loss_forward.default")
def multilabel_margin(call: Call) -> Plan:
    """MultiLabelMarginCriterion.cu: flags of the labels, one number a row, then their sum."""
    source, (loss, flags) = call.args[0], call.infer().outputs
    if source.dim() < 2 or call.argument(2, "reduction", _MEAN) == 0:
        return Steps().output(1, 0).plan(new((), source.dtype) if source.dim() < 2 else loss, flags)
    rows = torch.empty(source.shape[0], dtype=source.dtype, device="meta")
    steps = Steps().output(1).temporary(bytes_of(rows)).output(0)
    add_sum(steps, call, rows, [], source.dtype)
    return steps.plan(loss, flags)


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
    return steps.plan(new((batch,), log_probs.dtype), prefixes)


@kernel("aten._ctc_loss_backward.default")
def ctc_backward(call: Call) -> Plan:
    """LossCTC.cu, ctc_loss_backward_gpu_template: for large problems the gradient is composed of operators."""
    _, log_probs, targets, _, target_lengths, _, prefixes = call.args[:7]
    batch, longest = _ctc_sizes(log_probs, targets, target_lengths)
    steps = Steps().temporary(8 * batch, 8 * batch, 8 * batch)
    suffixes = steps.take(bytes_of(prefixes))
    out = contiguous(log_probs)
    is_large = 2 * log_probs.shape[0] + 24 * batch // 10 + 2 * log_probs.shape[2] // 10 > 450
    filtered = is_large and call.argument(8, "zero_infinity", False)
    raw = steps.take(out.nbytes) if filtered else -1
    if not filtered:
        steps.output(0)
    if is_large:
        _add_blank_sum(steps, call, batch, log_probs, longest)
    if filtered:
        steps.temporary(log_probs.element_size(), batch).output(0).free(-1, -2, raw)
    return steps.free(suffixes, 1, 0, 2).plan(out)


def _add_blank_sum(steps: Steps, call: Call, batch: int, log_probs: torch.Tensor, longest: int) -> None:
    """Add the logarithm of a sum over the blanks."""
    itemsize, rows = log_probs.element_size(), batch * log_probs.shape[0]
    blanks = torch.empty(batch, log_probs.shape[0], longest + 1, dtype=log_probs.dtype, device="meta")
    total = steps.take(bytes_of(blanks))
    largest = steps.take(rows * itemsize)
    add_buffers(steps, call, blanks, [2], Kind(itemsize, itemsize), itemsize)
    steps.temporary(rows * itemsize, rows).free(-1, -2)
    difference, result = steps.take(bytes_of(blanks)), steps.take(rows * itemsize)
    add_sum(steps, call, blanks, [2], log_probs.dtype)
    steps.free(difference, largest, result, total)


@kernel("aten._cudnn_ctc_loss.default")
def cudnn_ctc(call: Call) -> Plan:
    """cudnn/LossCTC.cpp. The workspace was found from three calls on an H200: probabilities, prefixes twice, labels."""
    log_probs, _, _, target_lengths = call.args[:4]
    steps_, batch, classes = log_probs.shape
    longest = max(target_lengths)
    sample = 4 * steps_ * classes + 8 * steps_ * (2 * longest + 1) + 12 * longest + 20
    steps = Steps().output(1).temporary(batch * sample).output(0)
    return steps.plan(new((batch,), log_probs.dtype), contiguous(log_probs))


# Softmax and its relatives (aten/src/ATen/native/cuda/SoftMax.cu).


@kernel("aten._softmax_backward_data.default")
def softmax_backward(call: Call) -> Plan:
    """softmax_backward_cuda_out: the gradient times the output is a tensor of its own, then contiguous copies."""
    grad, output = call.args[:2]
    product = twin(grad) * twin(output)
    return Steps().output(0).temporary(bytes_of(product)).copies(product, output).plan(call.output)


@kernel("aten._safe_softmax.default")
def safe_softmax(call: Call) -> Plan:
    """attention.cpp, _safe_softmax: rows that are entirely masked become zero."""
    source = call.args[0]
    rows = source.numel() // max(1, source.shape[call.args[1]])
    return Steps().output(0).temporary(source.numel(), rows, source.element_size()).plan(call.output)
