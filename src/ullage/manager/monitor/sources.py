"""Chooses the source of readings on this machine, and reads virtual GPUs."""

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ullage.errors import DeviceLost, InvalidValue, NoGPUSource
from ullage.manager.monitor.dcgm import DcgmSource, dcgm_installed
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.readings import Device, GPUReading, Source

if TYPE_CHECKING:
    from ullage.virtual.shared_card.cards import Card, DeclaredActivity


class VirtualSource:
    """The virtual cards of a folder as devices, by UUID. They compute nothing: their activity is the sum of what is
    predicted of their processes, by `predicted` (pid, model of GPU) or by themselves; `None` if one is unknown."""

    name = "virtual"
    rates: Mapping[str, float] = {}  # always read all of it: the file is small
    hint = "virtual cards: nothing is computed on them, so activity is predicted, or unknown"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        self.predicted: Callable[[int, str], DeclaredActivity | None] = lambda pid, gpu: None
        self._cards: dict[str, Card] = {}
        self.devices()

    def devices(self) -> list[Device]:
        from ullage.virtual.shared_card.cards import Cards

        try:
            self._cards = {card.uuid: card for card in Cards.open(self._folder).cards}
        except InvalidValue as error:
            raise NoGPUSource(f"{error}; 'ullage serve --virtual 4xA100-40GB' makes some") from None
        return [Device(card.uuid, card.index, card.name, card.total) for card in self._cards.values()]

    def read(self, device_id: str) -> GPUReading:
        """Return the memory that living processes hold, and the sum of their activity, at most 1."""
        used = sum(self._held(device_id).values())
        card = self._cards[device_id]
        declared = card.activities()
        known = [activity or self.predicted(pid, card.name) for pid, activity in declared.items()]
        busy, smact = (
            min(1.0, sum(each[field] for each in known if each)) if None not in known else None for field in (0, 1)
        )
        return GPUReading(
            time=time.time(), memory_used=used, memory_total=card.total, gract=busy, smact=smact, utilization=busy
        )

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        return dict(self._held(device_id))

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def _held(self, device_id: str) -> dict[int, int]:
        card = self._cards.get(device_id)
        if card is None:
            raise DeviceLost(device_id, f"{self._folder} has no such virtual card")
        try:
            return card.processes()
        except InvalidValue as error:
            raise DeviceLost(device_id, str(error)) from None


def best_source(
    virtual: str | os.PathLike[str] | None = None,
    interval: float = 1.0,
    nvml: Any = None,
    dcgmi: str = "dcgmi",
    rates: Mapping[str, float] | None = None,
) -> Source:
    """Return the best source: the virtual cards of a folder if given, else NVML, with DCGM if a GPU lacks GPM and DCGM
    answers. `rates` override `RATES`. Without a driver, raise `NoGPUSource`, which says what to type."""
    if virtual is not None:
        return VirtualSource(virtual)
    try:
        source = NvmlSource(nvml, rates)
    except NoGPUSource as error:
        raise NoGPUSource(
            f"no GPU can be watched here: {error}. To watch virtual cards instead, add --cards FOLDER"
        ) from None
    if not source.devices():
        source.close()
        raise NoGPUSource("NVML answers but lists no GPU; to see the driver's GPUs, type: nvidia-smi -L")
    try:
        if source.all_active or not dcgm_installed(dcgmi):
            return source
        return DcgmSource(source, interval, dcgmi)
    except NoGPUSource:
        return source
