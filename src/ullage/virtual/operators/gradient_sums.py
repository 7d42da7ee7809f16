"""Sums of gradients that meet at one tensor: autograd adds the second into the first if nothing else holds the first.

PyTorch never does so while a dispatch mode is in use (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace), so
the sum arrives here as an addition out of place, called by the engine. Reference counts show whether something else
holds the first summand; those of a tensor that only the engine holds are measured once in a process.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward as run_backward

from ullage.virtual.call.native import storage_of
from ullage.virtual.call.plan import handler, is_dense
from ullage.virtual.state import GPUState

_ENGINE = run_backward.__code__
_MEASURING = (-1, -1)
_WITH_SUMS = ("Linalg", "Cholesky", "Lu")  # nodes whose formulas add matrices that have no other owner
_alone: tuple[int, int] | None = None


def called_by_engine(frames_up: int) -> bool:
    """Check whether autograd's engine, not Python, called the code at this frame."""
    return torch._C._current_graph_task_id() != -1 and sys._getframe(frames_up + 1).f_code is _ENGINE


def adds_in_place(args: tuple[Any, ...], frames_up: int) -> bool:
    """Check whether this call of `aten.add.Tensor` is the engine's and would be in place on a real GPU."""
    global _alone
    if not called_by_engine(frames_up + 1):
        return False
    first = args[0]
    held = first._use_count(), torch._C._storage_Use_Count(storage_of(first)._cdata)
    if _alone == _MEASURING:
        _alone = held
        return True
    if held != _alone or torch.is_grad_enabled() or not is_dense(first.shape, first.stride()):
        return False
    node = torch._C._current_autograd_node()
    return node is None or not node.name().startswith(_WITH_SUMS)


def measure_reference_counts(run: Callable[[Callable[[], None]], None]) -> None:
    """Measure the counts of a tensor that only the engine holds; `run` runs a function on a virtual GPU."""
    global _alone
    if _alone is not None:
        return
    _alone = _MEASURING

    def two_gradients_meet() -> None:
        leaf = torch.zeros(2, device="cuda", requires_grad=True)
        total, ones = leaf * 2 + leaf * 3, torch.ones(2, device="cuda")
        run_backward((total,), (ones,), False, False, (leaf,), False, accumulate_grad=False)

    run(two_gradients_meet)


@handler("aten.add.Tensor")
def add(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add two tensors; an addition by autograd itself may reuse its first summand."""
    if args[0].__class__ is torch.Tensor and args[0].is_cuda and not kwargs and adds_in_place(args, frames_up=3):
        gpu.memory.written(args[0])
        return args[0]
    return NotImplemented


# Gradients that PyTorch writes into zeros in place, and out of place under a dispatch mode (FunctionsManual.cpp), with
# the argument that distinguishes such a call from the same operator in another formula.
_INTO_ZEROS = {
    "aten.scatter_add.default": None,  # gather_backward
    "aten.index_add.default": None,  # index_select_backward
    "aten.scatter.src": None,  # value_selecting_reduction_backward
    "aten.masked_scatter.default": None,  # masked_select_backward
    "aten.index_fill.int_Tensor": None,  # trace_backward
    "aten.put.default": 3,  # take_backward
}


@handler(*_INTO_ZEROS)
def add_at_indices(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write in place if the engine makes the call."""
    if not args[0].is_cuda or not called_by_engine(frames_up=3):
        return NotImplemented
    accumulates = _INTO_ZEROS[str(func)]
    if accumulates is not None and not (len(args) > accumulates and args[accumulates]):
        return NotImplemented
    with gpu.mode:
        in_place = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::") + "_")
        return getattr(in_place, func._overloadname or "default")(*args, **kwargs)
