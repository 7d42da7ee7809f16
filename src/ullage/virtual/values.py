"""Values of tensors on the virtual GPU: known for small tensors that came from the CPU, made up for all others.

A training loop reads few values: a loss to print, a flag to check, lengths to loop over. Small tensors that were copied
from the CPU keep their values until something writes to them. For any other the answer is made up (1 for numbers, 0 for
flags such as "found an infinity"), and the notes say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ullage.virtual.host import Host
from ullage.virtual.memory import DeviceMemory

LARGEST_KNOWN = 65536  # elements; labels, lengths, masks and positions are smaller


@functools.cache
def has_no_fixed_result(func: Any) -> bool:
    """Whether an operator's result is random or undefined."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name


class _Unknown(Exception):
    """Raised for a value that is not known."""


class KnownValues:
    """The known values of tensors on one virtual GPU."""

    def __init__(self, memory: DeviceMemory, host: Host, note: Callable[[str, str], None]) -> None:
        self._memory, self._host, self._note = memory, host, note

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Take over the values of a small tensor that was copied to the GPU."""
        if source.is_cuda:
            known = self.known(source)
            if known is not None:
                self.set(target, known.to(target.dtype))
        elif source.numel() <= LARGEST_KNOWN and (not source.is_floating_point() or source.numel() <= 1):
            self._host.fill(source)
            self.set(target, source.detach().to(target.dtype, copy=True))

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values as a CPU tensor, or `None`."""
        value = getattr(tensor, "ullage_value", None)
        if value is None or value[1] != self._memory.writes(tensor):
            return None
        known: torch.Tensor = value[0]
        return known

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give a tensor known values; they hold until something writes to its memory."""
        tensor.ullage_value = value, self._memory.writes(tensor)  # type: ignore[attr-defined]

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Repeat a call on known values, if all of its tensors are known and the result is small."""
        if not isinstance(result, torch.Tensor) or result.numel() > LARGEST_KNOWN or has_no_fixed_result(func):
            return
        try:
            value = func(*self._known_arguments(args), **self._known_arguments(kwargs))
        except (_Unknown, RuntimeError, IndexError):
            return
        if isinstance(value, torch.Tensor) and value.shape == result.shape:
            self.set(result, value)

    def follow_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator has written to lists of tensors: known values (an optimizer's count of its steps) are changed
        with them if all are known, and forgotten otherwise."""
        lists = [
            args[place]
            for place, argument in enumerate(func._schema.arguments[: len(args)])
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = [tensor for tensors in lists for tensor in tensors if hasattr(tensor, "ullage_value")]
        if not written:
            return
        try:
            known = self._known_arguments(args)
            known = type(known)([v.clone() for v in value] if isinstance(value, list) else value for value in known)
            func(*known, **self._known_arguments(kwargs))
        except (_Unknown, RuntimeError, AttributeError):
            known = None
        for tensor in written:
            self._memory.written(tensor)
        if known is not None and len(lists) == 1:
            for tensor, value in zip(lists[0], known[0], strict=True):
                self.set(tensor, value)

    def _known_arguments(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.known(value) if value.is_cuda else value
            if known is None:
                raise _Unknown
            return known
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(self._known_arguments(item) for item in value)
        if isinstance(value, dict):
            return {name: self._known_arguments(item) for name, item in value.items()}
        return value

    def scalar(self, tensor: torch.Tensor) -> Any:
        """The answer to `.item()`."""
        known = self.known(tensor)
        if known is not None:
            return known.item()
        self._note("readings" if tensor.is_floating_point() else "values", _asked(tensor, "one value"))
        if tensor.dtype is torch.bool:
            return False
        if tensor.is_complex():
            return complex(1.0)
        return 1.0 if tensor.is_floating_point() else 1

    def on_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The answer to `.cpu()`: known values, else ones (filled only if somebody looks)."""
        known = self.known(tensor)
        if known is not None:
            return known.to(dtype)
        if tensor.numel() <= LARGEST_KNOWN:
            self._note("readings" if tensor.is_floating_point() else "values", _asked(tensor, "values"))
        call = self._host.call
        fill = torch.ops.aten.zeros.default if dtype is torch.bool else torch.ops.aten.ones.default
        out: torch.Tensor = call(fill, (list(tensor.shape),), {"dtype": dtype})
        return out


def _asked(tensor: torch.Tensor, what: str) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{what} of {kind} tensors asked for; they have no data, plausible answers were given"
