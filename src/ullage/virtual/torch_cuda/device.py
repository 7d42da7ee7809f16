"""The device of torch.cuda: its properties, NVML, the CUDA runtime, NVTX, torch.accelerator and DataParallel."""

import ctypes
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import _functions

from ullage.units import KIB, MIB
from ullage.virtual.call.native import check_device
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.distributed.rank import device_count
from ullage.virtual.state import GPUState
from ullage.virtual.torch_cuda.memory import memory_info

_ARCHITECTURES = (75, 80, 86, 90, 100, 120)  # what PyTorch's wheels for CUDA 13.0 are built for
_USUAL_SHARED_KIB = 64  # reported to scripts if unknown; kernels are chosen by `GPU.shared_memory_kib`
_DEVICE_TYPE = 1  # c10/core/DeviceType.h: CUDA


class _CudaDeviceProperties:
    """The result of `torch.cuda.get_device_properties()`; unknown figures are those of most cards."""

    def __init__(self, gpu: GPUState) -> None:
        spec = gpu.spec
        major, minor = spec.told_capability
        shared = (spec.shared_memory_per_sm_kib or _USUAL_SHARED_KIB) * KIB
        self.name = self.gcnArchName = spec.device_name
        self.major, self.minor = major, minor
        self.total_memory = gpu.memory.total
        self.multi_processor_count = spec.sms or 1
        self.warp_size = 32
        self.L2_cache_size = int((spec.l2_mib or 4) * MIB)
        self.max_threads_per_block = 1024
        self.max_threads_per_multi_processor = spec.threads_per_sm
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 48 * KIB
        self.shared_memory_per_multiprocessor = shared
        # CUDA C programming guide, "Compute Capabilities": from Ampere on the system keeps 1 KiB a block.
        self.shared_memory_per_block_optin = shared - KIB if major >= 8 else 48 * KIB if major < 7 else shared
        self.is_integrated = self.is_multi_gpu_board = 0
        self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 1_500_000, 1_500_000, 4096
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = 1, 0, 0
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, f"{spec.name}.virtual-gpu.ullage")
        if gpu.shared is not None:
            self.uuid = uuid.UUID(gpu.shared.card.uuid.removeprefix("GPU-"))

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


# Plausible figures of a busy GPU, by the names of torch.cuda: percent, degrees, milliwatts, megahertz.
SENSORS = {"utilization": 100, "memory_usage": 50, "temperature": 50, "power_draw": 300_000, "clock_rate": 1500}


def install(gpu: GPUState, replacements: Replacements) -> None:
    _forget_initialization(replacements)
    properties = _CudaDeviceProperties(gpu)
    replacements.put_all(torch._C, _device_functions(gpu))
    replacements.put_all(
        torch.cuda,
        {
            "_initialized": True,
            "_cached_device_count": device_count(),
            "_is_in_bad_fork": lambda: False,
            "_exchange_device": exchange_device,
            "_maybe_exchange_device": maybe_exchange_device,
            "_get_device_properties": lambda device=0: properties,
            "_CudaDeviceProperties": _CudaDeviceProperties,
            "_cudart": _runtime(gpu),
        },
    )
    replacements.put_all(torch.cuda, _nvml_answers(gpu))
    replacements.put(torch.cuda.nvtx, "_nvtx", _NVTX)
    if torch.version.cuda is None:
        replacements.put(torch.version, "cuda", gpu.release.cuda)


def exchange_device(device: int) -> int:
    if device < 0:
        return -1
    check_device(device)
    return 0


def maybe_exchange_device(device: int) -> int:
    """Do the same under its other name: for the compiler these are two functions."""
    return exchange_device(device)


def _device_functions(gpu: GPUState) -> dict[str, Any]:
    debug_mode = [0]
    major, minor = gpu.spec.told_capability
    architectures = sorted({*_ARCHITECTURES, 10 * major + minor})
    cuda_major, cuda_minor = map(int, gpu.release.cuda.split("."))
    cuda_version = 1000 * cuda_major + 10 * cuda_minor  # CUDA_VERSION of cuda.h
    refuse = gpu.refusing

    return {
        "_has_cuda": True,
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": device_count,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": check_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_getArchFlags": lambda: " ".join(f"sm_{number}" for number in architectures),
        "_cuda_getCompiledVersion": lambda: cuda_version,
        "_cuda_synchronize": gpu.wait,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_get_sync_debug_mode": lambda: debug_mode[0],
        "_cuda_set_sync_debug_mode": lambda mode: debug_mode.__setitem__(0, mode),
        "_cuda_getCurrentBlasHandle": refuse("a cuBLAS handle", "there is no cuBLAS behind it; use torch.matmul"),
        "_cuda_getCurrentSolverHandle": refuse("a cuSOLVER handle", "there is no cuSOLVER behind it; use torch.linalg"),
        "_cuda_jiterator_compile_and_launch_kernel": refuse("a jiterator kernel", "write it with PyTorch operators"),
    }


def _runtime(gpu: GPUState) -> SimpleNamespace:
    """Return the few functions of libcudart that PyTorch exposes."""
    success = SimpleNamespace(success=0)
    return SimpleNamespace(
        cudaError=success,
        cudaGetErrorString=lambda code: "no error" if code == 0 else "unknown error",
        cudaMemGetInfo=lambda device=0: memory_info(gpu),
        cudaHostRegister=lambda pointer, size, flags: 0,
        cudaHostUnregister=lambda pointer: 0,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaStreamCreate=lambda pointer: 0,
        cudaStreamDestroy=lambda pointer: 0,
    )


def _nvml_answers(gpu: GPUState) -> dict[str, Any]:
    """Return plausible NVML figures, which do not exist for a virtual GPU: loops that log them must not fail."""

    def plausible(name: str, value: int) -> Any:
        def answer(device: Any = None) -> int:
            gpu.note("nvml", f"torch.cuda.{name}() was called; a virtual GPU has no sensor, so it returned {value}")
            return value

        return answer

    def memory_used(device: Any = None) -> int:
        free, total = memory_info(gpu)
        return total - free

    functions: dict[str, Any] = {name: plausible(name, value) for name, value in SENSORS.items()}
    functions["device_memory_used"] = memory_used
    functions["list_gpu_processes"] = lambda device=None: (
        f"GPU:0\nprocess      this one uses {memory_used() / MIB:12.3f} MB GPU memory"
    )
    return functions


_NVTX = SimpleNamespace(
    rangePushA=lambda message: 0,
    rangePop=lambda: 0,
    rangeStartA=lambda message: 0,
    rangeEnd=lambda number: None,
    markA=lambda message: None,
    deviceRangeStart=lambda message, stream: object(),
    deviceRangeEnd=lambda handle, stream: None,
)


def _forget_initialization(replacements: Replacements) -> None:
    """Reset the initialization of torch.cuda in PyTorch's C++ part; only the virtual GPU was initialized."""
    if torch.cuda.is_initialized():
        return
    library = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    with suppress(OSError, AttributeError):
        require = ctypes.PyDLL(str(library))["_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"]
        require.argtypes, require.restype = [ctypes.c_int8, ctypes.c_bool], None
        replacements.on_undo(lambda: require(_DEVICE_TYPE, True))


# torch.accelerator: the same device under its general name.

_CUDA = torch.device("cuda")
_DTYPES = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
)


def install_accelerator(gpu: GPUState, replacements: Replacements) -> None:
    """Make "cuda" the accelerator. Streams are in `streams.py`, memory in `memory.py`."""
    functions: dict[str, Any] = {
        "_accelerator_getAccelerator": lambda: _CUDA,
        "_get_accelerator": lambda check=None: _CUDA,
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": check_device,
        "_accelerator_exchangeDevice": exchange_device,
        "_accelerator_maybeExchangeDevice": exchange_device,
        "_accelerator_synchronizeDevice": lambda device=0: gpu.wait(),
        "_accelerator_getDeviceCapability": lambda device=0: {"supported_dtypes": set(_DTYPES)},
        "_accelerator_hooks_device_count": device_count,
        "_accelerator_hooks_get_current_device": lambda: 0,
        "_accelerator_hooks_set_current_device": check_device,
        "_accelerator_hooks_exchange_device": exchange_device,
        "_accelerator_hooks_maybe_exchange_device": exchange_device,
    }
    replacements.put_all(torch._C, functions)
    # PyTorch caches this answer, so its cache must be cleared.
    remembered: Any = getattr(torch.accelerator, "get_device_capability", None)
    if hasattr(remembered, "cache_clear"):
        replacements.on_undo(remembered.cache_clear)


def install_data_parallel(gpu: GPUState, replacements: Replacements) -> None:
    """Replace the C++ helpers of `torch.nn.DataParallel`, which a CPU build lacks."""
    replacements.put_all(
        torch._C,
        {
            "_scatter": scatter,
            "_gather": lambda tensors, dim, destination=None: torch.cat(list(tensors), dim),
            "_broadcast": lambda tensor, devices: [tensor.to("cuda") for _ in devices],
            "_broadcast_coalesced": lambda tensors, devices, size=0: [list(tensors) for _ in devices],
        },
    )
    replacements.put(_functions, "_streams", None)  # PyTorch caches the copying streams: drop them after the `with`


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    """torch/csrc/cuda/comm.cpp: chunks of a tensor, each copied in its stream to its device."""
    whole: Any = tensor
    chunks = whole.split(list(chunk_sizes), dim) if chunk_sizes else whole.chunk(len(devices), dim)
    moved = []
    for place, chunk in enumerate(chunks):
        stream = streams[place] if streams else None
        with torch.cuda.stream(stream):
            moved.append(chunk.to("cuda", non_blocking=True))
    return moved
