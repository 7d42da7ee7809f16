"""What the virtual GPU cannot follow is refused in one sentence each; torch.compile runs the eager code."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ullage.virtual.replacements import Replacements
from ullage.virtual.state import GPUState

_COMPILED = "torch.compile was left out: the eager code was followed, whose memory is about the same or more"


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Put the refusals in place."""
    replacements.put(torch, "compile", _compile(gpu))
    replacements.when_imported("torch._dynamo.eval_frame", lambda module: _run_eagerly(gpu, replacements, module))
    _refuse_graphs(gpu, replacements)
    replacements.when_imported("triton.runtime.jit", lambda module: _refuse_triton(gpu, replacements, module))
    replacements.when_imported(
        "torch.utils.cpp_extension", lambda module: _refuse_extensions(gpu, replacements, module)
    )


def _compile(gpu: GPUState) -> Any:
    def compile(model: Any = None, **options: Any) -> Any:
        """`torch.compile`: returns what it is given."""
        if model is None:
            return lambda decorated: compile(decorated)
        gpu.note("compile", _COMPILED)
        return model

    return compile


def _run_eagerly(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """What was compiled before the `with` statement runs eagerly inside it."""
    stance = getattr(module, "DynamoStance", None)
    if stance is not None:
        replacements.put(module, "_stance", stance(stance="force_eager"))


def _refuse_graphs(gpu: GPUState, replacements: Replacements) -> None:
    advice = "run the same code without it"

    def refused(name: str) -> Any:
        def new(cls: Any, *args: Any, **options: Any) -> Any:
            gpu.refuse(f"torch.cuda.{name}", advice)

        return type(name, (), {"__new__": new, "__module__": "torch.cuda"})

    def make_graphed_callables(*args: Any, **options: Any) -> Any:
        gpu.refuse("torch.cuda.make_graphed_callables", advice)

    def graph_pool_handle() -> Any:
        gpu.refuse("torch.cuda.graph_pool_handle", advice)

    for name, value in {
        "CUDAGraph": refused("CUDAGraph"),
        "graph": refused("graph"),
        "make_graphed_callables": make_graphed_callables,
        "graph_pool_handle": graph_pool_handle,
    }.items():
        replacements.put(torch.cuda, name, value)
        replacements.put(torch.cuda.graphs, name, value)
    replacements.put(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    replacements.put(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    for name in ("MemPool", "CUDAPluggableAllocator"):
        replacements.put_existing(torch.cuda, name, refused(name))
        replacements.put_existing(torch.cuda.memory, name, refused(name))


def _refuse_triton(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    function = getattr(module, "JITFunction", None)
    if function is None:
        return

    def run(self: Any, *args: Any, **options: Any) -> Any:
        name = getattr(self, "__name__", None) or getattr(getattr(self, "fn", None), "__name__", "kernel")
        gpu.refuse(f"the Triton kernel {name}", "use the PyTorch operators that it stands for")

    replacements.put(function, "run", run)


def _refuse_extensions(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    for name in ("load", "load_inline"):

        def load(*args: Any, _name: str = name, **options: Any) -> Any:
            gpu.refuse(
                f"torch.utils.cpp_extension.{_name}",
                "use PyTorch operators: compiled code reads data that is not there",
            )

        replacements.put(module, name, load)


# `torch.jit.script`: what is scripted while a virtual GPU is in use runs as the Python code it was written as.
#
# The compiler reads the source of every function that is called, and the stand-ins for PyTorch's functions are written
# in a Python that it does not know. Functions scripted before the `with` statement run as they are.


def install_scripting(gpu: GPUState, replacements: Replacements) -> None:
    """Put the stand-in in place."""
    replacements.put(torch.jit, "script", script)


def script(obj: Any = None, *args: Any, **options: Any) -> Any:
    """`torch.jit.script`: returns what it is given."""
    return script if obj is None else obj
