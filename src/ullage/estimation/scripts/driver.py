"""Answers to a script's queries of the NVIDIA driver: NVML, by the package pynvml, and `nvidia-smi`.

Scripts query them to choose a free GPU, to set a batch size, or to log memory. They get the virtual GPU's name and
memory. Other figures are plausible: the GPU is idle until the script first uses it, and busy from then on. `nvidia-smi`
is another process and always describes an idle GPU.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ullage.estimation.scripts import nvidia_smi
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.distributed.rank import device_count
from ullage.virtual.state import GPUState
from ullage.virtual.torch_cuda.device import SENSORS
from ullage.virtual.torch_cuda.memory import memory_info

DRIVER = "580.65.06"  # the first release with CUDA 13.0
_DONE, _WRONG, _NOT_SUPPORTED, _TOO_SMALL = 0, 2, 3, 7  # NVML's return codes
_USUAL_POWER = 300.0  # W, of cards that do not say it
MADE_UP = "the NVIDIA driver was read: names and memory are the virtual GPU's, other figures are invented"


def install_driver(gpu: GPUState, replacements: Replacements) -> None:
    def answer(pynvml: ModuleType) -> None:
        if hasattr(pynvml, "_LoadNvmlLibrary"):
            functions = getattr(pynvml, "_nvmlGetFunctionPointer_cache", {})  # functions of the real library
            functions.clear()
            replacements.on_undo(functions.clear)
            replacements.put(pynvml, "nvmlLib", _Library(gpu))

    for module in ("pynvml", "pynvml.nvml"):  # the package of that name has its functions in the second
        replacements.when_imported(module, answer)
    _put_on_path(gpu, replacements)


def _put_on_path(gpu: GPUState, replacements: Replacements) -> None:
    try:
        folder = tempfile.mkdtemp(prefix="ullage-")
    except OSError:  # no room for it: the script finds what this machine has
        return
    words = [sys.executable, "-I", "-S", nvidia_smi.__file__, json.dumps(_card(gpu))]
    program = Path(folder, "nvidia-smi")
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", os.defpath)

    def put_back() -> None:
        os.environ["PATH"] = os.environ.get("PATH", "").replace(folder + os.pathsep, "", 1)
        shutil.rmtree(folder, ignore_errors=True)

    replacements.on_undo(put_back)


def _card(gpu: GPUState) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(0)
    major, minor = gpu.spec.told_capability
    return {
        "count": device_count(),
        "name": gpu.spec.device_name,
        "uuid": f"GPU-{properties.uuid}",
        "driver": DRIVER,
        "cuda": torch.version.cuda,
        "capability": f"{major}.{minor}",
        "bus": f"00000000:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0",
        "total": gpu.spec.memory,
        "usable": gpu.memory.total,
        "temperature": SENSORS["temperature"],
        "power": SENSORS["power_draw"] / 1000,
        "power_limit": gpu.spec.power_w or _USUAL_POWER,
    }


class _Library:
    """Replaces pynvml's library: a function for each of NVML's, which writes its results as C would."""

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        texts = {"DeviceGetName": "name", "DeviceGetUUID": "uuid", "SystemGetDriverVersion": "driver"}
        numbers: dict[str, Callable[[], int]] = {
            "SystemGetCudaDriverVersion": _cuda_version,
            "DeviceGetCount": device_count,
            "DeviceGetIndex": lambda: 0,
            "DeviceGetMinorNumber": lambda: 0,
            "DeviceGetTemperature": lambda: SENSORS["temperature"],
            "DeviceGetClockInfo": lambda: SENSORS["clock_rate"],
            "DeviceGetPowerUsage": lambda: SENSORS["power_draw"],
            "DeviceGetPowerManagementLimit": self._power_limit,
            "DeviceGetEnforcedPowerLimit": self._power_limit,
        }
        self._functions: dict[str, Callable[..., int]] = {
            "Init": _done,
            "InitWithFlags": _done,
            "Shutdown": _done,
            "DeviceGetHandleByIndex": self._handle,
            "DeviceGetHandleByUUID": _done,
            "DeviceGetHandleByPciBusId": _done,
            "DeviceGetMemoryInfo": self._memory,
            "DeviceGetUtilizationRates": self._rates,
            "DeviceGetCudaComputeCapability": self._capability,
            "DeviceGetComputeRunningProcesses": self._processes,
            **{name: self._writing_text(key) for name, key in texts.items()},
            **{name: _writing(number) for name, number in numbers.items()},
        }

    def __getattr__(self, name: str) -> Callable[..., int]:
        if ("nvml", MADE_UP) not in self._gpu.noted:
            self._gpu.note("nvml", MADE_UP)
        return self._functions.get(re.sub(r"^nvml|_v\d$", "", name), lambda *args: _NOT_SUPPORTED)

    def _taken(self) -> int:
        if not self._gpu.memory.requests:
            return 0
        free, total = memory_info(self._gpu)
        return total - free

    def _power_limit(self) -> int:
        return int(1000 * (self._gpu.spec.power_w or _USUAL_POWER))

    def _writing_text(self, key: str) -> Callable[..., int]:
        def write(*args: Any) -> int:
            buffer = args[-2]  # the last one is its length
            buffer.value = str(_card(self._gpu)[key]).encode()
            return _DONE

        return write

    def _handle(self, index: Any, device: Any) -> int:
        return _DONE if index.value < device_count() else _WRONG

    def _memory(self, handle: Any, memory: Any) -> int:
        into, taken = memory._obj, self._taken()
        reserve = self._gpu.spec.memory - self._gpu.memory.total  # by the driver, which the first version calls used
        into.total, into.free = self._gpu.spec.memory, self._gpu.memory.total - taken
        if hasattr(into, "reserved"):
            into.reserved, into.used = reserve, taken
        else:
            into.used = reserve + taken
        return _DONE

    def _rates(self, handle: Any, rates: Any) -> int:
        busy = self._taken() > 0
        rates._obj.gpu = SENSORS["utilization"] if busy else 0
        rates._obj.memory = SENSORS["memory_usage"] if busy else 0
        return _DONE

    def _capability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._gpu.spec.told_capability
        return _DONE

    def _processes(self, handle: Any, count: Any, rows: Any) -> int:
        taken = self._taken()
        count._obj.value = 1 if taken else 0
        if taken and rows is None:
            return _TOO_SMALL
        if taken:
            rows[0].pid, rows[0].usedGpuMemory = os.getpid(), taken
        return _DONE


def _done(*args: Any) -> int:
    return _DONE


def _writing(number: Callable[[], int]) -> Callable[..., int]:
    """Return a function that writes a number to its last argument."""

    def write(*args: Any) -> int:
        args[-1]._obj.value = number()
        return _DONE

    return write


def _cuda_version() -> int:
    major, _, minor = str(torch.version.cuda).partition(".")
    return 1000 * int(major) + 10 * int(minor.partition(".")[0] or 0)
