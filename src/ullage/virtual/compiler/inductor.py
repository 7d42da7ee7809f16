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

from ullage.units import MIB
from ullage.virtual.call.plan import span_of_elements
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.compiler.clock import UNKNOWN, Clock
from ullage.virtual.state import GPUState

_SETTINGS = {
    "compile_threads": 1,
    "force_disable_caches": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
}
_AUTOTUNED = "max-autotune times kernels on the GPU: what that takes is counted; PyTorch's own kernels are taken to win"
_clocks: list[Clock] = []  # that run now
_BUFFER_OF_TRITON = 256 * MIB  # triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def install(gpu: GPUState, replacements: Replacements) -> None:
    replacements.put(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided(gpu))
    for module, part in {
        "torch._inductor.config": _configure,
        "torch._inductor.codecache": _forget_programs,
        "torch._inductor.constant_folding": _fold_on_the_card,
        "torch._inductor.fx_passes.pad_mm": _pad_on_the_card,
        "torch._inductor.select_algorithm": _choose_on_the_card,
        "torch._inductor.codegen.triton": _fuse_on_the_card,
        "torch._inductor.runtime.triton_heuristics": _leave_kernels_out,
        "torch._inductor.runtime.benchmarking": _time_roughly,
    }.items():
        replacements.when_imported(module, functools.partial(part, gpu, replacements))
    replacements.when_imported("torch._inductor.utils", replacements.forget_answers)  # about a card


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


def _choose_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """`max-autotune` times the kernels that it can choose from, on matrices made for that."""
    kind = module.AlgorithmSelectorCache
    make = kind.make_benchmark_fn

    def make_benchmark_fn(*args: Any, **options: Any) -> Any:
        benchmark = make(*args, **options)

        def timed(*choices: Any, **more: Any) -> Any:
            gpu.note("autotuning", _AUTOTUNED)
            with _on_the_card(gpu):
                return benchmark(*choices, **more)

        return timed

    replacements.put(kind, "make_benchmark_fn", staticmethod(make_benchmark_fn))


def _fuse_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Whether a kernel of `max-autotune` is fused with its neighbours is timed, too."""
    kind = module.TritonScheduling

    def on_the_card(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with _on_the_card(gpu):
                return method(*args, **options)

        return call

    for name in ("benchmark_codegened_module", "benchmark_combo_kernel"):
        if name in vars(kind):
            replacements.put(kind, name, on_the_card(vars(kind)[name]))


@contextlib.contextmanager
def _on_the_card(gpu: GPUState) -> Iterator[None]:
    """A `with` inside which operators run on the virtual GPU, whatever the compiler's modes do with them outside."""
    with _python_dispatch._disable_current_modes(), gpu.mode:
        yield


class _Kernel:
    """A kernel in one of its configurations, as the result of its compilation and as what launches it: nothing."""

    n_spills = shared = 0
    store_cubin = False
    hash = cache_hash = ""

    def __init__(self, config: Any, registers: int = 0) -> None:
        self.config, self.kernel, self.n_regs = config, self, registers

    def make_launcher(self) -> _Kernel:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        """Launch it."""
        for clock in _clocks:
            clock.seconds += UNKNOWN


def _registers(loads: int) -> int:
    """How many registers a thread of a compiled kernel has, about, by how many values it loads."""
    return 16 + 8 * loads


def _leave_kernels_out(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    kind = module.CachingAutotuner
    launch = kind.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        kernel = self.inductor_meta.get("kernel_name") or "triton"
        gpu.operator = "a Triton kernel" if kernel.startswith("Placeholder") else kernel  # timed: it has no name yet
        gpu.calls.add_kernel(gpu.operator, args)
        for name, value in zip(self.fn.arg_names, args, strict=False):
            if name in self.mutated_arg_names and isinstance(value, torch.Tensor) and value.is_cuda:
                gpu.memory.written(value)
        return launch(self, *args, **options)

    def precompile_config(self: Any, config: Any, *args: Any) -> _Kernel:
        """A reduction that takes many registers is tried with smaller blocks beside, which take fewer."""
        is_smaller = bool(self.compile_results)
        return _Kernel(config, 0 if is_smaller else _registers(self.inductor_meta.get("num_load", 0)))

    def precompile(self: Any, *args: Any, **options: Any) -> None:
        self.launchers = [_Kernel(config) for config in self.configs]

    replacements.put(kind, "run", run)
    if hasattr(kind, "_make_launchers"):
        replacements.put(kind, "_precompile_config", precompile_config)
    else:  # PyTorch 2.6
        replacements.put(kind, "precompile", precompile)


def _time_roughly(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    kind = getattr(module, "InductorBenchmarker", None)  # before PyTorch 2.7, Triton's do_bench, whose buffer is larger

    def benchmark_gpu(self: Any, _callable: Any, *args: Any, **options: Any) -> Any:
        """As PyTorch's: the call by itself, then with a buffer that is as large as the cache of the card."""
        with _on_the_card(gpu):
            _callable()
            size = _BUFFER_OF_TRITON if kind is None else torch.cuda.get_device_properties().L2_cache_size
            flushed = gpu.memory.take(size)
            try:
                with Clock(gpu.spec) as clock:
                    _clocks.append(clock)
                    _callable()
            finally:
                _clocks.clear()
                gpu.memory.give_back(flushed)
        milliseconds = clock.seconds * 1e3
        return [milliseconds] if options.get("return_mode") == "all" else milliseconds

    replacements.put(kind or module.TritonBenchmarker, "benchmark_gpu", benchmark_gpu)
