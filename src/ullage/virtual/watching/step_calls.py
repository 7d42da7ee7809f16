"""The operator calls of a training step, with their arguments, order and passes.

A step is an array of numbers of distinct calls, so that a repeated call costs a fraction of a microsecond. A step is
complete when an optimizer has made its step, and steady when it is the same as the one before; with several optimizers,
or accumulated gradients, when several steps are the same as those before. Without training, an iteration is a step.

`OperatorCalls.step()` is plain values, ready for JSON:

    calls     the distinct calls: operator, pass, args, kwargs, outputs; "view" if no kernel runs, "same" with the
              places of two arguments that are one tensor, or lists of the same tensors; "tf32" for products and
              convolutions of float32 if it is not PyTorch's default: true for products, false for convolutions
              collectives among several ranks are calls, too: "collective.NAME", with numbers in kwargs only
              (`distributed/ordering.py`)
    order     numbers of `calls`, in the order of the calls
    steady    whether the step repeats
    optimizer_steps, modules, nodes, on_host, cpu_bytes, samples
              counts of the host's work: optimizer steps, module calls, autograd nodes made, operators on the CPU, bytes
              that these wrote in a pass (bytes outside all passes are loaded data), and samples from data loaders, as
              far as these were watched

Tensors are objects with a `shape` and a `dtype`, with `stride` unless they are contiguous, and `cpu` if they are on the
host. Types, devices, formats and layouts are objects with one key, the kind of value.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ullage.virtual.call.native import is_gpu
from ullage.virtual.call.plan import (
    Alias,
    New,
    Same,
    argument_at,
    is_contiguous,
    tf32_for_convolutions,
    tf32_for_products,
)
from ullage.virtual.memory.launch_clock import LaunchClock

OUTSIDE, FORWARD, BACKWARD, OPTIMIZER = range(4)
PASSES = ("outside", "forward", "backward", "optimizer")
_MOST_OPTIMIZER_STEPS = 8  # of an iteration
_MOST_CALLS = 2_000_000  # kept if no optimizer ever makes a step

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addbmm.", "aten._addmm_activation.")
_CONVOLUTIONS = ("aten.convolution", "aten._convolution.", "aten._cudnn_rnn")  # and other operators of cuDNN

_COUNTED = ("modules", "nodes", "on_host", "cpu_bytes", "samples")

_graph_task = torch._C._current_graph_task_id
_sequence: Any = torch._C._autograd._get_sequence_nr
_Tensor, _Parameter, _dtype = torch.Tensor, torch.nn.Parameter, torch.dtype
_WITHOUT_SHAPE = {torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer}
_BY_TYPE = {*_WITHOUT_SHAPE, torch.Generator, torch.ScriptObject}  # their identity does not matter
_NAMES: dict[type, str] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.memory_format: "memory_format",
    torch.layout: "layout",
}


def describe(values: Any, parts: list[Any], floats_matter: bool) -> bool:
    """Add the values that decide a call's plan to `parts`; return true if one is on the virtual GPU."""
    on_gpu = False
    add = parts.append
    for value in values:
        kind = type(value)
        if kind is _Tensor or kind is _Parameter or isinstance(value, _Tensor) and kind not in _WITHOUT_SHAPE:
            cuda = value.is_cuda
            on_gpu |= cuda
            add(value.shape)
            add(value.stride())
            add(value.dtype)
            add((cuda, value.is_conj()) if value.dtype.is_complex else cuda)
        elif value is None or kind is _dtype:
            add(value)
        elif kind is float:
            add((float, value) if floats_matter else float)
        elif kind is int or kind is bool:
            add((kind, value))
        elif kind is list or kind is tuple:
            add(len(value))
            on_gpu |= describe(value, parts, floats_matter)
        elif kind is torch.device:
            on_gpu |= is_gpu(value)
            add(value)
        elif kind in _BY_TYPE:
            add(kind)
        else:
            add(value)
    return on_gpu


class SeenCall(NamedTuple):
    """A distinct call as first seen, in plain values."""

    operator: str
    args: list[Any]
    kwargs: Mapping[str, Any] = {}
    outputs: list[Any] = []
    is_view: bool = False  # whether no kernel runs
    same: int = 0  # 1: the first and the second argument are the same, 2: the second and the third

    @classmethod
    def of(
        cls, operator: str, args: Any, kwargs: Mapping[str, Any], outputs: Sequence[Any], writes: bool, same: int
    ) -> "SeenCall":
        given, named = [_plain(value) for value in args], {name: _plain(value) for name, value in kwargs.items()}
        made = [output for output in outputs if output is not None]
        is_view = bool(made) and not writes and all(type(output) in (Alias, Same) for output in made)
        try:
            return cls(operator, given, named, [_output(output, given, named) for output in made], is_view, same)
        except LookupError:  # the estimate of memory does not depend on it
            return cls(operator, [])

    def to_dict(self, part: str, tf32: tuple[bool, bool]) -> dict[str, Any]:
        """Return the call in a pass; see the module docstring."""
        call = {"operator": self.operator, "pass": part, "args": self.args, "kwargs": self.kwargs}
        call["outputs"] = self.outputs
        if self.same:
            call["same"] = [self.same - 1, self.same]
        return call | ({"view": True} if self.is_view else _rounding(call, *tf32))


class _Mark(NamedTuple):
    calls: int
    modules: int
    nodes: int
    on_host: int
    cpu_bytes: int
    samples: int
    tf32: tuple[bool, bool] = (False, True)  # of products and of convolutions


_Step = tuple["array[int]", list[_Mark]]  # its calls, and the marks around it


class OperatorCalls:
    def __init__(self) -> None:
        self.stream = array("I")  # indices of distinct calls, each with its pass in the lowest bits
        self.numbers: dict[Any, int] = {}  # of distinct calls, by their keys
        self.part = OUTSIDE  # the pass, unless it is the backward pass
        self.modules = self.on_host = self.cpu_bytes = self.samples = 0
        self.launch_clock: LaunchClock | None = None  # set if the lag of the GPU behind the host matters
        self.bubble: float | None = None  # of the schedule of a pipeline, over this rank's own time
        self._views: dict[Any, int] = {}  # numbers of views, by their keys
        self._distinct: list[SeenCall] = []
        self._operators: set[str] = set()
        self._marks = [_Mark(0, 0, 0, 0, 0, 0)]
        self._steady: _Step | None = None
        self._settled = False
        self._usual: _Step | None = None  # the last step before training settled, if none was steady by then
        self._trains = False
        self._dropped = 0  # calls that are no longer kept

    def learn(self, mark: Any, seen: SeenCall, layout: Any = None) -> int:
        """Return the number of a new call. Views that differ only in offset share a `layout`, and are one call."""
        new = len(self._distinct) * len(PASSES)
        number = self.numbers[mark] = self._views.setdefault(layout, new) if seen.is_view else new
        if number == new:
            self._distinct.append(seen)
            self._operators.add(seen.operator)
        if len(self.stream) > _MOST_CALLS:
            self._marks = [self._now(0)]
            self._dropped += len(self.stream)
            del self.stream[:]
        return number

    def add(self, number: int) -> None:
        self.stream.append(number + (self.part if _graph_task() == -1 else BACKWARD))
        if self.launch_clock is not None:
            self.launch_clock.call(number, self._described)

    @property
    def position(self) -> int:
        return self._dropped + len(self.stream)

    @property
    def step_begins(self) -> int:
        return self._dropped + self._marks[-1].calls

    @property
    def operators(self) -> int:
        return len(self._operators)

    def add_on_host(self, written: Any) -> None:
        """Count an operator on the CPU and its result; `None` for a view."""
        self.on_host += 1
        if isinstance(written, _Tensor) and (self.part != OUTSIDE or _graph_task() != -1):
            self.cpu_bytes += written.nbytes

    def add_graph(self, calls: "array[int]") -> None:
        """Record the launch of a CUDA graph, which repeats its captured calls."""
        self.add_values("cuda.graph_launch")
        self.stream.extend(calls)

    def add_kernel(self, name: str, arguments: Iterable[Any]) -> None:
        """Record a kernel that is no operator, such as Triton's."""
        given = [value for value in arguments if isinstance(value, _Tensor | int | float)]
        parts: list[Any] = [f"triton.{name}"]
        describe(given, parts, True)
        self._add_other(tuple(parts), lambda: SeenCall(f"triton.{name}", [_plain(value) for value in given]))

    def add_values(self, name: str, **values: int) -> None:
        """Record a call with numbers only: a collective, or a wait for one."""
        self._add_other((name, *values.items()), lambda: SeenCall(name, [], values))

    def add_shapes(self, name: str, args: Iterable[Any], result: Any) -> None:
        """Record an operator on tensors in another layout, by shapes alone."""
        made = result if isinstance(result, list | tuple) else [result]
        given, outputs = (list(_in_layouts(values)) for values in (args, made))
        self._add_other(repr((name, given, outputs)), lambda: SeenCall(name, given, {}, outputs))

    def _add_other(self, mark: Any, seen: Callable[[], SeenCall]) -> None:
        number = self.numbers.get(mark)
        self.add(self.learn(mark, seen()) if number is None else number)

    def end_step(self) -> None:
        """Record the end of an optimizer step, or of a backward pass without one."""
        if not self._trains:
            self._trains, self._marks, self._steady = True, self._marks[:1], None
        self._mark()

    @property
    def settled(self) -> bool:
        """Whether training has settled: later steps are less typical, so a longer one never counts as steady."""
        return self._settled

    @settled.setter
    def settled(self, settled: bool) -> None:
        self._settled, self._usual = settled, None
        if settled and self._steady is None:
            self._usual = self._last_step()

    def _last_step(self) -> _Step:
        marks = self._marks[-2:]
        if len(marks) == 1:
            marks = [*marks, self._now(len(self.stream))]
        return self.stream[marks[0].calls : marks[-1].calls], marks

    def begin_forward(self) -> None:
        """Record the call of an outermost module: without training, an iteration begins with it."""
        if not self._trains and not torch.is_grad_enabled():
            self._mark()

    def repeat_step(self) -> None:
        before, last = self._marks[-2:]
        self.stream.extend(self.stream[before.calls : last.calls])
        counts = {name: 2 * getattr(last, name) - getattr(before, name) for name in ("calls", *_COUNTED)}
        self._mark(last._replace(**counts))

    def _mark(self, mark: _Mark | None = None) -> None:
        marks = self._marks
        marks.append(mark or self._now(len(self.stream)))
        longest = min(_MOST_OPTIMIZER_STEPS, (len(marks) - 1) // 2)
        if self.settled and self._steady is not None:
            longest = min(longest, len(self._steady[1]) - 2)
        for period in range(1, longest + 1):
            last, before, first = (marks[-1 - back * period].calls for back in range(3))
            if self._usual is not None and last - before > len(self._usual[0]):
                continue
            if last - before == before - first and self.stream[before:last] == self.stream[first:before]:
                self._steady = self.stream[before:last], marks[-1 - period :]
                break
        old = len(marks) - 1 - 2 * _MOST_OPTIMIZER_STEPS
        if old > 0:
            begin = marks[old].calls
            self._dropped += begin
            del self.stream[:begin]
            self._marks = [mark._replace(calls=mark.calls - begin) for mark in marks[old:]]

    def _described(self, number: int) -> dict[str, Any]:
        return self._distinct[number // len(PASSES)].to_dict(PASSES[OUTSIDE], _tf32())

    def _now(self, calls: int) -> _Mark:
        return _Mark(calls, self.modules, _sequence(), self.on_host, self.cpu_bytes, self.samples, _tf32())

    def step(self) -> dict[str, Any]:
        """Return the last steady step; without one, the last step, or all calls so far."""
        stream, marks = self._steady or self._usual or self._last_step()
        places: dict[int, int] = {}
        order = [places.setdefault(number, len(places)) for number in stream]
        kinds = len(PASSES)
        return {
            "calls": [
                self._distinct[number // kinds].to_dict(PASSES[number % kinds], marks[-1].tf32) for number in places
            ],
            "order": order,
            **({} if self.bubble is None else {"bubble": self.bubble}),
            "steady": self._steady is not None,
            "optimizer_steps": len(marks) - 1 if self._trains else 0,
            **{name: getattr(marks[-1], name) - getattr(marks[0], name) for name in _COUNTED},
        }


def layout_of_view(operator: str, key: Any, outputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the key of a view: the layouts of its outputs, or of its arguments."""
    layouts = (
        (tuple(output.size), tuple(output.stride), output.dtype) if type(output) is Alias else key for output in outputs
    )
    return operator, *layouts


def same_lists(args: Sequence[Any]) -> int:
    """Return which two of the first lists hold the same tensors, as for a gradient's square; see `SeenCall.same`."""
    firsts = [value[0] if isinstance(value, list | tuple) and value else None for value in args[:3]]
    for place in range(1, len(firsts)):
        if firsts[place] is not None and firsts[place] is firsts[place - 1]:
            return place
    return 0


def mark_of_lists(name: str, args: Iterable[Any], same: int) -> tuple[Any, ...]:
    """Return the key of a call over lists of tensors: shapes, and one type per list."""
    parts: list[Any] = [name, same]
    for value in args:
        if type(value) is list or type(value) is tuple:
            parts.append(len(value))
            if value and isinstance(value[0], _Tensor):
                parts.extend([item.shape for item in value])
                parts.append(value[0].dtype)
        else:
            parts.append(type(value))
    return tuple(parts)


# Seen calls as plain values.


def _plain(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, _Tensor):
        return None if kind in _WITHOUT_SHAPE else _tensor(value.shape, value.stride(), value.dtype, value.is_cuda)
    if value is None or kind in (int, float, bool) or isinstance(value, str):
        return value
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    name = _NAMES.get(kind)
    return None if name is None else {name: _word(value)}


def _tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, cuda: bool) -> dict[str, Any]:
    values: dict[str, Any] = {"shape": list(size), "dtype": _word(dtype)}
    if not is_contiguous(size, stride):
        values["stride"] = list(stride)
    return values if cuda else {**values, "cpu": True}


def _output(output: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(output, Same):
        return argument_at(output.argument, args, kwargs)
    return _tensor(output.size, output.stride, output.dtype, True)


def _in_layouts(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Tensor):
            yield {"shape": list(value.shape), "dtype": _word(value.dtype), "layout": _word(value.layout)}
        elif isinstance(value, bool | int | float):
            yield value


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _tf32() -> tuple[bool, bool]:
    return tf32_for_products(), tf32_for_convolutions()


def _rounding(call: Mapping[str, Any], for_products: bool, for_convolutions: bool) -> dict[str, bool]:
    """Return TF32 settings other than PyTorch's defaults, for calls that they affect."""
    made = call["outputs"][0] if call["outputs"] else None
    if not isinstance(made, dict) or made["dtype"] != "float32":
        return {}
    if for_products and call["operator"].startswith(_PRODUCTS):
        return {"tf32": True}
    return {} if for_convolutions or not call["operator"].startswith(_CONVOLUTIONS) else {"tf32": False}


def outputs_of(result: Any) -> list[New | None]:
    """Return a handler's resulting tensors in the form of a plan's outputs."""
    made = result if isinstance(result, list | tuple) else [result]
    flat = [item for value in made for item in (value if isinstance(value, list | tuple) else [value])]
    return [
        New(tuple(value.shape), value.stride(), value.dtype, 0)
        for value in flat
        if isinstance(value, _Tensor) and value.layout is torch.strided
    ]
