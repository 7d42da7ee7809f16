"""The dispatch mode: it counts operator calls on the virtual GPU and runs all others unchanged. The plan of a call is
made once and cached, so a repeated call costs microseconds."""

import importlib
import pkgutil
import re
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from ullage.hardware import GPU
from ullage.virtual import operators
from ullage.virtual.call.inference import infer
from ullage.virtual.call.native import GPUMode, view_as_type, view_without_data
from ullage.virtual.call.plan import (
    FREE,
    HANDLERS,
    MAY_BE_LARGER,
    OUTPUT,
    RULES,
    TRIAL,
    Alias,
    Call,
    New,
    Plan,
    Same,
    argument_at,
    kernel_switches,
    written_places,
)
from ullage.virtual.cudnn import convolution, cudnn_query  # noqa: F401  (the first registers its rules)
from ullage.virtual.operators import custom, layouts, views
from ullage.virtual.operators.data_dependent import cut_as_asked
from ullage.virtual.operators.foreach import is_list_operator, list_operator
from ullage.virtual.state import GPUState
from ullage.virtual.values import reads  # noqa: F401  (registers handlers)
from ullage.virtual.values.known_values import (
    ANSWERED,
    DRAWN,
    MAKE_MARKS,
    WRITE_KNOWN,
    has_no_fixed_result,
    is_unknown,
    most_computed,
)
from ullage.virtual.watching.step_calls import SeenCall, describe, layout_of_view, mark_of_lists, outputs_of, same_lists

for _module in pkgutil.iter_modules(operators.__path__):  # they register their rules and handlers
    importlib.import_module(f"{operators.__name__}.{_module.name}")

_Tensor = torch.Tensor
_mode_of, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_Generator = torch._C.Generator  # torch.Generator is another class while a virtual GPU is in use

# Operators whose output shape depends on the value of a float argument; for all others the value is left out of the
# key, so that a changing learning rate does not make a new entry at every step.
_FLOATS_MATTER = (
    "arange",
    "linspace",
    "logspace",
    "range",
    "upsample",
    "interpolate",
    "dropout",
    "attention",
    "scalar",
    "pow.Tensor_Scalar",  # its kernel depends on the value
)


# PyTorch does this itself, without an operator, if no mode is active: it keeps tensors for the backward pass.
_NO_WORK = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default", "aten.is_pinned.default")

_ALIGNED = "aten._fft_r2c.default"  # copies an input that does not begin at an even place
_VIEW = torch.ops.aten.view.default


class VirtualMode(GPUMode):
    def __init__(self, gpu: GPUState) -> None:
        super().__init__()
        self.gpu = gpu
        self._operators: dict[int, _Operator | _HigherOrderOperator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:  # a DTensor, say, calls operators on its plain tensors; a FakeTensor has none
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            keys = layouts.keys_of(args) if self.gpu.other_layouts else None  # PyTorch detaches results of handlers
            if keys is not None:
                return layouts.follow(self.gpu, func, args, kwargs or {}, keys)
            return func(*args, **(kwargs or {}))
        operator = self._operators.get(id(func))  # its own hash is computed in Python
        if operator is None:
            kind = _HigherOrderOperator if isinstance(func, HigherOrderOperator) else _Operator
            operator = self._operators[id(func)] = kind(func, self)
        if operator.makes and _mode_of(_FAKE) is not None:  # PyTorch infers shapes; its own mode comes after this one
            return func(*args, **(kwargs or {}))
        return operator(args, kwargs or {})


# Plans depend only on the call and the GPU, not on the run, so they are cached for the whole process.
_plans: dict[tuple[Any, GPU | None], dict[Any, Plan]] = {}


class _HigherOrderOperator:
    """An operator on functions; its GPU kernel is written in Python."""

    makes = False

    def __init__(self, func: Any, mode: VirtualMode) -> None:
        self._mode = mode
        kernels = (
            func.py_kernels.get(getattr(torch._C.DispatchKey, key)) for key in ("CUDA", "CompositeExplicitAutograd")
        )
        self._kernel: Any = next((kernel for kernel in kernels if kernel is not None), None)
        if self._kernel is None:
            mode.gpu.refuse(f"{func}", "it has no kernel for a GPU that is written in Python")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._mode:
            return self._kernel(*args, **kwargs)


class _Operator:
    def __init__(self, func: Any, mode: VirtualMode) -> None:
        self.func, self.mode, self.gpu = func, mode, mode.gpu
        self.name = str(func)
        self.rule = RULES.get(self.name)
        known = HANDLERS.get(self.name) or HANDLERS.get(func.namespace) or custom.handler_of(func)
        self.handler = list_operator if is_list_operator(self.name) else known
        self.composite = self.handler is None and self.rule is None and _is_composite(func)
        self.floats_matter = any(word in self.name for word in _FLOATS_MATTER)
        self.makes = not any("Tensor" in str(argument.type) for argument in func._schema.arguments)
        self.written, self.outputs = written_places(func)
        self.seen, self.marks = self.name not in _NO_WORK, func in MAKE_MARKS
        self.answered, self.writes_known = func in ANSWERED, func in WRITE_KNOWN
        spec, self.plans = mode.gpu.spec, {}
        if not self.rule or cudnn_query.in_use(spec) is None:  # else plans are this card's own
            self.plans = _plans.setdefault((func, spec if self.rule else None), {})

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gpu, handler = self.gpu, self.handler
        gpu.operator = self.name
        if gpu.other_layouts:
            keys = layouts.keys_of(args) or layouts.keys_of(kwargs.values())
            if keys is not None:
                return self._in_other_layout(args, kwargs, keys)
        if handler is not None:
            before = len(gpu.calls.stream)
            result = handler(gpu, self.func, args, kwargs)
            if result is not NotImplemented:
                if self.seen and len(gpu.calls.stream) == before:  # else it called other operators, which were recorded
                    self._handled(args, kwargs, result)
                return result
        key, on_gpu = self._key(args, kwargs)
        plan = self.plans.get(key)  # only calls on the GPU have one
        if plan is None:
            if not on_gpu:
                result = gpu.host.call(self.func, args, kwargs)
                writes_nothing = self.func.is_view or self.name.startswith("aten.empty")
                gpu.calls.add_on_host(None if writes_nothing else result)
                return result
            if self.composite:
                with self.mode:
                    return self.func.decompose(*args, **kwargs)
            if self.func is _VIEW and (cut := cut_as_asked(gpu, *args)) is not None:
                key, args = (key, cut.shape), (cut, *args[1:])
            plan = self._plan(key, args, kwargs)
        number = self._number(plan, key, args, kwargs)
        result = _run(gpu, plan, args, kwargs)
        self._follow_values(plan, args, kwargs, result)
        gpu.calls.add(number)
        return result

    def _plan(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        plan = self.plans[key] = self.plans.get(key) or self._make_plan(args, kwargs)
        plan.quick = _quick(plan, args)
        new = [output for output in plan.outputs if type(output) is New]
        small = any(output.nbytes <= most_computed(output.dtype) * output.dtype.itemsize for output in new)
        plan.small = small and (self.func in DRAWN or not has_no_fixed_result(self.func))
        return plan

    def _follow_values(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        values = self.gpu.values
        if self.written:
            written = [args[place] for place in self.written if place < len(args) and args[place] is not None]
            if self.writes_known or not values.forget_marks(written):
                values.follow_in_place(self.func, args, kwargs, written)
        elif self.outputs:
            values.follow_out(self.func, args, kwargs, self.outputs)
        else:
            if self.marks:
                values.follow_marks(self.func, args, result)
            if plan.small and (self.answered or not args or not is_unknown(args[0])):
                values.follow(self.func, args, kwargs, result)

    def _number(self, plan: Plan, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        same = 0
        if len(args) > 1:
            same = 1 if args[0] is args[1] else 2 if len(args) > 2 and args[1] is args[2] else 0
        mark = id(plan), same  # plans are never freed
        number = self.gpu.calls.numbers.get(mark)
        return self._learn(mark, args, kwargs, plan.outputs, key, same) if number is None else number

    def _handled(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record a call that a handler has carried out."""
        calls = self.gpu.calls
        same = 0
        if self.handler is list_operator:
            same = same_lists(args)
            mark: Any = mark_of_lists(self.name, args, same)
        else:
            key, on_gpu = self._key(args, kwargs)
            if not on_gpu:
                calls.add_on_host(None)
                return
            mark = self.name, key
        number = calls.numbers.get(mark)
        calls.add(self._learn(mark, args, kwargs, outputs_of(result), None, same) if number is None else number)

    def _learn(self, mark: Any, args: Any, kwargs: Any, outputs: Any, key: Any, same: int) -> int:
        seen = SeenCall.of(self.name, args, kwargs, outputs, bool(self.written or self.outputs), same)
        return self.gpu.calls.learn(mark, seen, layout_of_view(self.name, key, outputs))

    def _in_other_layout(self, args: tuple[Any, ...], kwargs: dict[str, Any], keys: Any) -> Any:
        if not layouts.is_for_gpu(args, kwargs):
            return self.gpu.host.call(self.func, args, kwargs)
        if self.composite:
            with self.mode:
                return self.func.decompose(*args, **kwargs)
        before = len(self.gpu.calls.stream)
        result = layouts.follow(self.gpu, self.func, args, kwargs, keys)
        if self.seen and len(self.gpu.calls.stream) == before:
            self.gpu.calls.add_shapes(self.name, args, result)
        return result

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        parts: list[Any] = []
        on_gpu = describe(args, parts, self.floats_matter)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                on_gpu |= describe((value,), parts, self.floats_matter)
        if self.rule is not None:
            parts.append(kernel_switches())
        if self.name == _ALIGNED:
            parts.append(args[0].storage_offset() % 2)
        return tuple(parts), on_gpu

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        def inferred() -> Plan:
            try:
                return infer(self.func, args, kwargs)
            except NotImplementedError:
                raise custom.without_fake(self.func) from None

        _check_devices(self.name, args)
        if self.rule is not None:
            return self.rule(Call(self.func, args, kwargs, self.gpu.spec, inferred))
        plan = inferred()
        if custom.is_custom(self.func):
            what = f"{self.func} is not an operator of PyTorch: only its outputs were counted"
            plan.note = "operators", what
        elif _IN_LIBRARIES.match(self.name):
            what = f"{self.func} was counted by its outputs: the workspace of its library is not known"
            plan.note = "operators", what
        return plan


# Operators of PyTorch without a rule that run in cuSOLVER, MAGMA or Thrust.
_IN_LIBRARIES = re.compile(r"aten\._?(linalg_(?!cross|vector_norm)|ormqr|mode|segment_reduce)")


def _quick(plan: Plan, args: tuple[Any, ...]) -> New | Alias | Same | None:
    """Return the output of a plan that consists of one output alone, the common case; not for an argument by name."""
    if not plan.single or plan.steps or plan.library or plan.note or plan.resized or plan.workspaces:
        return None
    output = plan.outputs[0]
    if isinstance(output, New):
        return output
    if output is None or type(output.argument) is not int:
        return None
    if isinstance(output, Same):
        return output
    plain = output.dtype is args[output.argument].dtype and not output.conjugated and not output.negated
    return output if plain else None


def _run(gpu: GPUState, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a plan; most have a single output and nothing else."""
    quick: Any = plan.quick
    if quick is None:
        return carry_out(gpu, plan, args, kwargs)
    if type(quick) is New:
        return gpu.memory.tensor(*quick)
    base = args[quick.argument]
    if type(quick) is Same:
        return base
    return view_without_data(base, quick.size, quick.stride, base.storage_offset() + quick.offset)


def carry_out(gpu: GPUState, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the allocator requests of a kernel and return its outputs."""
    memory = gpu.memory
    if plan.workspaces:
        gpu.uncertainty.add_convolutions(plan.workspaces)
    if plan.note:
        gpu.note(*plan.note)
    for place, size in plan.resized:
        views.resize_to(gpu, argument_at(place, args, kwargs), size)
    numbers: dict[int, torch.Tensor] = {}
    for place, dtype in (plan.host_outputs or {}).items():  # a kernel's seed and offset
        on_gpu = torch.cuda.is_current_stream_capturing()
        numbers[place] = memory.tensor((), (), dtype, dtype.itemsize) if on_gpu else torch.zeros((), dtype=dtype)
    if plan.steps is None:
        results = [_result(memory, output, args, kwargs) for output in plan.outputs]
    else:
        results = _carry_out_steps(gpu, plan, args, kwargs)
    if plan.library:
        gpu.libraries.need(plan.library)
    for place, value in ((plan.defaults or {}) | numbers).items():
        results[place] = value
    if plan.single:
        return results[0]
    return results if plan.as_list else tuple(results)


def _carry_out_steps(gpu: GPUState, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    memory = gpu.memory
    results: list[Any] = [None] * len(plan.outputs)
    temporaries: list[Any] = []
    try:
        for step, value in plan.steps or ():
            if step == OUTPUT:
                results[value] = _result(memory, plan.outputs[value], args, kwargs)
            elif step == FREE:
                taken, temporaries[value] = temporaries[value], None
                memory.give_back(taken)
            elif step == MAY_BE_LARGER:
                memory.requests.note_possible_size(value)
            elif step == TRIAL:
                gpu.libraries.convolve(*(plan.trials or ())[value])
            else:
                temporaries.append(memory.take(value) if value else None)
    finally:
        for taken in reversed(temporaries):
            if taken is not None:
                memory.give_back(taken)
    for place, output in enumerate(plan.outputs):
        if output is not None and not isinstance(output, New):
            results[place] = _result(memory, output, args, kwargs)
    return results


def _result(memory: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(output) is New:
        return memory.tensor(*output)
    if output is None:
        return None
    if type(output) is Same:
        return argument_at(output.argument, args, kwargs)
    base = argument_at(output.argument, args, kwargs)
    if output.dtype is base.dtype and not output.conjugated and not output.negated:
        return view_without_data(base, output.size, output.stride, base.storage_offset() + output.offset)
    begin = base.storage_offset() * base.dtype.itemsize // output.dtype.itemsize
    view = view_as_type(base, output.dtype).as_strided_(output.size, output.stride, begin + output.offset)
    if output.dtype.is_complex:
        torch._C._set_conj(view, base.is_conj() != output.conjugated)
    torch._C._set_neg(view, base.is_neg() != output.negated)
    return view


def _is_composite(func: Any) -> bool:
    """Check for operators that PyTorch decomposes before dispatch, except under `inference_mode`."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


_MAY_MIX_DEVICES = (
    "_like",
    ".new_",
    "copy",
    "device_put",
    "index",
    "where",
    "lift",
    "clamp",
    "_foreach",
    "_fused",
    "_amp",
    "attention",
    "dropout",
    "ctc",
    "rnn",
)


def _check_devices(name: str, args: tuple[Any, ...]) -> None:
    """Raise PyTorch's error for a CPU tensor with dimensions next to one on the GPU."""
    if any(word in name for word in _MAY_MIX_DEVICES):
        return
    for value in args:
        if isinstance(value, _Tensor) and not value.is_cuda and value.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{value.device}! (when checking argument in method {name})"
            )
