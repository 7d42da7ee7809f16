"""Refusals: what the virtual GPU cannot follow. torch.compile and torch.jit.script run the eager code."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from ullage.virtual.replacements import Replacements
from ullage.virtual.state import GPUState

_COMPILED = "torch.compile was left out: the eager code was followed, whose memory is about the same or more"
_GRAPHS = (
    "torch.compile with mode={mode!r} records CUDA graphs, whose memory no other code can use: they were left out, and "
    "the bound counts the activations once more for them"
)
WRAP_IT = (
    "compiled code reads data that is not there. Call it inside a torch.library.custom_op, and register with "
    "register_fake what that returns"
)
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Install the refusals."""
    _refuse_allocators(gpu, replacements)
    replacements.when_imported(
        "torch.utils.cpp_extension", lambda module: _refuse_extensions(gpu, replacements, module)
    )


def _compile(gpu: GPUState) -> Any:
    def compile(model: Any = None, **options: Any) -> Any:
        """`torch.compile`: returns what it is given."""
        if model is None:
            return lambda decorated: compile(decorated, **options)
        if options.get("disable"):
            return model
        mode = options.get("mode")
        if isinstance(model, torch.nn.Module):
            _note_compiled(gpu, mode)
            return model
        return _noted_when_called(gpu, model, mode)

    return compile


def _note_compiled(gpu: GPUState, mode: Any) -> None:
    gpu.note("compile", _COMPILED)
    if mode in _WITH_GRAPHS:
        gpu.note("graphs", _GRAPHS.format(mode=mode))


def _noted_when_called(gpu: GPUState, function: Any, mode: Any) -> Any:
    """A library may compile functions that nobody calls."""
    noted: list[bool] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not noted:
            noted.append(True)
            _note_compiled(gpu, mode)
        return function(*args, **options)

    return call


def _run_eagerly(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """What was compiled before the `with` statement runs eagerly inside it."""
    stance = getattr(module, "DynamoStance", None)
    if stance is not None:
        replacements.put(module, "_stance", stance(stance="force_eager"))
    choose: Any = getattr(module, "_callback_from_stance", None)
    if choose is not None:  # asked at each call of a compiled function
        noted: list[bool] = []

        def choose_and_note(callback: Any) -> Any:
            if callback and not noted:
                noted.append(True)
                gpu.note("compile", _COMPILED)
            return choose(callback)

        replacements.put(module, "_callback_from_stance", choose_and_note)


def _refuse_allocators(gpu: GPUState, replacements: Replacements) -> None:
    def new(cls: Any, *args: Any, **options: Any) -> Any:
        gpu.refuse("torch.cuda.CUDAPluggableAllocator", "run the same code without it")

    refused = type("CUDAPluggableAllocator", (), {"__new__": new, "__module__": "torch.cuda"})
    for home in (torch.cuda, torch.cuda.memory):
        replacements.put_existing(home, "CUDAPluggableAllocator", refused)


class _Extension(ModuleType):
    """In the place of an extension that is compiled when it is loaded: no function of it can be called."""

    def __init__(self, gpu: GPUState, name: str) -> None:
        super().__init__(name)
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **options: Any) -> Any:
            self._gpu.refuse(f"{self.__name__}.{name}, a compiled extension", WRAP_IT)

        return function


def _refuse_extensions(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """Extensions are not compiled: code that only loads them goes on, as on a machine with a compiler for GPUs."""
    for name in ("load", "load_inline"):
        original = getattr(module, name)

        def load(*args: Any, _original: Any = original, **options: Any) -> Any:
            given = inspect.signature(_original).bind(*args, **options).arguments
            return _Extension(gpu, given["name"])

        replacements.put(module, name, load)


def install_scripting(gpu: GPUState, replacements: Replacements) -> None:
    """Let `torch.jit.script` return the Python function or module that it is given.

    Its compiler reads the source of every function that is called, and cannot compile the replacements for PyTorch's
    functions. What was scripted before the `with` statement runs as it is.
    """

    def script(obj: Any = None, *args: Any, **options: Any) -> Any:
        """`torch.jit.script`: returns what it is given."""
        if obj is None:
            return script
        gpu.note("scripting", "torch.jit.script was left out: the Python code was followed")
        return obj

    replacements.put(torch.jit, "script", script)
