"""The order in which autocast casts the arguments of one operator.

PyTorch writes the casts as arguments of one C++ call, and C++ leaves their order to the compiler: builds for x86-64,
which run on nearly every GPU server, cast the last argument first; builds for 64-bit ARM the first. Where this
machine's build does it the other way, the casts before an operator wait for it and then take their memory in the
order of x86-64. Whether it does is asked of the build itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from ullage.virtual.memory import DeviceMemory


class CastOrder:
    """Holds the casts of one operator back until it comes."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.waiting: list[tuple[torch.Tensor, int]] = []
        self.turned_around = first_argument_is_cast_first()

    def concerns(self, source: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a copy is a cast by autocast: autocast is off while it works itself, inside its own `with`."""
        if not self.turned_around or len(kwargs) != 1 or not source.is_cuda or torch.is_autocast_enabled("cuda"):
            return False
        if kwargs.get("dtype") is not torch.get_autocast_dtype("cuda") or source.dtype is not torch.float32:
            return False
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        return depth > 1

    def hold(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Keep a cast without memory until `release`."""
        self.waiting.append((tensor, nbytes))

    def release(self) -> None:
        """An operator comes: give the casts their memory, the last one first."""
        waiting, self.waiting = self.waiting, []
        for tensor, nbytes in reversed(waiting):
            self._memory.attach(tensor, nbytes)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.first_size: int | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and self.first_size is None:
            self.first_size = args[0].numel()
        return func(*args, **(kwargs or {}))


_asked: bool | None = None


def first_argument_is_cast_first() -> bool:
    """Ask this build of PyTorch, once, with a small matrix product on the CPU under CPU autocast."""
    global _asked
    if _asked is None:
        watch = _Watch()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), watch:
            torch.mm(torch.zeros(1, 2), torch.zeros(2, 2))
        _asked = watch.first_size == 2
    return _asked
