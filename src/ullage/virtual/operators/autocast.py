"""The order in which autocast casts the arguments of an operator.

PyTorch writes the casts as arguments of one C++ call, whose order is the compiler's: builds for x86-64 cast the last
argument first, those for 64-bit ARM the first. The order decides the places of the casts in memory and the order of
their gradients. So on ARM autocast's operators are replaced by ones that cast the last argument first.

The casts of weights are dropped when a thread leaves its outermost autocast (autocast_mode.cpp). A GPU's backward pass
has its own thread. So a checkpointed layer that is recomputed in it drops them at its end, even if the whole pass is
inside autocast.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ullage.virtual.call.native import GPUMode, in_backward
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

# aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP: those that take several tensors.
_OPERATORS = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "_convolution",
    "prelu",
    "scaled_dot_product_attention",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


# Casts of leaves, until the `with` of autocast ends; Python cannot reach PyTorch's own cache. PyTorch has one for each
# thread; one for the process suffices, since only one thread at a time has a virtual GPU.
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def install(gpu: GPUState, replacements: Replacements) -> None:
    _give_backward_passes_their_depth(gpu, replacements)
    if not first_argument_is_cast_first():
        return
    library: Any = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about replaced kernels, which is the purpose here
        for name in _OPERATORS:
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            torch.library._impls.discard(f"aten/{name}/AutocastCUDA")  # of a virtual GPU around this one
            library.impl(name, _replacement(operator), "AutocastCUDA")
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _casts.clear()
        clear()

    replacements.on_undo(library._destroy)
    replacements.on_undo(_casts.clear)
    replacements.put(torch, "clear_autocast_cache", clear_both)


def _give_backward_passes_their_depth(gpu: GPUState, replacements: Replacements) -> None:
    """Count how many times autocast was entered in a backward pass; note that it was entered for the GPU at all."""
    autocast: Any = torch.amp.autocast_mode.autocast
    enter, leave = autocast.__enter__, autocast.__exit__
    depth = 0

    def __enter__(self: Any) -> Any:
        nonlocal depth
        depth += in_backward()
        gpu.uncertainty.autocast_used |= self.device == "cuda" and self._enabled
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        nonlocal depth
        left = leave(self, *error)
        if in_backward():
            depth -= 1
            if depth == 0:
                torch.clear_autocast_cache()
        return left

    replacements.put_all(autocast, {"__enter__": __enter__, "__exit__": __exit__})


def _replacement(operator: Any) -> Callable[..., Any]:
    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            kind = torch.get_autocast_dtype("cuda")
            named = {name: _cast(value, kind) for name, value in reversed(kwargs.items())}
            placed = [_cast(value, kind) for value in reversed(args)]
            return operator(*reversed(placed), **named)

    return cast_and_call


def _cast(value: Any, kind: torch.dtype) -> Any:
    """autocast_mode.cpp, cached_cast"""
    if not isinstance(value, torch.Tensor) or not value.is_cuda or not value.is_floating_point():
        return value
    if value.dtype is kind or value.dtype is torch.float64:
        return value
    leaf = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not leaf or not torch.is_autocast_cache_enabled():
        return value.to(kind)
    if id(value) not in _casts:
        _casts[id(value)] = value, value.to(kind)
    return _casts[id(value)][1]


class _Watch(GPUMode):
    def __init__(self) -> None:
        super().__init__()
        self.first_size: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and self.first_size is None:
            self.first_size = args[0].numel()
        return func(*args, **(kwargs or {}))


@functools.cache
def first_argument_is_cast_first() -> bool:
    """Check this build of PyTorch with a small matrix product on the CPU under CPU autocast."""
    watch = _Watch()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), watch:
        torch.mm(torch.zeros(1, 2), torch.zeros(2, 2))
    return watch.first_size == 2
