"""Outputs of simple operators are told without PyTorch's shape inference, and are the same as it tells."""

import pytest
import torch

from ullage.virtual.call.inference import SIMPLE, infer, infer_by_pytorch
from ullage.virtual.call.inference import _simple as told
from ullage.virtual.compiler.without_dynamo import no_compiler

aten = torch.ops.aten
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = ((), (1,), (4, 1, 3), (2, 3, 4, 5), (0, 3))
REDUCTIONS = ("aten.linalg_vector_norm.default", "aten.mean.dim", "aten.sum.dim_IntList")


@pytest.fixture(autouse=True, scope="module")
def without_compiler():
    load_again = no_compiler()  # as in an estimate
    yield
    load_again()


def operator(name):
    _, base, overload = name.split(".")
    return getattr(getattr(aten, base), overload)


def arguments(func, tensor):
    """Tensors that are alike for all that the operator takes, and numbers for all that it needs besides."""
    found = []
    for argument in func._schema.arguments:
        if argument.kwarg_only:
            break
        kind = str(argument.type)
        found.append(tensor.clone() if kind == "Tensor" else 2 if "number" in kind or kind == "float" else None)
    return tuple(found)


def check_elementwise(name, sizes, types):
    func = operator(name)
    for dtype in types:
        for size in sizes:
            args = arguments(func, torch.ones(size, dtype=dtype))
            assert told(name, args, {}) == infer_by_pytorch(func, args, {}), (name, dtype, size)


def test_common_elementwise_operators_match_pytorch():
    for name in ("aten.mul.Tensor", "aten.relu_.default", "aten.clamp_.default", "aten.gelu_backward.default"):
        check_elementwise(name, ((4, 1, 3),), (torch.bfloat16,))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SIMPLE - {*REDUCTIONS}))
def test_elementwise_operators_match_pytorch(name):
    check_elementwise(name, SIZES, TYPES)


@pytest.mark.parametrize("name", [*REDUCTIONS[:2], pytest.param(REDUCTIONS[2], marks=pytest.mark.slow)])
def test_reductions_have_pytorchs_messages(name):
    func, before = operator(name), (2.0,) if "norm" in name else ()
    for dtype in TYPES[:2]:
        for size in ((1,), (4, 1, 3)):
            for rest in ((None,), ([-1],), ([0], True), (list(range(len(size))), True), ([0],)):
                args = (torch.ones(size, dtype=dtype), *before, *rest)
                assert told(name, args, {}) == infer_by_pytorch(func, args, {}), (dtype, size, rest)


def test_calls_on_unlike_tensors_use_pytorchs_inference():
    rows, columns = torch.ones(4, 3), torch.ones(3, 4).t()
    for args in (
        (rows, columns),
        (columns, columns),
        (rows, torch.ones(3)),
        (rows, rows.double()),
        (rows, rows > 0),
        (rows.expand(2, 4, 3), torch.ones(2, 4, 3)),
        (torch.ones(4, dtype=torch.int64), torch.ones(4)),
    ):
        assert told("aten.mul.Tensor", args, {}) is None
    assert told("aten.mean.dim", (rows, [0]), {"dtype": torch.float64}) is None
    assert told("aten.add.Tensor", (rows, rows), {"alpha": 2}) == told("aten.add.Tensor", (rows, rows), {})


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add_.Tensor, (torch.ones(3), torch.ones(4, 3))),
        (aten.add_.Tensor, (torch.ones(3, dtype=torch.int64), torch.ones(3))),
        (aten.mean.dim, (torch.ones(3, 4), [0, 0])),
        (aten.mean.dim, (torch.ones(3, 4), [2])),
        (aten.clamp.default, (torch.ones(3), None, None)),
    ],
)
def test_refusals_of_pytorch_are_kept(func, args):
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as expected:
        infer_by_pytorch(func, args, {})
    with pytest.raises(expected.type):
        infer(func, args, {})
