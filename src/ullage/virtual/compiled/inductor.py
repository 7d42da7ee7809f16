"""Inductor on the virtual GPU: it writes the program that the real card would run; the kernels in it do nothing.

The program allocates its buffers itself, calls PyTorch's operators for what has no kernel of its own, and launches
Triton kernels for the rest. The first two are followed like anybody else's. A Triton kernel is written and never
compiled. Where several configurations of one are to be tried, the memory that trying them takes is taken.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

from ullage.virtual.kernels.plan import span_of_elements
from ullage.virtual.replacements import Replacements
from ullage.virtual.state import GPUState

_SETTINGS = {
    "compile_threads": 1,
    "force_disable_caches": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
}
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Let Inductor work as soon as somebody imports it."""
    replacements.put(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided(gpu))
    for module, part in {
        "torch._inductor.config": _configure,
        "torch._inductor.utils": _forget_answers,
        "torch._inductor.codecache": _forget_programs,
        "torch._inductor.constant_folding": _fold_on_the_card,
        "torch._inductor.fx_passes.pad_mm": _pad_on_the_card,
        "torch._inductor.runtime.triton_heuristics": _leave_kernels_out,
        "torch._inductor.runtime.benchmarking": _time_nothing,
    }.items():
        replacements.when_imported(module, functools.partial(part, gpu, replacements))


def _empty_strided(gpu: GPUState) -> Any:
    def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """What a compiled program allocates its buffers with."""
        gpu.operator = "inductor.empty_strided"
        return gpu.memory.tensor(size, stride, dtype, span_of_elements(size, stride) * dtype.itemsize)

    return empty_strided_cuda


def _configure(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """No processes that compile kernels, no artefacts of another run, and a folder of our own for what is written."""
    for name, value in _SETTINGS.items():
        if hasattr(module, name):
            replacements.on_undo(functools.partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, value)
    folder = tempfile.mkdtemp(prefix="ullage-inductor-")
    replacements.on_undo(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    for variable in _FOLDERS:
        before = os.environ.get(variable)
        os.environ[variable] = folder
        replacements.on_undo(functools.partial(_set_variable, variable, before))


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _forget_answers(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Inductor remembers what it asked about a card."""

    def forget() -> None:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()

    forget()
    replacements.on_undo(forget)


def _forget_programs(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """A program holds the function that allocates its buffers."""
    module.PyCodeCache.cache_clear()
    replacements.on_undo(module.PyCodeCache.cache_clear)


def _fold_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Constants are computed by operators while the program is compiled, where the mode is set aside."""
    fold = module.ConstantFolder.run

    def run(self: Any) -> Any:
        with _on_the_card(gpu):
            return fold(self)

    replacements.put(module.ConstantFolder, "run", run)


def _pad_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Products whose sizes are odd are timed with and without padding, on matrices made for that."""
    replacements.put(module, "no_dispatch", lambda: _on_the_card(gpu))


@contextlib.contextmanager
def _on_the_card(gpu: GPUState) -> Iterator[None]:
    """A `with` inside which operators run on the virtual GPU, whatever the compiler's modes do with them outside."""
    with _python_dispatch._disable_current_modes(), gpu.mode:
        yield


class _Launcher:
    """A kernel of one configuration, which does nothing."""

    n_regs = n_spills = shared = 0
    store_cubin = False
    cache_hash = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, *args: Any, **options: Any) -> None:
        """Launch it."""


def _leave_kernels_out(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    def precompile(self: Any, *args: Any, **options: Any) -> None:
        self.launchers = [_Launcher(config) for config in self.configs]

    replacements.put(module.CachingAutotuner, "precompile", precompile)


def _time_nothing(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    def benchmark_gpu(self: Any, _callable: Any, *args: Any, **options: Any) -> float:
        """As PyTorch's: the call by itself, then with a buffer that is as large as the cache of the card."""
        _callable()
        flushed = gpu.memory.take(torch.cuda.get_device_properties().L2_cache_size)
        _callable()
        gpu.memory.give_back(flushed)
        return 1.0

    replacements.put(module.InductorBenchmarker, "benchmark_gpu", benchmark_gpu)
