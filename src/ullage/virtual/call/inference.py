"""The outputs of an operator call: shapes, strides, types, and which memory they share.

PyTorch's shape inference tells them: it repeats the call on "meta" tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ullage.virtual.call.plan import Alias, New, Output, Plan, Same, span_of_elements

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
    """Return the plan of a call by PyTorch's shapes: outputs in order, no temporaries."""
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
