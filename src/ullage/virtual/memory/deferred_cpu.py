"""CPU tensors while a virtual GPU is in use: they keep their data, but large ones are filled only when read.

A large new CPU tensor is made by `torch.empty`, which costs address space and no memory. The steps that would fill it
run when an operator first needs the values. Moving it to the virtual GPU does not, so a model of billions of parameters
is built in milliseconds with little memory. Random numbers are drawn late, so a seed gives other values than in
PyTorch.
"""

import math
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ullage.virtual.call.native import storage_of

SMALLEST_DEFERRED = 16 * 1024  # bytes; filling less than this costs no more than remembering it

_aten = torch.ops.aten

# Factories that can be deferred, and the functions that fill the empty tensor later.
_FILLS: dict[str, Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]] = {
    "empty": lambda out, args, kwargs: None,
    "zeros": lambda out, args, kwargs: out.zero_(),
    "ones": lambda out, args, kwargs: out.fill_(1),
    "randn": lambda out, args, kwargs: out.normal_(generator=kwargs.get("generator")),
    "rand": lambda out, args, kwargs: out.uniform_(generator=kwargs.get("generator")),
}
_LIKE_FACTORIES = {getattr(_aten, f"{name}_like").default: fill for name, fill in _FILLS.items()}
_FACTORIES = {
    **{getattr(_aten, name).default: fill for name, fill in _FILLS.items() if name != "empty"},
    _aten.empty.memory_format: _FILLS["empty"],
    _aten.full.default: lambda out, args, kwargs: out.fill_(args[1]),
    _aten.randn.generator: _FILLS["randn"],
    _aten.rand.generator: _FILLS["rand"],
}
_COPIES = {_aten._to_copy.default, _aten.clone.default}
_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40  # Python has a name for it from 3.13 on
_FACTORY_OPTIONS = ("dtype", "layout", "memory_format")


class _Unfilled:
    """The steps that would fill one storage, and its unfilled copies by key."""

    __slots__ = ("__weakref__", "copies", "key", "refused", "steps", "watch")

    def __init__(self, key: int) -> None:
        self.key = key
        self.steps: list[Callable[[torch.Tensor], Any]] = []
        self.copies: list[tuple[Any, int]] = []
        self.watch: Any = None
        self.refused: RuntimeError | None = None  # the tensor is only address space, and must not be filled


class Host:
    def __init__(self) -> None:
        self._unfilled: dict[int, _Unfilled] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on CPU tensors, or defer it."""
        if kwargs.get("pin_memory"):
            made = self.call(func, args, kwargs | {"pin_memory": False})
            storage_of(made).ullage_pinned = True  # as VirtualGPU.pin
            return made
        fill = _FACTORIES.get(func) or _LIKE_FACTORIES.get(func)
        if fill is not None and _is_host(kwargs.get("device")):
            made = self._defer_factory(func, fill, args, kwargs)
            if made is not None:
                return made
        if self._unfilled:
            if func in _COPIES:
                made = self._defer_copy(func, args, kwargs)
                if made is not None:
                    return made
            elif self._defer_in_place(func, args, kwargs):
                return args[0]
            else:
                returns = [value.alias_info for value in func._schema.returns]
                if not returns or any(alias is None or alias.is_write for alias in returns):  # not a view
                    self.fill_all((args, kwargs))
        return func(*args, **kwargs)

    def fill(self, tensor: torch.Tensor) -> None:
        if not self._unfilled or tensor.device.type != "cpu":
            return
        if tensor.layout is torch.sparse_coo:
            self.fill(tensor._indices())
            self.fill(tensor._values())
            return
        unfilled = self._unfilled_of(tensor)
        if unfilled is not None:
            self._run(unfilled, tensor)

    def _unfilled_of(self, tensor: torch.Tensor) -> _Unfilled | None:
        try:
            return self._unfilled.get(storage_of(tensor)._cdata)
        except (RuntimeError, NotImplementedError):
            return None  # some kinds of tensors have no storage

    def read_later(self, tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Give a new CPU tensor the values that `read` returns; a large one when they are needed."""
        unfilled = self._unfilled.get(storage_of(tensor)._cdata)
        if unfilled is None:
            return tensor.copy_(read())
        unfilled.steps.append(_Step(tensor, lambda target: target.copy_(read())))
        return tensor

    def change_later(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> bool:
        """Let `change` write to a CPU tensor when its values are needed; return false if it must run now."""
        unfilled = self._unfilled_of(tensor) if self._unfilled else None
        if unfilled is None or any(reference() is not None for reference, _ in unfilled.copies):
            return False  # a copy still needs the earlier values
        unfilled.steps.append(_Step(tensor, change))
        return True

    def is_unfilled(self, tensor: torch.Tensor) -> bool:
        return bool(self._unfilled) and storage_of(tensor)._cdata in self._unfilled

    def fill_all(self, values: Any) -> None:
        if isinstance(values, torch.Tensor):
            self.fill(values)
        elif isinstance(values, list | tuple):
            for value in values:
                self.fill_all(value)
        elif isinstance(values, dict):
            for value in values.values():
                self.fill_all(value)

    @property
    def has_unfilled(self) -> bool:
        return bool(self._unfilled)

    def close(self) -> None:
        """Fill all tensors that are alive: nothing would do so outside the virtual GPU."""
        for unfilled in list(self._unfilled.values()):
            storage = unfilled.watch() if unfilled.watch is not None else None
            if storage is not None and unfilled.steps and not unfilled.refused:
                self._run(unfilled, torch.empty(0, dtype=torch.uint8).set_(storage))
        self._unfilled.clear()

    def forget(self) -> None:
        """Leave all unfilled tensors as they are."""
        self._unfilled.clear()

    def _remember(self, tensor: torch.Tensor, refused: RuntimeError | None) -> _Unfilled:
        storage = storage_of(tensor)
        unfilled = _Unfilled(storage._cdata)
        unfilled.refused = refused
        unfilled.watch = weakref.ref(storage, lambda _, key=unfilled.key: self._unfilled.pop(key, None))  # type: ignore[misc]
        self._unfilled[unfilled.key] = unfilled
        return unfilled

    def _defer_factory(self, func: Any, fill: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {name: kwargs[name] for name in _FACTORY_OPTIONS if kwargs.get(name) is not None}
        if func in _LIKE_FACTORIES:
            source = args[0]
            on_host = source.device.type == "cpu" or kwargs.get("device") is not None
            if not on_host or source.numel() * source.element_size() < SMALLEST_DEFERRED:
                return None
            out, refused = _address_space(
                lambda: torch.empty_like(source, device="cpu", **options), source.shape, options, source.dtype
            )
        else:
            if math.prod(args[0]) * 4 < SMALLEST_DEFERRED:
                return None
            if func is _aten.full.default and "dtype" not in options:
                options["dtype"] = torch.full((), args[1]).dtype
            out, refused = _address_space(lambda: torch.empty(args[0], **options), args[0], options)
        if out.layout is not torch.strided:
            return None
        self._remember(out, refused).steps.append(_Step(out, lambda target: fill(target, args, kwargs)))
        return out

    def _defer_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        unfilled = self._unfilled.get(storage_of(source)._cdata) if source.layout is torch.strided else None
        if unfilled is None or not _is_host(kwargs.get("device")):
            return None
        options = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
        out, refused = _address_space(lambda: torch.empty_like(source, **options), source.shape, options, source.dtype)
        copy = self._remember(out, refused)

        def fill(target: torch.Tensor) -> None:
            self.fill(source)
            target.copy_(source)

        copy.steps.append(_Step(out, fill))
        unfilled.copies.append((weakref.ref(storage_of(out)), copy.key))
        return out

    def _defer_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Defer an in-place change of an unfilled tensor by numbers alone (`normal_`, `mul_`, `clamp_` ...)."""
        if not (args and func._schema.name.endswith("_") and isinstance(args[0], torch.Tensor)):
            return False
        rest = args[1:]
        if any(isinstance(value, torch.Tensor | list | tuple) for value in rest):
            return False
        if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            return False
        if func._schema.name in ("aten::resize_", "aten::set_", "aten::as_strided_", "aten::t_", "aten::squeeze_"):
            return False
        return self.change_later(args[0], lambda view: func(view, *rest, **kwargs))

    def _run(self, unfilled: _Unfilled, tensor: torch.Tensor) -> None:
        if unfilled.refused is not None:
            raise unfilled.refused.with_traceback(None)
        self._unfilled.pop(unfilled.key, None)
        for step in unfilled.steps:
            step(tensor)
        for reference, key in unfilled.copies:
            storage, copy = reference(), self._unfilled.get(key)
            if storage is not None and copy is not None:
                self._run(copy, torch.empty(0, dtype=torch.uint8).set_(storage))


class _Step:
    """One filling step on a view of a storage, which it does not keep alive."""

    __slots__ = ("act", "dtype", "offset", "size", "stride")

    def __init__(self, view: torch.Tensor, act: Callable[[torch.Tensor], Any]) -> None:
        self.size, self.stride, self.offset = tuple(view.shape), view.stride(), view.storage_offset()
        self.dtype, self.act = view.dtype, act

    def __call__(self, tensor: torch.Tensor) -> None:
        target = torch.empty(0, dtype=self.dtype).set_(storage_of(tensor), self.offset, self.size, self.stride)
        self.act(target)


def _address_space(
    make: Callable[[], torch.Tensor], size: Sequence[int], options: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, RuntimeError | None]:
    """Return an unfilled tensor, and the error to raise on filling it if this machine lacks the memory."""
    try:
        return make(), None
    except RuntimeError as refused:
        if "can't allocate memory" not in str(refused) or options.keys() - {"dtype"}:
            raise
        dtype = options.get("dtype") or dtype or torch.get_default_dtype()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=flags)
        except (OSError, OverflowError):
            raise refused from None
        return torch.frombuffer(memory, dtype=dtype).view(size), refused


def _is_host(device: torch.device | None) -> bool:
    return device is None or device.type == "cpu"
