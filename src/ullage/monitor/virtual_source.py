"""Readings of virtual cards: memory and who holds it. Nothing is computed on them, so activity stays unknown."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ullage.errors import DeviceLost, InvalidValue, NoGPUSource
from ullage.monitor.readings import Device, Reading

if TYPE_CHECKING:
    from ullage.virtual.cards import Card


class VirtualSource:
    """The virtual cards of a folder, seen like GPUs: device ids are their UUIDs, `total` is what jobs can use.

        source = VirtualSource("/srv/ullage/cards/default")

    Power, temperature, clocks, traffic and activity are unknown.
    """

    name = "virtual"
    rates: Mapping[str, float] = {}  # a small file is read: all of it always
    hint = "virtual cards: nothing is computed on them, so only memory and processes are known"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        self._cards: dict[str, Card] = {}
        self.devices()

    def devices(self) -> list[Device]:
        """The cards that the folder has now."""
        from ullage.virtual.cards import Cards

        try:
            self._cards = {card.uuid: card for card in Cards.open(self._folder).cards}
        except InvalidValue as error:
            raise NoGPUSource(f"{error}; 'ullage serve --virtual 4xA100-40GB' makes some") from None
        return [Device(card.uuid, card.index, card.name, card.total) for card in self._cards.values()]

    def read(self, device_id: str) -> Reading:
        """Memory that living processes hold now."""
        used = sum(self._held(device_id).values())
        return Reading(time=time.time(), memory_used=used, memory_total=self._cards[device_id].total)

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """Bytes by pid."""
        return dict(self._held(device_id))

    def close(self) -> None:
        """Nothing is held open."""

    def _held(self, device_id: str) -> dict[int, int]:
        card = self._cards.get(device_id)
        if card is None:
            raise DeviceLost(device_id, f"{self._folder} has no such virtual card")
        try:
            return card.processes()
        except InvalidValue as error:
            raise DeviceLost(device_id, str(error)) from None
