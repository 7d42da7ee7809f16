"""What users have used of late: the parts of GPUs that their jobs hold, of which half counts after a half-life."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ullage.manager.placement import Slot, held, part_of_gpu
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, JobRecord


class FairShare:
    """Accounts in GPU-seconds. What ended is in the database, one row a user; what runs is added when it is asked for.

    Each look adds to the parts of GPUs that an attempt held so far. After a restart its mean is that since then.
    `claim` is the part of a GPU from which a job keeps others away.
    """

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
        """Count what was held since the last look."""
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
        """What counts of an attempt, at a time."""
        used, length = self._held.get(attempt.token, (0.0, 0.0))
        gpus = used / length if length else sum(self._part(attempt, slot) for slot in attempt.slots)
        return held(gpus, max(0.0, until - attempt.placed), self._half_life)

    def end(self, attempt: AttemptRecord, user: str, ended: float) -> None:
        """Charge an attempt that is over to its user's account; a part of the transaction that ends it."""
        self._store.charge(user, self._of(attempt, ended), ended, self._half_life)
        self._store.afterwards(partial(self._forget, attempt.token))

    def _forget(self, token: str) -> None:
        self._held.pop(token, None)

    def usage(self, now: float) -> dict[str, float]:
        """What counts now, by user."""
        found = {user: account.worth(now, self._half_life) for user, account in self._store.accounts.items()}
        for attempt in self._store.attempts.values():
            user = self._store.job(attempt.job).user
            found[user] = found.get(user, 0.0) + self._of(attempt, now)
        return found
