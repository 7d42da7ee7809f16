"""Values of tensors on the virtual GPU: known if they follow from small CPU tensors, assumed for all others.

A training loop reads few values: a loss, a flag, times, lengths. So a small tensor that was copied from the CPU, or
made by a factory, has a CPU twin with its values, which belongs to its memory: every view of it is known too. Results
of operators on known values are computed on the CPU. Any other write to the memory forgets its values. Reads of unknown
values get assumed answers, with a note: 1 for numbers, also in comparisons with numbers that are not negative and in
checks over all elements; 0 for flags, unless code that gets a 0 can only raise an exception. A table of flags is a
mask, all of it true: it selects the largest size. The largest of unknown scores (`topk`) are chosen in turn, like
experts that get equal shares of the tokens.

Masks of any size often are zeros into which ones are written at unknown places. The number of writes limits the number
of elements that are not zero: the code calls this limit the marks of the memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ullage.virtual.call.native import storage_of
from ullage.virtual.call.plan import span_of_elements
from ullage.virtual.memory.deferred_cpu import Host
from ullage.virtual.memory.tensors import DeviceMemory
from ullage.virtual.values.unknown_branches import AssumedFlags, working_answer

LARGEST_KNOWN = 65536  # elements that are computed; lengths and positions are smaller
LARGEST_MASK = 1 << 19  # flags and whole numbers that are computed: a mask of 700 by 700 pairs, the tokens of a batch
LARGEST_COPIED = 4096  # numbers with a fraction: times, schedules and thresholds are smaller, data is larger
LARGEST_HELD = 1 << 24  # whole numbers of a text, or edges of a graph: kept, so that parts of them are known
_HELD = (torch.int64, torch.int32)  # not bytes, which are pictures
_aten = torch.ops.aten
_OVERWRITING = {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}

_ZEROS = frozenset({_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default})
_EITHER = frozenset({_aten.bitwise_or.Tensor, _aten.logical_or.default, _aten.cat.default})
MAKE_MARKS = _ZEROS | _EITHER
_WRITE_MARKS = frozenset({_aten.index_put_.default, _aten._index_put_impl_.default})
WRITE_KNOWN = _WRITE_MARKS | _OVERWRITING  # results of all others are known only if all their inputs are

_COMPARISONS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Scalar", "Tensor")
) | {_aten.isnan.default, _aten.isinf.default}
_ORDERS = frozenset(getattr(_aten, name).Scalar for name in ("lt", "le", "gt", "ge"))
_BY_PLACES = ("index_select", "gather", "clone", "cat", "stack")
_ALL = _aten.all.default
_TOPK = _aten.topk.default
_TAKE_PARTS = frozenset({_aten.index.Tensor, *(getattr(_aten, name).default for name in _BY_PLACES)})
DRAWN = frozenset({_aten.randint.default, _aten.randint.low})  # whole numbers between two known ones
ANSWERED = _COMPARISONS | {_ALL, _TOPK}  # also for numbers without data

_CPU = torch.device("cpu")  # named, because the script may have set another default
_Tensor = torch.Tensor


@functools.cache
def has_no_fixed_result(func: Any) -> bool:
    """Check whether an operator's result is random or undefined, or unsafe to compute on the CPU: it ignores strides,
    or divides by a number of elements that may be 0, and ends the process."""
    name = func._schema.name
    refused = ("empty", "_convert_indices", "batch_norm_backward")
    return torch.Tag.nondeterministic_seeded in func.tags or any(part in name for part in refused)


def _watch(tensor: _Tensor) -> Any:
    """Return the record of a tensor's memory (`TensorAllocation`); `None` without memory on the GPU."""
    return getattr(storage_of(tensor), "ullage", None)


def is_unknown(value: Any) -> bool:
    if not (isinstance(value, _Tensor) and value.is_cuda):
        return False
    watch = _watch(value)
    return watch is not None and watch.value is None


class _Unknown(Exception):
    """Raised for an unknown value."""


class _Alike(int):
    """The marks of flags that are equal for all assumed numbers: their count, and the flag."""

    holds: bool


class KnownValues:
    def __init__(self, memory: DeviceMemory, host: Host, note: Callable[[str, str], None]) -> None:
        self._memory, self._host, self._note = memory, host, note
        self._supposing = False  # whether any value followed from an assumed one
        self._flags = AssumedFlags()
        self._random = torch.Generator(device=_CPU)
        self.steps: Callable[[], int] = lambda: 0  # the number of training steps so far

    def known(self, tensor: _Tensor) -> _Tensor | None:
        """Return the values as a CPU tensor over the memory's twin, or `None`."""
        watch = _watch(tensor)
        if watch is None:
            return None if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
        if watch.value is None or tensor.is_complex():
            return None
        return _over(watch.value, tensor)

    def set(self, tensor: _Tensor, value: _Tensor, supposed: bool = False) -> None:
        """Give a tensor known values until its memory is written; `supposed` ones follow from assumed numbers."""
        storage = storage_of(tensor)
        watch = getattr(storage, "ullage", None)
        if watch is None:
            return
        watch.marks = None
        if watch.value is None:
            length = span_of_elements(tensor.shape, tensor.stride())
            if tensor.is_complex() or length * tensor.element_size() != storage.nbytes():
                return  # the rest of its memory is unknown
            watch.value = torch.empty(length, dtype=tensor.dtype, device=_CPU)
        _over(watch.value, tensor).copy_(value)
        if self._supposing:
            watch.value.supposed = supposed

    def copied(self, source: _Tensor, target: _Tensor) -> None:
        """Take over the values of a small tensor that was copied to the GPU."""
        value: _Tensor | None = None
        if source.is_cuda:
            value = self.known(source)
        elif source.numel() <= _most_copied(source.dtype) and not isinstance(source, torch.nn.Parameter):
            self._host.fill(source)
            value = source.detach()
        if value is None:
            marks = self.marks(source) if source.is_cuda and _is_whole(target) else None
            self._memory.written(target)
            self._set_marks(target, marks)
        else:
            self.set(target, value, self._supposing and self.is_supposed(source))

    def marks(self, tensor: _Tensor) -> int | None:
        """Return the largest number of elements that are not zero; `None` if unknown."""
        watch = _watch(tensor)
        if watch is None or 0 in tensor.stride():
            return None
        most = watch.marks if watch.value is None else int(torch.count_nonzero(watch.value))
        return None if most is None else min(most, tensor.numel())

    def _set_marks(self, tensor: _Tensor, marks: int | None) -> None:
        watch = _watch(tensor)
        if watch is not None:
            watch.marks = marks

    def follow_marks(self, func: Any, args: tuple[Any, ...], result: _Tensor) -> None:
        """Update marks after an operator that made zeros or joined tensors."""
        if func in _ZEROS:
            self._set_marks(result, 0)
            return
        joined = func is _aten.cat.default
        parts = args[0] if joined else args[:2]
        known = [self.marks(each) for each in parts if joined or each.shape == result.shape]
        if len(known) == len(parts) and None not in known:
            self._set_marks(result, sum(filter(None, known)))

    def _marks_after(self, func: Any, args: tuple[Any, ...]) -> int | None:
        target = args[0]
        if func is _aten.zero_.default and _is_whole(target):
            return 0
        before = self.marks(target) if func in _WRITE_MARKS else None
        return None if before is None else before + _places(target, args[1])

    def copied_storage(self, source: _Tensor, target: _Tensor) -> None:
        watch = _watch(source)
        if watch is not None and watch.value is not None:
            storage_of(target).ullage.value = watch.value.clone()

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the results of a call on known values; `None` if a tensor is unknown, or the CPU cannot compute it."""
        if has_no_fixed_result(func):
            return None
        try:
            most = LARGEST_HELD if func in _TAKE_PARTS else LARGEST_MASK
            values = func(*self._known_arguments(args, most), **self._known_arguments(kwargs, most))
        except Exception:
            return None
        return list(values) if isinstance(values, list | tuple) else [values]

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Repeat a call with small results on known values, if all of its tensors are known."""
        if func in DRAWN:
            self._follow_drawn(args, result)
            return
        first = args[0] if args else None
        if func is _ALL and is_unknown(first):
            self._follow_all(args[0], result)
            return
        if func in _ORDERS and result.numel() > 1 and is_unknown(first):
            if args[0].is_floating_point() and not self._is_negative(args[1]):
                alike = _Alike(result.numel())
                alike.holds = bool(func(torch.ones((), device=_CPU), args[1]))
                self._set_marks(result, alike)
            return
        if func is _TOPK and is_unknown(first):
            self._follow_choice(args, kwargs, result[1])
            return
        if func in _COMPARISONS and result.numel() == 1 and not any(map(self._is_negative, args)):
            args = tuple(map(self._supposed, args))
        elif is_unknown(first):
            return
        supposed = self._supposing and any(map(self.is_supposed, args))
        results = result if isinstance(result, list | tuple) else (result,)
        for made, value in zip(results, self.computed(func, args, kwargs) or (), strict=False):
            if value is not None and isinstance(made, _Tensor) and made.is_cuda and value.shape == made.shape:
                self.set(made, value, supposed)

    def _follow_drawn(self, args: tuple[Any, ...], result: _Tensor) -> None:
        """Draw whole numbers of the same range, so that masks made of them select their share."""
        low, high = (0, args[0]) if isinstance(args[1], list | tuple) else args[:2]
        if result.numel() > 1 and low < high:
            drawn = torch.randint(low, high, result.shape, generator=self._random, device=_CPU)
            self._supposing = True
            self.set(result, drawn.to(result.dtype), supposed=True)

    def _follow_choice(self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: _Tensor) -> None:
        """Choose in turns the largest of unknown scores, as a router of tokens chooses experts."""
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if not 0 < chosen.numel() <= LARGEST_KNOWN or not chosen.dim():
            return
        rows = [*chosen.shape]
        rows.append(rows.pop(dim))
        turns = torch.arange(chosen.numel(), device=_CPU).remainder_(args[0].shape[dim]).view(rows).movedim(-1, dim)
        self._supposing = True
        self.set(chosen, turns, supposed=True)

    def _follow_all(self, flags: _Tensor, result: _Tensor) -> None:
        watch = _watch(flags)
        if watch is not None and isinstance(watch.marks, _Alike):
            self._note("values", _note_on_read(flags, "a comparison"))
            self._supposing = True
            self.set(result, torch.tensor(watch.marks.holds, device=_CPU), supposed=True)

    def _supposed(self, value: Any) -> Any:
        """Return a side of a comparison; without data, the number that `.item()` would give."""
        if not isinstance(value, _Tensor) or not value.is_floating_point() or self.known(value) is not None:
            return value
        self._note("values", _note_on_read(value, "a comparison"))
        self._supposing = True
        one: Any = torch.ones(value.shape, dtype=value.dtype, device=_CPU)
        one.supposed = True
        return one

    def _is_negative(self, value: Any) -> bool:
        """Check whether one side of a comparison is known to be below zero: the other's sign is unknown."""
        known = self.known(value) if isinstance(value, _Tensor) and value.is_cuda else value
        return known is not None and not isinstance(known, complex) and bool(known < 0)

    def is_supposed(self, value: Any) -> bool:
        if isinstance(value, _Tensor) and value.is_cuda:
            value = getattr(_watch(value), "value", None)
        return getattr(value, "supposed", False)

    def tensor(self, value: _Tensor) -> _Tensor:
        made = self._memory.tensor(value.shape, value.stride(), value.dtype, value.numel() * value.element_size())
        self.set(made, value)
        return made

    def forget_marks(self, written: Sequence[_Tensor]) -> bool:
        """Forget the marks of tensors after an unknown write; return false if one of them has known values."""
        for tensor in written:
            watch = _watch(tensor)
            if watch is not None:
                if watch.value is not None:
                    return False
                watch.marks = None
        return True

    def follow_in_place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[_Tensor]
    ) -> None:
        """Update the known values of tensors that an operator wrote: compute them if all inputs are known, else forget
        them."""
        marks = self._marks_after(func, args)
        if func in _OVERWRITING and args[0].numel() <= most_computed(args[0].dtype):
            value = args[1] if len(args) > 1 else 0
            if isinstance(value, _Tensor):
                self.copied(value, args[0])
            else:
                self.set(args[0], torch.tensor(value, dtype=args[0].dtype, device=_CPU))
            return
        known = [tensor for tensor in written if getattr(_watch(tensor), "value", None) is not None]
        if known and self.computed(func, args, kwargs) is None:
            for tensor in known:
                self._memory.written(tensor)
        for tensor in written:
            self._set_marks(tensor, marks)

    def follow_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        """Update the known values of tensors given by name, such as `out`, that an operator wrote."""
        given = [kwargs[name] for name in names if kwargs.get(name) is not None]
        written = [tensor for value in given for tensor in ([value] if isinstance(value, _Tensor) else value)]
        for tensor in written:
            self._memory.written(tensor)
        if len(written) == 1 and written[0] is given[0] and written[0].numel() <= LARGEST_KNOWN:
            out = torch.empty(0, dtype=written[0].dtype, device=_CPU)
            known = self.computed(func, args, kwargs | {names[0]: out})
            if known is not None and known[0].shape == written[0].shape:
                self.set(written[0], known[0])

    def _known_arguments(self, value: Any, most: int) -> Any:
        if isinstance(value, _Tensor):
            known = self.known(value) if value.is_cuda else value
            if known is None or known.numel() > most:
                raise _Unknown
            return known
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, list | tuple):
            return type(value)(self._known_arguments(item, most) for item in value)
        if isinstance(value, dict):
            return {name: self._known_arguments(item, most) for name, item in value.items()}
        return value

    def scalar(self, tensor: torch.Tensor) -> Any:
        self._memory.read_back()
        known = self.known(tensor)
        if known is not None:
            supposed = tensor.dtype is torch.bool and self.is_supposed(tensor)
            working = self._flags.working_answer(self.steps()) if supposed else None
            return known.item() if working is None else working
        self._note("readings" if tensor.is_floating_point() else "values", _note_on_read(tensor, "one value"))
        if tensor.dtype is torch.bool:
            working = working_answer()
            return self._flags.waited_for(self.steps()) if working is None else working
        if tensor.is_complex():
            return complex(1.0)
        return 1.0 if tensor.is_floating_point() else 1

    def on_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the answer to `.cpu()`: known values, else ones (filled only when read), and false for flags, unless
        they are a table: a mask selects everything, as on the GPU."""
        known = self.known(tensor)
        if known is not None and known.numel() <= LARGEST_HELD:
            return known.to(dtype, copy=True)
        if tensor.numel() <= LARGEST_KNOWN:
            self._note("readings" if tensor.is_floating_point() else "values", _note_on_read(tensor, "values"))
        flags = dtype is torch.bool and (tensor.dim() < 2 or tensor.shape[-1] == 1)
        fill = _aten.zeros.default if flags else _aten.ones.default
        out: torch.Tensor = self._host.call(fill, (list(tensor.shape),), {"dtype": dtype})
        return out


def _most_copied(dtype: torch.dtype) -> int:
    """Return how many elements a CPU tensor of this type may have for its values to be kept."""
    return LARGEST_HELD if dtype in _HELD else LARGEST_COPIED if dtype.is_floating_point else LARGEST_MASK


def most_computed(dtype: torch.dtype) -> int:
    """Return how many elements a result of this type may have to be computed on the CPU."""
    return LARGEST_KNOWN if dtype.is_floating_point or dtype.is_complex else LARGEST_MASK


def _is_whole(tensor: _Tensor) -> bool:
    nbytes: int = storage_of(tensor).nbytes()
    return tensor.numel() * tensor.element_size() == nbytes


def _places(tensor: _Tensor, indices: Sequence[_Tensor | None]) -> int:
    """Return how many elements `tensor[indices] = ...` writes."""
    given = [index for index in indices if index is not None]
    others = [size for place, size in enumerate(tensor.shape) if place >= len(indices) or indices[place] is None]
    at_once: int = torch.broadcast_shapes(*[index.shape for index in given]).numel()
    return at_once * math.prod(others)


def _over(twin: _Tensor, tensor: _Tensor) -> _Tensor:
    """Return a view of the CPU twin with the same place and strides as the tensor has in its memory."""
    if twin.dtype is not tensor.dtype:
        twin = twin.view(tensor.dtype)
    return twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _note_on_read(tensor: torch.Tensor, what: str) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"read {what} of {kind} tensors, which have no data: plausible values are assumed"
