"""Small kernels that allocate their outputs in another order, or make a copy first."""

from __future__ import annotations

import torch

from ullage.virtual.kernels.plan import Call, New, Plan, Steps, accumulate_type, copy_size, kernel, like, new


@kernel("aten.native_dropout.default")
def dropout(call: Call) -> Plan:
    """Dropout.cu: the mask, a byte an element, is taken first."""
    source = call.args[0]
    like = torch.empty_like(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"))
    mask = new(tuple(source.shape), torch.bool, like.stride())
    out = New(tuple(source.shape), like.stride(), source.dtype, mask.nbytes * source.element_size())
    return Plan([out, mask], Steps().output(1, 0).steps)


@kernel("aten.roll.default")
def roll(call: Call) -> Plan:
    """TensorTransformations.cu: one dimension at a time, each time from a contiguous tensor into a new one."""
    plan = call.infer()
    source = call.args[0]
    times = max(1, len(call.argument(2, "dims", [])))
    size = source.numel() * source.element_size()
    steps, before = Steps(), None
    if not source.is_contiguous():
        before = steps.take(size)
    for _ in range(times - 1):
        after = steps.take(size)
        if before is not None:
            steps.free(before)
        before = after
    return Plan(plan.outputs, steps.output(0).steps, single=True)


@kernel("aten.pow.Scalar")
def power_of_number(call: Call) -> Plan:
    """Pow.cpp: the base becomes a tensor on the GPU."""
    plan = call.infer()
    return Plan(plan.outputs, Steps().output(0).temporary(8).steps, single=True)


@kernel("aten.abs.default")
def magnitude(call: Call) -> Plan:
    """UnaryOps.cpp, unary_op_impl_with_complex_to_float_out: complex results first, of which the real part is kept."""
    plan, source = call.infer(), call.args[0]
    if not source.is_complex():
        return plan
    return Plan(plan.outputs, Steps().output(0).temporary(source.numel() * source.element_size()).steps, single=True)


@kernel("aten._cdist_backward.default")
def distance_backward(call: Call) -> Plan:
    """Distance.cpp, _cdist_backward; DistanceKernel.cu: the gradient of every pair before it is summed."""
    plan, left, right = call.infer(), call.args[1], call.args[2]
    out = plan.outputs[0]
    assert isinstance(out, New)
    pairs = left.numel() * right.shape[-2] * left.element_size()
    return Plan(plan.outputs, Steps().output(0).temporary(pairs).steps, single=True)


@kernel("aten.unfold_backward.default")
def unfold_backward(call: Call) -> Plan:
    """UnfoldBackward.h: an index along the unfolded dimension."""
    plan = call.infer()
    grad, _, dim, length, step = call.args
    covered = (grad.shape[dim] - 1) * step + length
    return Plan(plan.outputs, Steps().output(0).temporary(covered * 8).steps, single=True)


@kernel("aten.log_sigmoid_forward.default")
def log_sigmoid(call: Call) -> Plan:
    """Activation.cpp, log_sigmoid_forward_cuda: the buffer of the CPU kernel stays empty."""
    source = call.args[0]
    return Plan([like(source), new((0,), source.dtype)])


@kernel("aten.glu_backward.default")
def glu_backward(call: Call) -> Plan:
    """Activation.cpp, glu_backward_cuda: contiguous, whatever the input is."""
    source = call.args[1]
    return Plan([new(tuple(source.shape), source.dtype)], single=True)


@kernel("aten.rrelu_with_noise.default")
def rrelu(call: Call) -> Plan:
    """RreluWithNoise.cu: works on contiguous tensors."""
    source = call.args[0]
    steps = Steps().output(0)
    if copy_size(source):
        steps.temporary(copy_size(source))
    return Plan([new(tuple(source.shape), source.dtype)], steps.steps, single=True)


@kernel("aten._weight_norm_interface.default")
def weight_norm(call: Call) -> Plan:
    """WeightNorm.cu: norms of half-precision weights are kept in single precision."""
    direction, magnitude = call.args[:2]
    return Plan([like(direction), new(tuple(magnitude.shape), accumulate_type(magnitude.dtype))])


@kernel(
    "aten._standard_gamma.default",
    "aten._standard_gamma_grad.default",
    "aten._dirichlet_grad.default",
    "aten.binomial.default",
)
def distribution(call: Call) -> Plan:
    """Distributions.cpp, _s_gamma_cuda and others: contiguous, whatever the parameters are."""
    source = call.args[0]
    return Plan([new(tuple(source.shape), source.dtype)], single=True)


@kernel("aten._sample_dirichlet.default")
def dirichlet(call: Call) -> Plan:
    """Distributions.cpp, _s_dirichlet_cuda: samples of gamma distributions are divided by their sums."""
    source = call.args[0]
    sums = source.numel() // max(1, source.shape[-1]) * source.element_size()
    return Plan([new(tuple(source.shape), source.dtype)], Steps().output(0).temporary(sums).steps, single=True)


@kernel("aten.scatter_reduce.two")
def scatter_reduce(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, scatter_reduce_two: for a mean, how many values went to each place."""
    plan = call.infer()
    source = call.args[0]
    if call.args[4] != "mean":
        return plan
    size = source.numel() * source.element_size()
    return Plan(plan.outputs, Steps().output(0).temporary(size, size, source.numel()).steps, single=True)
