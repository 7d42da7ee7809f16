"""What an operator returns: sizes, strides, types and aliases, asked of PyTorch's own shape inference.

The call is repeated on "meta" tensors, which have shapes and no data, and the outputs are laid beside the inputs:
one that shares an input's storage is a view of it, one that is an input is that input.
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.plan import Alias, New, Output, Plan, Same, span_of_elements

_META = torch.device("meta")


class ArgumentPlaces:
    """Meta twins of a call's tensors, and the place of each among the arguments."""

    def __init__(self) -> None:
        self.by_tensor: dict[int, Any] = {}
        self.by_storage: dict[int, Any] = {}
        self.twins: list[torch.Tensor] = []

    def twin(self, value: Any, place: Any) -> Any:
        """The same value with tensors and devices replaced by meta ones."""
        if isinstance(value, torch.Tensor):
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
            self.twins.append(twin)
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

    def output(self, value: Any) -> Output:
        """How an output came to be."""
        if not isinstance(value, torch.Tensor):
            return None
        place = self.by_tensor.get(id(value))
        if place is not None:
            return Same(place)
        size, stride = tuple(value.shape), value.stride()
        place = self.by_storage.get(value.untyped_storage()._cdata)
        if place is not None:
            return Alias(place, size, stride, int(value.storage_offset()))
        return New(size, stride, value.dtype, span_of_elements(size, stride) * value.dtype.itemsize)


def infer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan of a call as far as shapes tell it: its outputs in order, no temporaries.

    >>> x = torch.empty(2, 3)
    >>> infer(torch.ops.aten.t.default, (x,), {}).outputs[0].size
    (3, 2)
    """
    places = ArgumentPlaces()
    meta_args = [places.twin(value, index) for index, value in enumerate(args)]
    meta_kwargs = {name: places.twin(value, name) for name, value in kwargs.items()}
    result = func(*meta_args, **meta_kwargs)
    if isinstance(result, list | tuple):
        return Plan([places.output(value) for value in result], as_list=isinstance(result, list))
    return Plan([places.output(result)], single=True)


def argument_at(place: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at a place that `infer` gave."""
    if isinstance(place, tuple):
        return argument_at(place[0], args, kwargs)[place[1]]
    return kwargs[place] if isinstance(place, str) else args[place]
