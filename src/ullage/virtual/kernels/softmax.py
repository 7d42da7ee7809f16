"""Softmax and its relatives (aten/src/ATen/native/cuda/SoftMax.cu)."""

from __future__ import annotations

from ullage.virtual.kernels.layouts import copy_size, twin
from ullage.virtual.kernels.plan import New, Plan, Steps
from ullage.virtual.kernels.registry import Call, kernel


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
