"""The resources that attempts use: parts of GPUs, charged to users; energy; and memory over time."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ullage.manager.placement import Slot, held, part_of_gpu
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, JobRecord


class FairShare:
    """Accounts of users in GPU-seconds: finished attempts in the database, running ones added on demand. `claim` is the
    part of a GPU that a job keeps from others. After a restart, means start again."""

    def __init__(
        self,
        store: JobStore,
        half_life: float,
        clock: Callable[[], float] = time.monotonic,
        claim: Callable[[JobRecord], float] = lambda job: 0.0,
    ) -> None:
        self._store, self._half_life, self._clock, self._claim = store, half_life, clock, claim
        self._last = clock()
        self._held: dict[str, tuple[float, float]] = {}  # by token: GPU-seconds, and seconds
        self._totals: dict[str, int] = {}

    def look(self, attempts: Iterable[AttemptRecord], slots: Sequence[Slot]) -> None:
        """Count the use since the last call."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        attempts = list(attempts)
        self._totals = {slot.id: slot.total for slot in slots}
        jobs_on = Counter(slot for attempt in attempts for slot in attempt.slots)
        busy = {slot.id: (slot.activity.smact or 0.0) / max(1, jobs_on[slot.id]) for slot in slots}
        for attempt in attempts:
            claim = self._claim(self._store.job(attempt.job))
            gpus = sum(self._part(attempt, slot, max(claim, busy.get(slot, 0.0))) for slot in attempt.slots)
            before, length = self._held.get(attempt.token, (0.0, 0.0))
            self._held[attempt.token] = (before + gpus * seconds, length + seconds)

    def _part(self, attempt: AttemptRecord, slot: str, busy: float = 0.0) -> float:
        promise = None if attempt.promise is None else attempt.memory[slot]
        return part_of_gpu(promise, self._totals.get(slot, 0), attempt.exclusive, busy)

    def _of(self, attempt: AttemptRecord, until: float) -> float:
        used, length = self._held.get(attempt.token, (0.0, 0.0))
        gpus = used / length if length else sum(self._part(attempt, slot) for slot in attempt.slots)
        return held(gpus, max(0.0, until - attempt.placed), self._half_life)

    def end(self, attempt: AttemptRecord, user: str, ended: float) -> None:
        """Charge a finished attempt to its user, in the transaction that ends it."""
        self._store.charge(user, self._of(attempt, ended), ended, self._half_life)
        self._store.afterwards(partial(self._forget, attempt.token))

    def _forget(self, token: str) -> None:
        self._held.pop(token, None)

    def usage(self, now: float) -> dict[str, float]:
        usage = {user: account.worth(now, self._half_life) for user, account in self._store.accounts.items()}
        for attempt in self._store.attempts.values():
            user = self._store.job(attempt.job).user
            usage[user] = usage.get(user, 0.0) + self._of(attempt, now)
        return usage


class EnergyMeter:
    """Adds up joules by attempt. A GPU's energy is divided by promised memory. If power was not measured all the time,
    the energy is unknown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self._joules: dict[str, float | None] = {}  # by token

    def interrupted(self, token: str) -> None:
        """Mark the energy of an attempt as unknown, since it began before this daemon."""
        self._joules[token] = None

    def look(self, attempts: Iterable[AttemptRecord], watts: Callable[[str], float | None]) -> None:
        """Count the energy since the last call; `watts` returns the power of a GPU."""
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
        return self._joules.pop(token, None)


MOST = 256  # most values per attempt
_GAP = 10.0  # seconds without a reading that do not count as a gap: use was the same or a little less


@dataclass
class MemoryCurve:
    """The most bytes that an attempt held on one GPU, in equal steps from its start; `None` if not measured.

    The length of a step doubles whenever there are too many steps.

    >>> curve = MemoryCurve()
    >>> for second in range(600):
    ...     curve.see(float(second), second)
    >>> curve.step, len(curve.values), curve.values[:3], curve.values[-1]
    (4.0, 150, [3, 7, 11], 599)
    """

    step: float = 1.0
    values: list[int | None] = field(default_factory=list)
    stored: float = 0.0  # seconds of the curve that are on disk

    @property
    def seconds(self) -> float:
        return self.step * len(self.values)

    def see(self, seconds: float, used: int) -> None:
        """Add the memory held at a time after the start."""
        while seconds >= self.step * MOST:
            self.values = [_larger(self.values[place : place + 2]) for place in range(0, len(self.values), 2)]
            self.step *= 2
        place = int(max(0.0, seconds) // self.step)
        missing = place + 1 - len(self.values)
        between = used if self.values and missing * self.step <= _GAP else None
        self.values += [between] * missing
        self.values[place] = _larger([self.values[place], used])


def _larger(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
