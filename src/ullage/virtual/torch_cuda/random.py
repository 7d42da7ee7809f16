"""Random state: `torch.cuda.default_generators` and `torch.Generator(device="cuda")`.

No numbers are drawn on the virtual GPU. Operators need a generator of PyTorch's own type, so it is one of the CPU with
the device "cuda".
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.distributed.rank import device_count
from ullage.virtual.state import GPUState

_Generator: Any = torch._C.Generator
_STATE_BYTES = 16  # aten/src/ATen/cuda/CUDAGeneratorImpl.cpp: 8 for the seed, 8 for the offset
_DEFAULT_SEED = 67280421310721  # c10/core/GeneratorImpl.h, default_rng_seed_val
_MASK = (1 << 64) - 1
_TRUNCATED = "_no_grad_trunc_normal_"  # of torch.nn.init


class _Kind(type(_Generator)):  # type: ignore[misc]
    """Every generator is a `torch.Generator`, also earlier ones."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, _Generator)


class AnyGenerator(_Generator, metaclass=_Kind):  # type: ignore[misc]
    def __new__(cls, device: Any = "cpu") -> Any:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return CudaGenerator() if where.type == "cuda" else _Generator(device=where)


class CudaGenerator(_Generator):  # type: ignore[misc]
    def __new__(cls) -> Any:
        return _Generator.__new__(cls)

    def __init__(self) -> None:
        self._seed, self._offset = _DEFAULT_SEED, 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def manual_seed(self, seed: int) -> Self:
        super().manual_seed(seed)
        self._seed, self._offset = seed & _MASK, 0
        return self

    def seed(self) -> int:
        self._seed, self._offset = int(super().seed()), 0
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> torch.Tensor:
        """Seed and offset as 16 bytes, as CUDA's generators give them."""
        state = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        return torch.tensor(list(state), dtype=torch.uint8, device="cpu")

    def set_state(self, state: torch.Tensor) -> Self:
        if state.dtype is not torch.uint8 or state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != _STATE_BYTES:
            raise RuntimeError("RNG state is wrong size")
        content = bytes(state.tolist())
        return self._set(int.from_bytes(content[:8], "little"), int.from_bytes(content[8:], "little"))

    def _set(self, seed: int, offset: int) -> Self:
        super().manual_seed((seed + offset) & _MASK)
        self._seed, self._offset = seed, offset
        return self

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def clone_state(self) -> Self:
        return CudaGenerator()._set(self._seed, self._offset)  # no tensor: it would be a fake under the compiler

    def graphsafe_get_state(self) -> Self:
        return self.clone_state()

    def graphsafe_set_state(self, state: Self) -> Self:
        return self._set(state._seed, state._offset)

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)


def _rebuild(state: torch.Tensor) -> CudaGenerator:
    return CudaGenerator().set_state(state)


def install(gpu: GPUState, replacements: Replacements) -> None:
    generators = (CudaGenerator(),) * device_count()
    replacements.put(torch.cuda, "default_generators", generators)
    replacements.put_existing(torch._C, "_accelerator_getDefaultGenerator", generators.__getitem__)
    replacements.put(torch, "Generator", AnyGenerator)
    replacements.put(nn.init, _TRUNCATED, _truncated_later(gpu, getattr(nn.init, _TRUNCATED)))


def _truncated_later(gpu: GPUState, draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Defer `nn.init.trunc_normal_`, which draws until no number is too large (PyTorch 2.13) and would fill the
    weights."""

    def draw_later(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if gpu.host.change_later(tensor, lambda view: draw(view, *args, **kwargs)):
            return tensor
        return draw(tensor, *args, **kwargs)

    return draw_later


AnyGenerator.__name__ = AnyGenerator.__qualname__ = "Generator"
AnyGenerator.__module__ = "torch"
