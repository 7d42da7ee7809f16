"""Triton: its kernels are skipped, its driver answers as the virtual GPU.

A Triton kernel writes to tensors that PyTorch has allocated before, so the memory is known without it. Everything
around the launch runs: hooks, heuristics, grids, and the autotuner, with the memory for timing a kernel. Of the driver,
only the C part, which needs libcuda, is replaced.
"""

import functools
import inspect
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState, gpus_in_use

_PASSED_OVER = "Triton kernels did not run: the memory they write to counts, their values are unknown: {names}"
_FIRST_TAKEN = (
    "Triton's autotuner took the first configuration; the 256 MiB that it takes to time kernels are counted: {names}"
)
_BY_GRAPHS = "Triton timed kernels by CUDA graphs of many launches, whose memory outside of PyTorch is not counted"
_DESCRIPTOR_BYTES = 128  # of one tensor map, which a kernel that makes descriptors writes for each of its programs
_DESCRIPTORS_SINCE = (9, 0)  # older cards have no tensor maps: descriptors become plain addresses
_REGISTERS = 64  # a thread; the number for a compiled kernel is unknown
_MILLISECONDS = 1.0  # for every kernel: an autotuner selects the first of equal ones


def install(gpu: GPUState, replacements: Replacements) -> None:
    for module, part in {
        "triton.runtime.driver": _install_driver,
        "triton.runtime.jit": _install_launch,
        "triton.runtime.autotuner": _install_autotuner,
        "triton.testing": _install_timing,
    }.items():
        replacements.when_imported(module, functools.partial(part, gpu, replacements))
    replacements.when_imported("torch.utils._triton", replacements.forget_answers)  # whether Triton can be used


class _Utilities:
    """A replacement for `CudaUtils`: Triton's queries of libcuda."""

    def __init__(self, gpu: GPUState, loads_threads: bool) -> None:
        self._gpu, self._loads_threads = gpu, loads_threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        known: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": known.shared_memory_per_block_optin,
            "max_num_regs": known.regs_per_multiprocessor,
            "multiprocessor_count": known.multi_processor_count,
            "warpSize": known.warp_size,
            "sm_clock_rate": known.clock_rate,
            "mem_clock_rate": known.memory_clock_rate,
            "mem_bus_width": known.memory_bus_width,
        }

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[int, ...]:
        """Load a kernel compiled by other means: return module, function, registers, spills, threads of a block."""
        loaded = (1, 1, _REGISTERS, 0, 1024)
        return loaded if self._loads_threads else loaded[:4]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: 0


class _Launcher:
    """A replacement for `CudaLauncher`: launches nothing."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.global_scratch_size = self.profile_scratch_size = 0

    def __call__(self, *args: Any, **options: Any) -> None:
        """Do nothing."""


def _install_driver(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    backend = module.backends.get("nvidia")
    if backend is None:
        return
    kind = backend.driver

    def __init__(self: Any) -> None:
        major, minor, *_ = map(int, sys.modules["triton"].__version__.split(".")[:2])
        self.utils = _Utilities(gpu, loads_threads=(major, minor) >= (3, 4))
        self.launcher_cls = _Launcher
        super(kind, self).__init__()

    replacements.put(kind, "__init__", __init__)
    drivers = module.driver
    before = dict(vars(drivers))

    def put_back() -> None:
        vars(drivers).clear()
        vars(drivers).update(before)

    vars(drivers).update(vars(type(drivers)()))  # the driver of another GPU is forgotten
    replacements.on_undo(put_back)


class _Kernel:
    """The result of a launch: the compiled kernel, as far as it is known without a compiler."""

    def __init__(self, launch: Any, name: str, options: dict[str, Any]) -> None:
        self._launch, self.name = launch, name
        self.n_regs, self.n_spills, self.n_max_threads = _REGISTERS, 0, 1024
        self.asm: dict[str, str] = {}
        self.function = self.module = 1
        given = {"num_warps": 4, "num_stages": 3, "num_ctas": 1} | options
        self.metadata = SimpleNamespace(name=name, shared=0, **given)

    def _init_handles(self) -> None:
        """Do nothing: there is nothing to load."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self._launch(*args, grid=grid)

    def run(self, *args: Any, **options: Any) -> None:
        """Launch a kernel by its parts."""
        self._launch(grid=args[:3])


def _install_launch(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> Any:
        for hook in getattr(self, "pre_run_hooks", ()):
            hook(*args, **options)
        names = {name: value for name, value in options.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **names)
        bound.apply_defaults()
        name = self.fn.__name__

        def launch(*values: Any, grid: Any) -> None:
            size = grid(bound.arguments) if callable(grid) else grid
            _take_scratch(gpu, self, math.prod(int(number) for number in size))
            pass_over(gpu, name, (*bound.arguments.values(), *values))

        if not warmup:
            launch(grid=grid)
        return _Kernel(launch, name, {key: value for key, value in options.items() if key not in names})

    replacements.put(module.JITFunction, "run", run)


def pass_over(gpu: GPUState, name: str, arguments: Any) -> None:
    """Skip a kernel that may have written to any of its arguments."""
    gpu.note_name("triton", _PASSED_OVER, name)
    arguments = tuple(arguments)
    gpu.calls.add_kernel(name, arguments)
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            gpu.memory.written(value)


def _take_scratch(gpu: GPUState, kernel: Any, programs: int) -> None:
    """Call `triton.set_allocator`'s function, if set, for the memory of the descriptors that a kernel makes."""
    made = kernel.src.count("make_tensor_descriptor(")
    if not made or not programs or gpu.spec.told_capability < _DESCRIPTORS_SINCE:
        return
    from triton.runtime import _allocation

    allocate = _allocation._allocator
    allocate = allocate.get() if hasattr(allocate, "get") else allocate
    if not isinstance(allocate, _allocation.NullAllocator):  # the kernel may make none in this call
        stream = torch.cuda.current_stream().cuda_stream
        allocate(made * _DESCRIPTOR_BYTES * programs, _DESCRIPTOR_BYTES, stream)


def _install_autotuner(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """Let every autotuner choose again on this GPU, and drop its choice afterwards."""
    autotuner = module.Autotuner
    run = autotuner.run
    seen: set[int] = set()

    def run_anew(self: Any, *args: Any, **options: Any) -> Any:
        if id(self) not in seen:
            seen.add(id(self))
            replacements.put(self, "cache", {})
            if len(self.configs) > 1:
                gpu.note_name("autotuner", _FIRST_TAKEN, self.base_fn.__name__)
        return run(self, *args, **options)

    def time_again(self: Any, key: Any, configs: Any, bench: Any) -> bool:
        """Neither read nor write the cache on the disk, which a first run does not have."""
        bench()
        return False

    replacements.put(autotuner, "run", run_anew)
    replacements.put_existing(autotuner, "check_disk_cache", time_again)


def _install_timing(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    """Time a function at once, with as many calls as needed to request the same memory as on a card."""

    def flushed(fn: Any, forget: Any) -> None:
        fn()
        cache = module.runtime.driver.active.get_empty_cache_for_benchmark()
        fn()  # with the gradients of the first call; from here on they are cleared before each
        forget()
        fn()
        del cache

    def captured(fn: Any, forget: Any) -> None:
        gpu.note("timing", _BY_GRAPHS)
        with torch.cuda.stream(torch.cuda.Stream()):
            fn()
            forget()
            fn()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                forget()
                fn()

    for name, times in {
        "do_bench": flushed,
        "do_bench_proton": flushed,
        "do_bench_cudagraph": captured,
        "do_bench_cudagraph_proton": captured,
    }.items():
        original = getattr(module, name, None)
        if original is not None:
            replacements.put(module, name, _timing(original, times))


def _timing(original: Any, call: Any) -> Any:
    @functools.wraps(original)
    def bench(*args: Any, **options: Any) -> Any:
        if not gpus_in_use:  # autotuners keep this function beyond the `with` statement
            return original(*args, **options)
        given = inspect.signature(original).bind(*args, **options)
        given.apply_defaults()
        cleared = given.arguments["grad_to_none"] or ()

        def forget() -> None:
            for tensor in cleared:
                tensor.grad = None

        call(given.arguments["fn"], forget)
        wanted = given.arguments["quantiles"]
        if wanted is not None:
            return [_MILLISECONDS] * len(wanted) if len(wanted) > 1 else _MILLISECONDS
        return [_MILLISECONDS] if given.arguments["return_mode"] == "all" else _MILLISECONDS

    return bench
