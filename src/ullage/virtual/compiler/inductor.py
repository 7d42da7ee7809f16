"""Inductor on the virtual GPU: it writes the same program as for the real card, but the kernels in it do nothing.

The buffers of the program and PyTorch's operators in it are counted as usual. A Triton kernel is written and never
compiled. If several configurations of one are tried, the memory of these trials is allocated.
"""

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from ullage.hardware import GPU
from ullage.performance.data_sheet import CHOICES_HOST_S, CHOICES_SHARE
from ullage.performance.work import bandwidth_of, rate_of
from ullage.units import MIB
from ullage.virtual.call.plan import span_of_elements, tf32_for_products
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

_SETTINGS = {
    "compile_threads": 1,
    "force_disable_caches": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
}
_AUTOTUNED = "max-autotune times kernels on the GPU, which Ullage counts; PyTorch's own kernels are assumed to win"
_clocks: list[Any] = []  # the running ones
_BUFFER_OF_TRITON = 256 * MIB  # triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def install(gpu: GPUState, replacements: Replacements) -> None:
    def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a buffer of a compiled program."""
        gpu.operator = "inductor.empty_strided"
        return gpu.memory.tensor(size, stride, dtype, span_of_elements(size, stride) * dtype.itemsize)

    replacements.put(torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided_cuda)
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


def _configure(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Disable compile processes and caches of other runs, and use a temporary folder for generated code."""
    for name, value in _SETTINGS.items():
        if hasattr(module, name):
            replacements.on_undo(functools.partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, value)
    folder = tempfile.mkdtemp(prefix="ullage-inductor-")
    replacements.on_undo(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    for variable in _FOLDERS:
        replacements.put_item(os.environ, variable, folder)


def _forget_programs(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Drop cached programs: a program holds the function that allocates its buffers."""
    module.PyCodeCache.cache_clear()
    replacements.on_undo(module.PyCodeCache.cache_clear)


def _fold_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Compute constants on the virtual GPU while the program is compiled and the mode is disabled."""
    replacements.put_inside(module.ConstantFolder, "run", lambda: _on_the_card(gpu))


def _pad_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Time products of odd sizes with and without padding, on temporary matrices."""
    replacements.put(module, "no_dispatch", lambda: _on_the_card(gpu))


def _choose_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Time the kernels that `max-autotune` can select, on temporary matrices."""
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
    """Time the fusion of `max-autotune` kernels with their neighbours."""
    for name in ("benchmark_codegened_module", "benchmark_combo_kernel"):
        if name in vars(module.TritonScheduling):
            replacements.put_inside(module.TritonScheduling, name, lambda: _on_the_card(gpu))


@contextlib.contextmanager
def _on_the_card(gpu: GPUState) -> Iterator[None]:
    """Return a context in which operators run on the virtual GPU, regardless of the compiler's modes."""
    with _python_dispatch._disable_current_modes(), gpu.mode:
        yield


class _Kernel:
    """A kernel in one of its configurations, as compilation result and launcher, which does nothing."""

    n_spills = shared = 0
    store_cubin = False
    hash = cache_hash = ""

    def __init__(self, config: Any, registers: int = 0) -> None:
        self.config, self.kernel, self.n_regs = config, self, registers

    def make_launcher(self) -> Self:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        for clock in _clocks:
            clock.seconds += _KERNEL_S


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
        """Prepare a configuration. A reduction that needs many registers is also tried with smaller blocks.

        The registers are approximate, by the number of values that a thread loads.
        """
        is_smaller = bool(self.compile_results)
        return _Kernel(config, 0 if is_smaller else 16 + 8 * self.inductor_meta.get("num_load", 0))

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
        """Time a call as PyTorch does: by itself, then with a buffer that is as large as the cache of the card."""
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


# Rough times of operators: Inductor times a few alternatives on the card and selects the fastest. Only large
# differences count: a product on tensor cores with odd sizes runs at about half the speed, a copy runs at the speed of
# the memory, and every launch takes time.

_ODD_SIZES = 0.55  # of the speed of a product of even sizes, if a size is not a multiple of 16 bytes
_STRIDED = 2  # times the time of a contiguous copy
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_KERNEL_S = 1.0  # seconds of a Triton kernel, so that PyTorch's own kernel is preferred


class Clock(_python_dispatch.TorchDispatchMode):
    """Adds up the GPU time of the operators inside a `with` statement."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self._gpu = gpu
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += CHOICES_HOST_S + self._time(func, args, result)
        return result

    def _time(self, func: Any, args: Any, result: Any) -> float:
        name = func._schema.name
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            return self._product(left, right)
        seconds = 0.0
        tensors = (value for value in tree_leaves((args, result)) if isinstance(value, torch.Tensor))
        for tensor in tensors:
            times = 1 if tensor.is_contiguous() else _STRIDED
            seconds += times * tensor.numel() * tensor.element_size() / bandwidth_of(self._gpu)
        return seconds

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> float:
        on_tensor_cores = left.dtype is not torch.float32 or tf32_for_products()
        rate = rate_of(self._gpu, str(left.dtype).removeprefix("torch."), on_tensor_cores)
        even = 16 // left.element_size()
        if on_tensor_cores and any(size % even for size in (*left.shape[-2:], right.shape[-1])):
            rate *= _ODD_SIZES
        return 2 * left.numel() * right.shape[-1] / (CHOICES_SHARE * rate)
