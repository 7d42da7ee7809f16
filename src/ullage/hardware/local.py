"""The GPUs of this machine, through NVML."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ullage.hardware.catalogue import defaults, derived_usable, gpus
from ullage.hardware.specification import GPU

# Two cards of one device name (RTX 4060 Ti: 8 and 16 GB) differ by far more; ECC on or off by up to 7%.
_SAME_MEMORY = 0.10


def local_gpus(nvml: Any = None) -> list[GPU]:
    """Return this machine's GPUs, in NVML's order; `[]` without a driver. A GPU in MIG mode is listed as its instances.

    A GPU that the catalogue knows by device name and size keeps its figures, with the memory that NVML
    reports; other GPUs have `None` for what NVML does not report. `nvml` is the module `pynvml` (package
    nvidia-ml-py) or one like it. Not covered: `CUDA_VISIBLE_DEVICES`, what is in use now, and GPUs that NVML
    cannot reach, which are left out.
    """
    module = nvml or pynvml()
    if module is None:
        return []
    try:
        module.nvmlInit()
    except module.NVMLError:
        return []
    try:
        return [_described(module, handle) for handle in _handles(module)]
    finally:
        module.nvmlShutdown()


def pynvml() -> Any:
    """Return the module, or `None` if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def nvml_text(value: Any) -> str:
    """Return a name or UUID as text; older versions of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def driver_version(nvml: Any = None) -> str | None:
    """Return the driver's version; `None` if NVML does not report it."""
    module = nvml or pynvml()
    if module is None:
        return None
    try:
        module.nvmlInit()
        return nvml_text(module.nvmlSystemGetDriverVersion())
    except module.NVMLError:
        return None


def _handles(nvml: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetCount()):
        card = _query(nvml, "nvmlDeviceGetHandleByIndex", index)
        if card is not None:
            in_mig_mode, _pending = _query(nvml, "nvmlDeviceGetMigMode", card) or (0, 0)  # `None` before Ampere
            places = range(_query(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0 if in_mig_mode else 0)
            handles = [_query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, place) for place in places]
            yield from [handle for handle in handles if handle is not None] or [card]


def _described(nvml: Any, handle: Any) -> GPU:
    device_name = nvml_text(nvml.nvmlDeviceGetName(handle))
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    known = in_catalogue(device_name, memory)
    uuid = _query(nvml, "nvmlDeviceGetUUID", handle)
    uuid = None if uuid is None else nvml_text(uuid)
    if known is not None:
        reserved = known.memory - known.usable
        return replace(known, memory=memory, usable=max(memory - reserved, 0), uuid=uuid)
    capability = _query(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    capability = None if capability is None else (int(capability[0]), int(capability[1]))
    usable, reckoned = derived_usable(memory, capability)
    return GPU(
        name=device_name,
        device_name=device_name,
        memory=memory,
        usable=usable,
        usable_source=reckoned,
        source="NVML",
        compute_capability=capability,
        uuid=uuid,
        **(defaults(capability) if capability else {}),
    )


def in_catalogue(device_name: str, memory: int) -> GPU | None:
    """Return the card of the catalogue that a driver calls by this name, with about as much memory."""
    same = [card for card in gpus() if _plain(card.device_name) == _plain(device_name)]
    same = [card for card in same if abs(card.memory - memory) <= _SAME_MEMORY * card.memory]
    return min(same, key=lambda card: abs(card.memory - memory), default=None)


def _plain(device_name: str) -> str:
    # Drivers before R470 wrote "GeForce RTX 3090" and "A100-SXM4-40GB", later ones put NVIDIA in front.
    return device_name.casefold().removeprefix("nvidia ").strip()


def _query(nvml: Any, question: str, *arguments: Any) -> Any:
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None
