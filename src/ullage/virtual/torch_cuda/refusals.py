"""Code that the virtual GPU refuses. Code that `torch.jit` would compile runs as Python."""

import dis
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

WRAP_IT = (
    "compiled code reads data that is not there. Call it inside a torch.library.custom_op, and register with "
    "register_fake what that returns"
)
# Steps of optimizers in the form of Apex, which DeepSpeed has, too (multi_tensor_apply.cuh): functions of a size, a
# flag and lists of tensors, which write them in place and request no memory.
_IN_PLACE = {f"multi_tensor_{what}" for what in ("adam", "adagrad", "sgd", "scale", "axpby")}


def install(gpu: GPUState, replacements: Replacements) -> None:
    members = {
        "__new__": gpu.refusing("torch.cuda.CUDAPluggableAllocator", "run the same code without it"),
        "__module__": "torch.cuda",
    }
    refused = type("CUDAPluggableAllocator", (), members)
    for home in (torch.cuda, torch.cuda.memory):
        replacements.put_existing(home, "CUDAPluggableAllocator", refused)
    replacements.when_imported(
        "torch.utils.cpp_extension", lambda module: _refuse_extensions(gpu, replacements, module)
    )


class _Extension(ModuleType):
    """A replacement for an extension that is compiled when it is loaded, and for its operators. A function that gets
    tensors, and whose result is not used, writes to some of them: it is skipped. Others are refused, except known
    ones."""

    def __init__(self, gpu: GPUState, name: str) -> None:
        super().__init__(name)
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **options: Any) -> Any:
            what = f"{self.__name__}.{name}, a compiled extension"
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            if name in _IN_PLACE and len(args) > 2 and isinstance(args[2], list | tuple):
                tensors = [tensor for tensors in args[2] for tensor in tensors]
            elif len(tensors) > 1 and _ignores_result(sys._getframe(1)):
                self._gpu.note("operators", f"{what}, was skipped: it is assumed to write only to its arguments")
            else:
                self._gpu.refuse(what, WRAP_IT)
            for tensor in tensors:
                self._gpu.memory.written(tensor)

        return function


def _ignores_result(frame: FrameType) -> bool:
    after = [step.opname for step in dis.get_instructions(frame.f_code) if step.offset > frame.f_lasti]
    return after[:1] == ["POP_TOP"]


def _refuse_extensions(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """Skip the compilation of extensions: code that only loads them continues, as on a machine with a compiler for
    GPUs."""
    for name in ("load", "load_inline"):
        original = getattr(module, name)

        def load(*args: Any, _original: Any = original, **options: Any) -> Any:
            given = inspect.signature(_original).bind(*args, **options).arguments
            extension = _Extension(gpu, given["name"])
            if not given.get("is_python_module", True):  # its operators are in torch.ops
                replacements.put(torch.ops, given["name"], extension)
            return extension

        replacements.put(module, name, load)


_SCRIPTING = "torch.jit.script was skipped: the Python code ran instead"
_left_out: dict[str, int] = {}  # by Python module: functions that were not compiled when it was imported


def install_scripting(gpu: GPUState, replacements: Replacements) -> None:
    """Let `torch.jit.script` and `torch.jit.trace` return their argument: the compiler cannot compile the replacements
    of PyTorch's functions, and the tracer records values. Code compiled before the `with` statement runs unchanged."""
    original = torch.jit.script

    def script(obj: Any = None, *args: Any, **options: Any) -> Any:
        """Do `torch.jit.script`: return the object unchanged, except PyTorch's formulas, which its C++ part runs."""
        if obj is None:
            return script
        if getattr(obj, "__module__", "").startswith("torch._decomp"):
            return original(obj, *args, **options)
        gpu.note("scripting", _SCRIPTING)
        home = getattr(obj, "__module__", "")
        if getattr(getattr(sys.modules.get(home), "__spec__", None), "_initializing", False):
            _left_out[home] = _left_out.get(home, 0) + 1
        return _as_compiled(obj)

    def trace(func: Any, example_inputs: Any = None, *args: Any, **options: Any) -> Any:
        """Do `torch.jit.trace`: call the function once, as tracing does, and return it unchanged."""
        gpu.note("scripting", "torch.jit.trace was skipped: the Python code ran instead")
        inputs = () if example_inputs is None else example_inputs
        named = options.get("example_kwarg_inputs") or {}
        is_traced = getattr(func, "save", None) is _save_nothing
        if is_traced and not isinstance(inputs, torch.Tensor) and not inputs and not named:
            return func
        func(*([inputs] if isinstance(inputs, torch.Tensor) else inputs), **named)
        return _as_compiled(func)

    def for_compiled(original: Any, answer: Callable[[Any], Any]) -> Any:
        def function(module: Any, *args: Any, **options: Any) -> Any:
            really = isinstance(module, _ScriptModule | torch.jit.ScriptFunction)
            return original(module, *args, **options) if really else answer(module)

        return function

    _note_left_out_before(gpu, replacements)
    replacements.put_all(torch.jit, {"script": script, "trace": trace, "script_method": _same})
    replacements.put(torch.jit, "ScriptModule", _PlainModule)
    for name, answer in {"save": lambda _: None, "freeze": _same, "optimize_for_inference": _same}.items():
        replacements.put(torch.jit, name, for_compiled(getattr(torch.jit, name), answer))
    for module in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
        replacements.when_imported(module, lambda writer: _pass_over_graphs(replacements, writer))


def _note_left_out_before(gpu: GPUState, replacements: Replacements) -> None:
    """Note functions of a module that an earlier run did not compile, when a model of the module is called."""
    left_out = dict(_left_out)

    def enter(module: Any, args: Any) -> None:
        for _ in range(left_out.pop(type(module).__module__, 0)):
            gpu.note("scripting", _SCRIPTING)

    if left_out:
        replacements.on_undo(module_hooks.register_module_forward_pre_hook(enter).remove)


def _same(module: Any) -> Any:
    return module


_ScriptModule = torch.jit.ScriptModule


class _KindOfPlainModule(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls is _PlainModule and isinstance(instance, _ScriptModule))


class _PlainModule(torch.nn.Module, metaclass=_KindOfPlainModule):
    """A replacement for `torch.jit.ScriptModule`: its subclasses run as Python code."""


def _as_compiled(obj: Any) -> Any:
    if not hasattr(obj, "save"):
        with suppress(AttributeError, TypeError):  # a builtin function has no room for it
            object.__setattr__(obj, "save", _save_nothing)
    return obj


def _save_nothing(*args: Any, **options: Any) -> None:
    """Do nothing; this replaces the method `save` of compiled functions and modules."""


def _pass_over_graphs(replacements: Replacements, writer: ModuleType) -> None:
    """Call the model instead of tracing it for TensorBoard's picture; nothing is drawn."""

    def add_graph(self: Any, model: Any, input_to_model: Any = None, *args: Any, **options: Any) -> None:
        training = model.training
        model.eval()
        try:
            torch.jit.trace(model, input_to_model)
        finally:
            model.train(training)

    replacements.put(writer.SummaryWriter, "add_graph", add_graph)
