"""The energy that attempts take: the power of their GPUs over time, shared among the jobs that were there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ullage.manager.storage.records import AttemptRecord


class EnergyMeter:
    """Adds up joules by attempt, look by look.

    The energy of a GPU is divided among the jobs on it as the memory that they were promised there. An attempt that was
    not watched all the time, because its GPU's power is not measured or another daemon saw it begin, is unknown.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self._joules: dict[str, float | None] = {}  # by token

    def interrupted(self, token: str) -> None:
        """An attempt began before this daemon."""
        self._joules[token] = None

    def look(self, attempts: Iterable[AttemptRecord], watts: Callable[[str], float | None]) -> None:
        """Count what was taken since the last look; `watts` is the power of a GPU now."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        on_slot: dict[str, list[AttemptRecord]] = {}
        for attempt in attempts:
            for slot in attempt.slots:
                on_slot.setdefault(slot, []).append(attempt)
        begun: dict[str, float | None] = {
            attempt.token: 0.0 for here in on_slot.values() for attempt in here if attempt.token not in self._joules
        }
        for slot, here in on_slot.items():
            power = watts(slot)
            counted = [attempt for attempt in here if attempt.token in self._joules]
            promised = sum(attempt.memory[slot] for attempt in counted)
            for attempt in counted:
                share = attempt.memory[slot] / promised if promised else 1 / len(counted)
                before = self._joules[attempt.token]
                if power is None or before is None:
                    self._joules[attempt.token] = None
                else:
                    self._joules[attempt.token] = before + power * share * seconds
            if power is None:
                begun |= {attempt.token: None for attempt in here if attempt.token in begun}
        self._joules |= begun

    def end(self, token: str) -> float | None:
        """What an attempt took in all, now that it is over; None where that is not known."""
        return self._joules.pop(token, None)
