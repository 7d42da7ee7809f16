"""Orders about reservations: make one, take one back, list them. Operators only change them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.reservations import booking_of, check_reservation
from ullage.manager.storage.records import Reservation
from ullage.text import plain


class Reserving:
    """The reservations of one daemon. Those who call have checked that it is an operator who asks."""

    def __init__(self, context: ManagerContext) -> None:
        self._context, self._store = context, context.store

    def listed(self) -> list[dict[str, Any]]:
        """Reservations that are not over, the first one first."""
        return [self._shown(each) for each in self._store.history.reservations(self._context.clock())]

    def make(
        self, maker: str, gpus: list[str | int], seconds: float, begin: float | None, users: list[str],
        groups: list[str], name: str,
    ) -> dict[str, Any]:  # fmt: skip
        """Reserve GPUs from a time (now) on."""
        if not gpus:
            raise InvalidValue("needed the GPUs to reserve, by index or UUID; found none")
        now = self._context.clock()
        start = now if begin is None else begin
        places = tuple(dict.fromkeys(self._context.slot_reader.named(gpu).id for gpu in gpus))
        new = Reservation(
            id=self._store.next_reservation(), name=plain(name)[:80], gpus=places, users=tuple(users),
            groups=tuple(groups), begin=start, end=start + seconds, maker=maker,
        )  # fmt: skip
        check_reservation(new, self._store.history.reservations(now), now)
        self._store.reserve(new, f"{', '.join(new.gpus)} {booking_of(new).text}")
        self._store.afterwards(self._context.service.wake)
        return self._shown(new)

    def take_back(self, maker: str, reservation: str | int) -> dict[str, Any]:
        """By its number or its name."""
        there = self._store.history.reservations(self._context.clock())
        found = [each for each in there if str(reservation) in (str(each.id), each.name)]
        if len(found) != 1:
            listed = ", ".join(f"{each.id} {each.name}".strip() for each in there[:16]) or "none"
            raise InvalidValue(f"needed a reservation; found {str(reservation)[:80]!r}. There are: {listed}")
        self._store.unreserve(found[0].id, f"{', '.join(found[0].gpus)} by {maker}")
        self._store.afterwards(self._context.service.wake)
        return self._shown(found[0])

    def _shown(self, reservation: Reservation) -> dict[str, Any]:
        indices = {device.id: device.index for device in self._context.slot_reader.devices()}
        return {**dataclasses.asdict(reservation), "indices": [indices.get(gpu) for gpu in reservation.gpus]}
