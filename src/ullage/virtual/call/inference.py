"""The outputs of an operator call: shapes, strides, types, and which memory they share.

PyTorch's shape inference repeats the call on "meta" tensors, which takes a millisecond for some operators. So the most
common operators on tensors of one layout are answered here; a test compares them with PyTorch.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ullage.virtual.call.plan import Alias, New, Output, Plan, Same, contiguous_strides, new, span_of_elements

_META = torch.device("meta")


class ArgumentPlaces:
    """Meta twins of a call's tensors, and the place of each among the arguments."""

    def __init__(self) -> None:
        self.by_tensor: dict[int, Any] = {}
        self.by_storage: dict[int, Any] = {}
        self.twins: list[tuple[torch.Tensor, torch.Size, Any]] = []

    def twin(self, value: Any, place: Any) -> Any:
        if isinstance(value, torch.Tensor):
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
            self.twins.append((twin, value.shape, place))
            self.by_tensor[id(twin)] = place
            self.by_storage[twin.untyped_storage()._cdata] = place
            return twin
        if isinstance(value, torch.device):
            return _META
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, list | tuple):
            return type(value)(self.twin(item, (place, index)) for index, item in enumerate(value))
        return value

    def resized(self) -> tuple[tuple[Any, Sequence[int]], ...]:
        """Return the arguments that the call has resized, such as `out` tensors."""
        return tuple((place, tuple(twin.shape)) for twin, before, place in self.twins if twin.shape != before)

    def output(self, value: Any) -> Output:
        """Describe an output: new, a view, or an argument itself."""
        if not isinstance(value, torch.Tensor):
            return None
        place = self.by_tensor.get(id(value))
        if place is not None:
            return Same(place)
        size, stride = tuple(value.shape), value.stride()
        place = self.by_storage.get(value.untyped_storage()._cdata)
        if place is not None:
            offset, turned = int(value.storage_offset()), (value.is_conj(), value.is_neg())
            return Alias(place, size, stride, offset, value.dtype, *turned)
        return New(size, stride, value.dtype, span_of_elements(size, stride) * value.dtype.itemsize)


def infer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Return the plan of a call by its shapes: outputs in order, no temporaries."""
    return _simple(str(func), args, kwargs) or infer_by_pytorch(func, args, kwargs)


def infer_by_pytorch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Return the same plan, always by PyTorch."""
    places = ArgumentPlaces()
    meta_args = [places.twin(value, index) for index, value in enumerate(args)]
    meta_kwargs = {name: places.twin(value, name) for name, value in kwargs.items()}
    result = func(*meta_args, **meta_kwargs)
    single = not isinstance(result, list | tuple)
    results = [result] if single else result
    return Plan(
        [places.output(value) for value in results],
        single=single,
        as_list=isinstance(result, list),
        defaults={place: value for place, value in enumerate(results) if isinstance(value, int | float)} or None,
        resized=places.resized(),
    )


# Elementwise operators: from contiguous tensors of one size and type, they make another such tensor.
_WITH_NUMBER = ("add", "mul", "div", "lerp")
_WITH_TENSOR = ("add", "sub", "mul", "div")
_OF_ONE_OVERLOAD = (
    "addcmul",
    "addcdiv",
    "clamp",
    "clamp_min",
    "neg",
    "exp",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "relu",
    "silu",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
)
_GRADIENTS = ("tanh", "sigmoid", "threshold", "gelu", "silu", "hardswish", "hardsigmoid")


def _named(ending: str) -> set[str]:
    """Return the operators that also have an in-place form, with this ending of their names."""
    overloads = {"Tensor": _WITH_TENSOR, "Scalar": _WITH_NUMBER, "default": _OF_ONE_OVERLOAD}
    return {f"aten.{name}{ending}.{overload}" for overload, names in overloads.items() for name in names}


_ELEMENTWISE = {
    *_named(""),
    *(f"aten.{name}_backward.default" for name in _GRADIENTS),
    "aten.pow.Tensor_Scalar",
    "aten.log.default",
    "aten.gelu.default",
}
_IN_PLACE = {*_named("_"), "aten.pow_.Scalar"}
# Operators that reduce dimensions to one element each, with the place of the dimensions among the arguments.
_REDUCTIONS = {"aten.linalg_vector_norm.default": 2, "aten.mean.dim": 1, "aten.sum.dim_IntList": 1}
SIMPLE = _ELEMENTWISE | _IN_PLACE | _REDUCTIONS.keys()
_SIMPLE_TYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_APPROXIMATIONS = ("none", "tanh")  # of gelu


def _simple(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
    """Return the plan of a simple operator on tensors of one layout; `None` for other calls."""
    if name not in SIMPLE or not isinstance(args[0], torch.Tensor):
        return None
    first: torch.Tensor = args[0]
    size, stride, dtype = tuple(first.shape), first.stride(), first.dtype
    if dtype not in _SIMPLE_TYPES or stride != contiguous_strides(size):
        return None
    if name in _REDUCTIONS:
        place = _REDUCTIONS[name]
        reduced = None if kwargs else _reduced(size, args[1:place], args[place : place + 2])
        return None if reduced is None else Plan([new(reduced, dtype)], single=True)
    numbers = []
    for value in (*args[1:], *kwargs.values()):
        if not isinstance(value, torch.Tensor):
            numbers.append(value)
        elif value.dtype is not dtype or value.shape != size or value.stride() != stride:
            return None
    given = [value for value in numbers if value is not None and value not in _APPROXIMATIONS]
    if not all(type(value) in (int, float) for value in given) or (None in numbers and not given):
        return None  # PyTorch raises its own error
    return Plan([Same(0) if name in _IN_PLACE else new(size, dtype)], single=True)


def _reduced(size: Sequence[int], orders: Sequence[Any], rest: Sequence[Any]) -> Sequence[int] | None:
    """Return the size after a reduction with arguments (dimensions, keep dimensions); `None` if it is not plain."""
    dims = rest[0] if rest else None
    keep = len(rest) > 1 and rest[1]
    if 0 in (len(size), *size) or not all(type(order) in (int, float) for order in orders):
        return None
    if dims is None:
        dims = range(len(size))
    elif not dims or not all(type(dim) is int and -len(size) <= dim < len(size) for dim in dims):
        return None
    places = {dim % len(size) for dim in dims}
    if len(places) != len(dims):
        return None
    if keep:
        return [1 if place in places else length for place, length in enumerate(size)]
    return [length for place, length in enumerate(size) if place not in places]
