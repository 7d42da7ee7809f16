"""PyTorch's own lists of operators and modules with their samples, run the same way on a CPU, a GPU and a virtual GPU.

The lists are `op_db` and `module_db` of `torch.testing._internal`. `benchmarks/accuracy/operators.py` measures them
on a GPU, and tests run them on the virtual one, so this file needs PyTorch only.
"""

import functools
import itertools
import random
import sys
import types
import unittest
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

TYPES = (torch.float32, torch.bfloat16, torch.complex64)
OTHER_TYPES = (torch.int64, torch.bool, torch.float16, torch.float8_e4m3fn)  # for operators without any of these
OPERATORS, MODULES = "operators", "modules"
# Some results have no gradient, in general or where their values do not determine it.
NO_GRADIENT = (NotImplementedError, RuntimeError)
NO_GRADIENT_WORDS = ("is not implemented", "specified up to", "not differentiable")
NOT_ON_A_GPU = "is not supported on CUDA"  # what a GPU says of some samples
ARGUMENTS_ON_CPU = ("tensor_split",)  # indices that PyTorch wants there
LEFT_OUT = {
    "sparse.mm.reduce": "sparse tensors",
    "sparse.sampled_addmm": "sparse tensors",
    "to_sparse": "sparse tensors",
}
# Where the CPU's kernels give other types or layouts than those of a GPU. An H200 gives what is given here
# (`benchmarks/accuracy/operators.py`), except where data decides.
_MEANS = "a GPU keeps means and variances of half precision in single"
_DRIVER = "the CPU takes another of LAPACK's drivers, which gives the rank and no residuals"
_KERNELS = "the CPU takes another kernel, with another layout"
_META = "PyTorch's own meta function gives another layout for a GPU"
DIFFERENT = {
    "native_layer_norm": _MEANS,
    "native_batch_norm": _MEANS,
    "_native_batch_norm_legit": _MEANS,
    "_batch_norm_with_update": _MEANS,
    "nonzero": "data decides: every element may be counted",
    "argwhere": "data decides: every element may be counted",
    "nonzero_static": _META,
    "nn.functional.max_unpool2d.grad": _KERNELS,
    "nn.functional.max_unpool2d": _KERNELS,
    "nn.functional.scaled_dot_product_attention": _KERNELS,
    "ormqr": _KERNELS,
    "pca_lowrank": _KERNELS,
    "svd": _META,
    "svd_lowrank": _KERNELS,
    "linalg.eig": _KERNELS,
    "linalg.svd": _META,
    "fft.irfft2": _KERNELS,
    "fft.irfftn": _KERNELS,
    "linalg.lstsq": _DRIVER,
    "linalg.lstsq.grad_oriented": _DRIVER,
}
LOOKED_AT = 60  # samples of an entry from which some are chosen


class Entry(NamedTuple):
    """An operator or a module of the lists, in one type."""

    kind: str  # OPERATORS or MODULES
    name: str
    dtype: str

    @property
    def type(self):
        return getattr(torch, self.dtype)


class Outcome(NamedTuple):
    """What a run gave: sizes, strides and types of its outputs and gradients, and the allocator's events."""

    outputs: list
    gradients: list
    forward: list
    backward: list


@functools.cache
def lists():
    """`op_db` and `module_db` by name."""
    if "expecttest" not in sys.modules:  # PyTorch's test modules import it, and what is used here does not need it
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    operators = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {OPERATORS: operators, MODULES: {module.name: module for module in module_db}}


def entries():
    """Every operator and module in each of the types that it has on a GPU."""
    found = []
    for name, op in lists()[OPERATORS].items():
        supported = op.supported_dtypes("cuda")
        kinds = [kind for kind in TYPES if kind in supported]
        kinds = kinds or [kind for kind in OTHER_TYPES if kind in supported][:1]
        found += [Entry(OPERATORS, name, str(kind).removeprefix("torch.")) for kind in kinds]
    for name, module in lists()[MODULES].items():
        kinds = [kind for kind in TYPES if kind in module.dtypes or kind is torch.bfloat16]
        found += [Entry(MODULES, name, str(kind).removeprefix("torch.")) for kind in kinds]
    return found


def samples(entry, most=None):
    """The samples of an entry, each with its place; `most` of them are spread over the first of the list."""
    torch.manual_seed(0)
    random.seed(0)
    if entry.kind == OPERATORS:
        op = lists()[OPERATORS][entry.name]
        differentiable = op.supports_autograd and (entry.type.is_floating_point or entry.type.is_complex)
        made = op.sample_inputs("cpu", entry.type, requires_grad=differentiable)
    else:
        module = lists()[MODULES][entry.name]
        made = module.module_inputs_func(
            module, device="cpu", dtype=entry.type, requires_grad=entry.type.is_floating_point, training=True
        )
    if most is None:
        return list(enumerate(made))
    looked_at = list(enumerate(itertools.islice(made, LOOKED_AT)))
    step = max(1, len(looked_at) // most)
    return looked_at[::step][:most]


@contextmanager
def nothing():
    """Records nothing: for the CPU."""
    yield []


def run(entry, sample, device, recorded=nothing):
    """The outcome of one sample on a device, forward and backward; `recorded` is a `with` that gives events."""
    torch.manual_seed(0)
    if entry.kind == OPERATORS:
        op = lists()[OPERATORS][entry.name]
        moved = Moved(device)
        first, kwargs = moved(sample.input), moved(sample.kwargs)
        args = sample.args if entry.name in ARGUMENTS_ON_CPU else moved(sample.args)
        return outcome(lambda: op(first, *args, **kwargs), moved, sample.output_process_fn_grad, recorded)
    given, moved = sample.constructor_input, Moved(device)
    args, kwargs = given.args, dict(given.kwargs)
    module = lists()[MODULES][entry.name].module_cls(*args, **kwargs).to(device, entry.type).train()
    args, kwargs = moved(sample.forward_input.args), moved(sample.forward_input.kwargs)
    moved.module = module  # which may have no parameters before its forward pass
    return outcome(lambda: module(*args, **kwargs), moved, lambda result: result, recorded)


def outcome(call, moved, chosen, recorded):
    """Run a call, and a backward pass from what is chosen of its results to the leaves."""
    with recorded() as forward:
        result = call()
    leaves = moved.leaves + [weight for weight in moved.module.parameters() if weight.requires_grad]
    ends = [end for end in tensors(chosen(result)) if end.requires_grad]
    backward, gradients = [], []
    if ends and leaves:
        seeds = [torch.ones_like(end) for end in ends]
        try:
            with recorded() as backward:
                gradients = torch.autograd.grad(ends, leaves, seeds, allow_unused=True)
        except NO_GRADIENT as error:
            if not any(words in str(error) for words in NO_GRADIENT_WORDS):
                raise
            backward = []
    return Outcome(
        [layout(tensor) for tensor in tensors(result)],
        [None if gradient is None else layout(gradient) for gradient in gradients],
        forward,
        backward,
    )


def layout(tensor):
    """Size, strides and type; the stride of a dimension of one element says nothing."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        return [list(tensor.shape) if not tensor.is_nested else tensor.dim(), str(tensor.layout), kind]
    steps = [
        0 if length < 2 or not tensor.numel() else step
        for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return [list(tensor.shape), steps, kind]


def tensors(value):
    """The tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return [value.data]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


class Moved:
    """Copies of tensors on a device, the same for the same tensor; `leaves` are those that need gradients."""

    def __init__(self, device):
        self.device, self.copies, self.leaves = torch.device(device), {}, []
        self.module = torch.nn.Identity()

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return self.device
        if isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self(item) for item in value)
        if isinstance(value, slice | range | torch.Size | str) or not isinstance(value, list | tuple):
            return value
        return type(value)(*map(self, value))

    def leaf(self, value, what):
        """A tensor of a drawn call: numbers with a fraction need gradients; a conjugate view is made of its copy."""
        if value.is_floating_point() or value.is_complex():
            value.requires_grad_()
        copy = self(value)
        return copy.conj() if what == "conjugated" else copy

    def _tensor(self, value):
        if id(value) not in self.copies:
            copy = value.detach().to(self.device, copy=True)
            if value.requires_grad:
                self.leaves.append(copy.requires_grad_())
            self.copies[id(value)] = (copy, value)
        return self.copies[id(value)][0]
