"""torch.compile without Triton: Inductor cannot write its kernels then, so the eager code runs, with a note."""

import functools
from types import ModuleType
from typing import Any

import torch

from ullage.errors import pip_install
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

_COMPILED = (
    f"without Triton, torch.compile ran the eager code; to follow the compiled program, type: {pip_install('triton')}"
)
_GRAPHS = (
    "torch.compile with mode={mode!r} records CUDA graphs, whose memory no other code can use: they were left out, and "
    "the bound counts the activations once more for them"
)
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


def install(gpu: GPUState, replacements: Replacements) -> None:
    replacements.put(torch, "compile", _compile(gpu))
    replacements.when_imported("torch._dynamo.eval_frame", lambda module: _run_eagerly(gpu, replacements, module))


def _compile(gpu: GPUState) -> Any:
    def compile(model: Any = None, **options: Any) -> Any:
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
    """Return a function that adds the note when called: a library may compile functions that it never calls."""
    note_once = functools.cache(_note_compiled)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        note_once(gpu, mode)
        return function(*args, **options)

    return call


def _run_eagerly(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """Run functions eagerly that were compiled before the `with` statement."""
    stance = getattr(module, "DynamoStance", None)
    if stance is not None:
        replacements.put(module, "_stance", stance(stance="force_eager"))
    choose: Any = getattr(module, "_callback_from_stance", None)
    if choose is not None:  # called at each call of a compiled function
        note_once = functools.cache(gpu.note)

        def choose_and_note(callback: Any) -> Any:
            if callback:
                note_once("compile", _COMPILED)
            return choose(callback)

        replacements.put(module, "_callback_from_stance", choose_and_note)
