"""Operator calls as plain values, and the tensors that a real GPU needs for them.

`ullage.virtual.watching.step_calls` records calls. Numbers are random, because the power of a GPU depends on them.
Indices are within bounds.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ullage.virtual.call.plan import span_of_elements

_IDENTITY = ("operator", "args", "kwargs", "same")
_POSITIVE = ("var", "std")  # in the names of arguments without negative numbers


def identity(call: dict[str, Any]) -> str:
    """Return a short id of a call, which depends only on its content.

    >>> identity({"operator": "aten.exp.default", "args": [], "kwargs": {}, "pass": "forward"})
    'ecebb7f09739'
    """
    rounding = [call["tf32"]] if "tf32" in call else []
    text = json.dumps([*(call.get(name) for name in _IDENTITY), *rounding], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def packed(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with each distinct tensor once, for files: optimizers take hundreds of tensors, mostly alike."""
    table: dict[str, int] = {}

    def pack(value: Any) -> Any:
        if is_tensor(value):
            return {"t": table.setdefault(json.dumps(value, sort_keys=True), len(table))}
        if isinstance(value, list):
            return [pack(item) for item in value]
        if isinstance(value, dict):
            return {key: pack(item) for key, item in value.items()}
        return value

    parts = {name: pack(value) for name, value in call.items()}
    return {**parts, "tensors": [json.loads(text) for text in table]}


def unpacked(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call that was given to `packed`."""
    table = call["tensors"]

    def unpack(value: Any) -> Any:
        if isinstance(value, dict):
            return table[value["t"]] if "t" in value else {key: unpack(item) for key, item in value.items()}
        return [unpack(item) for item in value] if isinstance(value, list) else value

    return {name: unpack(value) for name, value in call.items() if name != "tensors"}


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value


def tensors_of(value: Any) -> Iterator[dict[str, Any]]:
    if is_tensor(value):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def bytes_of(value: Any) -> int:
    """Return the bytes that the tensors of a value span.

    >>> bytes_of([{"shape": [2, 3], "dtype": "float16"}, 1])
    12
    """
    return sum(_length(tensor) * getattr(torch, tensor["dtype"]).itemsize for tensor in tensors_of(value))


def _length(tensor: dict[str, Any]) -> int:
    size = tensor["shape"]
    return span_of_elements(size, tensor["stride"]) if "stride" in tensor else math.prod(size)


def operator_of(call: dict[str, Any]) -> Any:
    """Return the operator; raise `AttributeError` if this PyTorch has none of that name."""
    space, name, overload = call["operator"].split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def prepared(call: dict[str, Any], device: str = "cuda") -> tuple[Any, list[Any], dict[str, Any]]:
    """Return an operator with arguments like those of the call: tensors of the same shapes, strides and types."""
    operator = operator_of(call)
    names = [argument.name for argument in operator._schema.arguments]
    args = [_made(value, name, _bound(call, name), device) for value, name in zip(call["args"], names, strict=False)]
    kwargs = {name: _made(value, name, _bound(call, name), device) for name, value in call["kwargs"].items()}
    if "same" in call:
        first, second = call["same"]
        args[second] = args[first]
    special = _SPECIAL.get(operator._schema.name)
    if special is not None:
        special(args)
    return operator, args, kwargs


def _made(value: Any, name: str, bound: Any, device: str) -> Any:
    if is_tensor(value):
        return _tensor(value, name, bound if isinstance(bound, int) else 2, device)
    if isinstance(value, list):
        bounds = bound if isinstance(bound, list) else [bound] * len(value)
        return [_made(item, name, limit, device) for item, limit in zip(value, bounds, strict=False)]
    if isinstance(value, dict):
        kind, word = next(iter(value.items()))
        if kind == "device":
            return torch.device(device if str(word).startswith("cuda") else word)
        return complex(*word) if kind == "complex" else getattr(torch, word)
    return value


def _tensor(value: dict[str, Any], name: str, bound: int, device: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, value["dtype"])
    home = "cpu" if value.get("cpu") else device
    count = _length(value)
    if dtype is torch.bool:
        flat = torch.rand(count, device=home) > 0.1
    elif dtype.is_complex:
        flat = torch.randn(count, dtype=dtype, device=home)
    elif dtype.is_floating_point:
        drawn = torch.float32 if dtype.itemsize < 2 else dtype
        flat = torch.randn(count, dtype=drawn, device=home).mul_(0.5).to(dtype)
        if any(word in name for word in _POSITIVE):
            flat = flat.abs_().add_(0.1)
    elif dtype in (torch.uint16, torch.uint32, torch.uint64):
        flat = torch.zeros(count, dtype=dtype, device=home)
    else:
        flat = torch.randint(0, max(1, bound), (count,), dtype=dtype, device=home)
    if "stride" in value:
        return flat.as_strided(value["shape"], value["stride"])
    return flat.view(value["shape"])


def _bound(call: dict[str, Any], name: str) -> Any:
    """Return the exclusive upper limit of the integers of an argument; for a list of tensors, one per tensor."""
    if name not in ("index", "indices", "target", "offsets"):
        return None
    operator, args = call["operator"].split(".")[1], call["args"]
    if operator.startswith("embedding_dense_backward"):
        return args[2]
    if operator.startswith("nll_loss"):
        scores = args[1 if "backward" in operator else 0]["shape"]
        return scores[1] if len(scores) > 1 else scores[0]
    shape = args[0]["shape"] if args and is_tensor(args[0]) else []
    if name == "indices":
        names = [argument.name for argument in operator_of(call)._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **call["kwargs"]}
        if isinstance(given.get(name), list):
            return list(shape)
    if operator.startswith(("gather", "scatter", "index_")) and len(args) > 1 and isinstance(args[1], int) and shape:
        return shape[args[1]]
    return shape[0] if operator.startswith("embedding") and shape else None


def _where_largest(args: list[Any]) -> None:
    """Set the indices of the largest numbers to those that the forward call returns."""
    pool = torch.ops.aten.max_pool3d_with_indices if len(args[2]) == 3 else torch.ops.aten.max_pool2d_with_indices
    args[7] = pool(args[1], *args[2:7])[1]


_SPECIAL: dict[str, Callable[[list[Any]], None]] = {
    "aten::max_pool2d_with_indices_backward": _where_largest,
    "aten::max_pool3d_with_indices_backward": _where_largest,
}
