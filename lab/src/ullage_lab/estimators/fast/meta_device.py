"""Attention and dropout on the meta device, with the tensors that CUDA's kernels keep for the backward pass.

PyTorch decomposes both on the meta device: attention would keep all its scores, dropout a mask of numbers. Inside a
`with`, these two functions keep what the fused kernels keep. Other tensors take the usual way.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

_LOCK = threading.RLock()  # what is exchanged belongs to the whole process


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, output and a number for each row of the scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The kernels give the output with heads inside, so that joining them is no copy.
        *batch, heads, length, _ = query.shape
        out = torch.empty((*batch, length, heads, value.shape[-1]), dtype=query.dtype, device="meta").transpose(-3, -2)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device="meta")
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("features need the forward pass alone")


@contextmanager
def cheap_kernels(attended: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Call `attended` with the output of every attention, and with the scores if they are computed separately."""
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout
    softmaxes: dict[Any, Any] = {
        place: place.softmax for place in (torch, torch.Tensor)
    }  # functional.softmax calls the latter

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if query.is_meta and query.dim() >= 3:
            out: torch.Tensor = _Attention.apply(query, key, value)
        else:
            with _softmaxes_as_they_were(softmaxes):
                out = attention(query, key, value, *args, **options)
        attended(out)
        return out

    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not input.is_meta or not training or p == 0:
            return dropout(input, p, training, inplace)
        out, _ = torch.native_dropout(input, p, True)  # keeps a mask of one byte a number
        return out

    inside: list[None] = []  # a function mode looks the method up again and calls it once more

    def counting(softmax: Any) -> Any:
        def soften(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            inside.append(None)
            try:
                out: torch.Tensor = softmax(tensor, *args, **options)
            finally:
                inside.pop()
            if out.dim() >= 3 and not inside:
                attended(out)
            return out

        return soften

    with _LOCK:
        try:
            functional.scaled_dot_product_attention, functional.dropout = attend, drop
            for place, softmax in softmaxes.items():
                place.softmax = counting(softmax)
            yield
        finally:
            functional.scaled_dot_product_attention, functional.dropout = attention, dropout
            _restore(softmaxes)


@contextmanager
def _softmaxes_as_they_were(softmaxes: dict[Any, Any]) -> Iterator[None]:
    patched = {place: place.softmax for place in softmaxes}
    _restore(softmaxes)
    try:
        yield
    finally:
        _restore(patched)


def _restore(softmaxes: dict[Any, Any]) -> None:
    for place, softmax in softmaxes.items():
        place.softmax = softmax


# Shortcuts for operators on the meta device: shapes that follow at once need no walk through PyTorch's Python rules.
#
# A batch norm takes 4 ms on the meta device, a matrix product 1 ms, though both compute nothing. For the time of a
# `with` the usual cases of frequent operators are answered directly; whatever is unusual (shapes that do not fit,
# broadcasting, other devices) goes PyTorch's way, and so gets its answer or its error.

_ATEN: Any = torch.ops.aten
_LIKE_FIRST = (
    "relu",
    "elu",
    "gelu",
    "silu",
    "leaky_relu",
    "mish",
    "softplus",
    "tanh",
    "sigmoid",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "neg",
    "exp",
    "sqrt",
    "rsqrt",
    "_prelu_kernel",
    "triu",
    "tril",
)
_IN_PLACE = (
    "uniform_",
    "normal_",
    "zero_",
    "fill_",
    "bernoulli_",
    "relu_",
    "silu_",
    "leaky_relu_",
    "hardtanh_",
    "elu_",
    "hardswish_",
    "clamp_",
)
_STARTS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "constant_",
    "ones_",
    "zeros_",
    "eye_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
)
_SHORTCUTS_LOCK = threading.RLock()  # what is exchanged belongs to the whole process
_RULES: dict[Any, Callable[..., Any]] = {}


@contextmanager
def shortcuts() -> Iterator[None]:
    """Compute frequent operators on meta tensors directly inside the `with`.

    The kernels of the meta device are exchanged, for the whole process: a mode would cost every operator more than the
    operator itself. PyTorch before `allow_override` keeps its own, slower ones.
    """
    with _SHORTCUTS_LOCK:
        library = torch.library.Library("aten", "IMPL", "Meta")
        try:
            with suppress(TypeError):
                for overload, kernel in _kernels().items():
                    library.impl(overload, kernel, allow_override=True)
            yield
        finally:
            library._destroy()


@lru_cache(maxsize=1)
def _kernels() -> dict[Any, Callable[..., Any]]:
    """Return a kernel for each rule that replaces one of PyTorch, which runs if the rule has no answer."""
    from torch._decomp import global_decomposition_table

    tables = [global_decomposition_table[name] for name in ("meta", "post_autograd", "pre_autograd")]
    kernels = {}
    for overload, rule in _RULES.items():
        usual = next((table[overload] for table in tables if overload in table), None)
        if usual is not None:
            kernels[overload] = _kernel(rule, usual)
    return kernels


def _kernel(rule: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        answer = None if options else rule(*args)
        return usual(*args, **options) if answer is None else answer

    return kernel


@contextmanager
def no_start() -> Iterator[None]:
    """Let the functions of `torch.nn.init` skip meta tensors, which have no values, inside the `with`."""

    def leaving(start: Any) -> Any:
        def leave(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            made: torch.Tensor = tensor if tensor.is_meta else start(tensor, *args, **options)
            return made

        return leave

    with _SHORTCUTS_LOCK:
        starts = {name: getattr(torch.nn.init, name) for name in _STARTS}
        try:
            for name, start in starts.items():
                setattr(torch.nn.init, name, leaving(start))
            yield
        finally:
            for name, start in starts.items():
                setattr(torch.nn.init, name, start)


def _rule(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(rule: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            _RULES[overload] = rule
        return rule

    return keep


def _overloads(names: tuple[str, ...]) -> list[Any]:
    packets = [getattr(_ATEN, name) for name in names]
    return [
        getattr(packet, overload)
        for packet in packets
        for overload in ("default", "Scalar")
        if overload in packet.overloads()
    ]


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same as `empty_like` for a meta tensor, whose own rule is slow."""
    if tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor)


def _contiguous(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@_rule(*_overloads(_LIKE_FIRST))
def _like_first(tensor: torch.Tensor, *others: Any) -> torch.Tensor | None:
    return like(tensor) if tensor.is_floating_point() or tensor.dtype == torch.bool else None


@_rule(*_overloads(_IN_PLACE))
def _itself(tensor: torch.Tensor, *others: Any) -> torch.Tensor:
    return tensor


@_rule(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor)
def _arithmetic(first: Any, second: Any) -> torch.Tensor | None:
    """Compute the result for tensors of equal form, or for a floating-point tensor and a number."""
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return None
    if isinstance(second, torch.Tensor):
        alike = second.is_meta and second.dtype == first.dtype and second.shape == first.shape
        if not alike or second.stride() != first.stride():
            return None
    elif not isinstance(second, int | float):
        return None
    return like(first)


@_rule(_ATEN.masked_fill.Scalar)
def _filled(tensor: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor | None:
    return like(tensor) if tensor.shape[tensor.dim() - mask.dim() :] == mask.shape else None


@_rule(_ATEN.addmm.default)
def _addmm(bias: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    fits = first.dim() == second.dim() == 2 and first.shape[1] == second.shape[0] and bias.shape == second.shape[1:]
    return _contiguous((first.shape[0], second.shape[1]), first.dtype) if fits and first.dtype == second.dtype else None


@_rule(_ATEN.native_batch_norm.default)
def _batch_norm(
    tensor: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *others: Any
) -> Any:
    given = [part for part in (weight, bias, mean, variance) if part is not None]
    if not training or tensor.dim() < 2 or any(part.shape != tensor.shape[1:2] for part in given):
        return None
    sums = _contiguous(tensor.shape[1:2], torch.float32)
    return like(tensor), sums, _contiguous(sums.shape, torch.float32)


@_rule(_ATEN.native_layer_norm.default)
def _layer_norm(tensor: torch.Tensor, shape: Any, weight: Any, bias: Any, *others: Any) -> Any:
    size = list(shape)
    given = [part for part in (weight, bias) if part is not None]
    if list(tensor.shape[-len(size) :]) != size or any(list(part.shape) != size for part in given):
        return None
    sums = _contiguous((*tensor.shape[: -len(size)], *(1 for _ in size)), torch.float32)
    out = _contiguous(tensor.shape, tensor.dtype)
    return out, sums, _contiguous(sums.shape, torch.float32)


@_rule(_ATEN._log_softmax.default, _ATEN._softmax.default)
def _softened(tensor: torch.Tensor, dim: int, wider: bool) -> torch.Tensor | None:
    usual = not wider and -tensor.dim() <= dim < tensor.dim() and tensor.is_floating_point()
    return _contiguous(tensor.shape, tensor.dtype) if usual else None


@_rule(_ATEN.native_dropout.default)
def _dropout(tensor: torch.Tensor, rate: float, training: bool | None) -> Any:
    return (like(tensor), _contiguous(tensor.shape, torch.bool)) if training else None


@_rule(_ATEN.nll_loss_forward.default)
def _nll_loss(tensor: torch.Tensor, targets: torch.Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    if tensor.dim() != 2 or targets.shape != tensor.shape[:1] or weight is not None or not reduction:
        return None
    return _contiguous((), tensor.dtype), _contiguous((), tensor.dtype)


@_rule(_ATEN.convolution.default)
def _convolution(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> torch.Tensor | None:
    """Compute the result for a batch in the usual layout."""
    fits = tensor.dim() == weight.dim() and tensor.shape[1] == weight.shape[1] * groups and not transposed
    if not fits or not tensor.is_contiguous() or not weight.is_contiguous() or weight.shape[0] % groups:
        return None
    places = zip(tensor.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False)
    sizes = [(size + 2 * edge - wide * (kernel - 1) - 1) // step + 1 for size, kernel, step, edge, wide in places]
    if len(sizes) != tensor.dim() - 2 or min(sizes) < 1:
        return None
    return _contiguous((tensor.shape[0], weight.shape[0], *sizes), tensor.dtype)
