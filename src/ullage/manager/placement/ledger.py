"""The promise ledger: the only place where memory is promised.

On each slot, the taken memory is the sum of:

    the memory of foreign processes
    + for each job the larger of its promise and its highest use
    + used memory that no process accounts for

so promised bytes that a job has not used yet are not free. A promise covers all slots of a job or none. Of cores and
host memory, which are not measured, only the promises count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ullage.errors import Overbooked
from ullage.manager.placement.snapshot import NO_SHARE, Decision, HostShare, Slot
from ullage.units import format_bytes


@dataclass(slots=True)
class _Held:
    """A job on a slot: its promise, its use (None: not measured yet), and its highest use. `before` is the others' use
    when it came."""

    promise: int
    exclusive: bool
    before: int = 0
    used: int | None = None
    most: int = 0

    @property
    def counted(self) -> int:
        # The highest use, not the latest: a job is likely to reach it again.
        return max(self.promise, self.most)


class Ledger:
    """The account of all promises."""

    def __init__(self, slots: Iterable[Slot] = (), host: HostShare | None = None) -> None:
        self.host = host
        """The host share of all jobs together; None: it is not counted."""
        self._on_host: dict[int, HostShare] = {}
        self._slots: dict[str, Slot] = {}
        self._held: dict[str, dict[int, _Held]] = {}
        self._where: dict[int, set[str]] = {}  # by job
        self.last: str | None = None
        """The slot of the last promise, after which round-robin continues."""
        self.see(slots)

    def copy(self) -> "Ledger":
        other = Ledger(host=self.host)
        other._on_host = dict(self._on_host)
        other._slots = dict(self._slots)
        other._held = {
            slot: {job: replace(held) for job, held in holders.items()} for slot, holders in self._held.items()
        }
        other._where = {job: set(slots) for job, slots in self._where.items()}
        other.last = self.last
        return other

    def see(self, slots: Iterable[Slot]) -> None:
        """Update measured totals, foreign memory and used memory. Promises stay."""
        for slot in slots:
            self.update_slot(slot)

    def update_slot(self, slot: Slot) -> None:
        """Update one slot."""
        self._slots[slot.id] = slot

    def promise(self, job: int, memory: Mapping[str, int], exclusive: bool = False, host: HostShare = NO_SHARE) -> None:
        """Promise a job memory on slots and a share of the host; raise `Overbooked` if any part does not fit."""
        before = {slot: self._check(job, slot, promise, exclusive) for slot, promise in memory.items()}
        self._check_host(job, host)
        self.adopt(job, memory, exclusive, host)
        for slot in memory:
            self._held[slot][job].before = before[slot]

    def accept(self, decision: Decision) -> None:
        """Make the promise of a decision."""
        self.promise(decision.job, decision.memory, decision.exclusive, decision.host)

    def adopt(self, job: int, memory: Mapping[str, int], exclusive: bool = False, host: HostShare = NO_SHARE) -> None:
        """Record a job that already runs, even without room for it (after a restart)."""
        if host != NO_SHARE or not memory:
            self._on_host[job] = host
        for slot, promise in memory.items():
            self._held.setdefault(slot, {})[job] = _Held(promise, exclusive)
            self._where.setdefault(job, set()).add(slot)
            self.last = slot

    def revise(self, job: int, memory: Mapping[str, int], exclusive: bool) -> None:
        """Replace a job's promise on its slots, even without room for it; its measured use stays."""
        for slot, promise in memory.items():
            held = self._held[slot][job]
            held.promise, held.exclusive = promise, exclusive

    def release(self, job: int) -> bool:
        """Release all promises of a job; return whether it held any."""
        on_host = self._on_host.pop(job, None) is not None
        places = self._where.pop(job, ())
        for slot in places:
            del self._held[slot][job]
        return bool(places) or on_host

    def observe(self, job: int, slot: str, used: int | None) -> None:
        """Record a job's use of a slot (None: unknown). Unknown jobs are ignored."""
        held = self._held.get(slot, {}).get(job)
        if held is not None:
            held.used, held.most = used, max(held.most, used or 0)

    def seen(self, job: int, slot: str) -> bool:
        """Whether the job's use of the slot is known."""
        held = self._held.get(slot, {}).get(job)
        return held is not None and held.used is not None

    def slots(self, job: int) -> dict[str, int]:
        """Return a job's promises by slot."""
        return {slot: self._held[slot][job].promise for slot in self._held if slot in self._where.get(job, ())}

    def jobs(self) -> set[int]:
        """Return all jobs that hold a promise."""
        return set(self._where).union(self._on_host)

    def holders(self, slot: str) -> tuple[int, ...]:
        return tuple(self._held.get(slot, ()))

    def exclusive(self, slot: str) -> int | None:
        for job, held in self._held.get(slot, {}).items():
            if held.exclusive:
                return job
        return None

    def promised(self, slot: str) -> int:
        """Return the sum of the promises on a slot."""
        return sum(held.promise for held in self._held.get(slot, {}).values())

    def counted(self, slot: str) -> dict[int, int]:
        """Return the larger of promise and highest use for each job on a slot."""
        return {job: held.counted for job, held in self._held.get(slot, {}).items()}

    def others(self, slot: str) -> int:
        """Return the used memory on the slot that belongs to none of our jobs. A job without a measured use may account
        for memory up to its promise, but not for memory that was used before it came."""
        known = self._slots.get(slot)
        if known is None:
            return 0
        if known.used is None:
            return known.foreign
        held = self._held.get(slot)
        if not held:
            return max(known.foreign, known.used)
        left, unseen, before = known.used, 0, 0
        for each in held.values():
            if each.used is None:
                unseen += each.promise
                before = max(before, each.before)
            else:
                left -= each.used
        return max(known.foreign, left - unseen, min(before, left))

    def standing(self, slot: str) -> tuple[dict[int, int], int, bool]:
        """Return `counted` and `others` of a slot, and whether it has an exclusive job."""
        held = self._held.get(slot)
        if not held:
            return {}, self.others(slot), False
        exclusive, counted = False, {}
        for job, each in held.items():
            exclusive = exclusive or each.exclusive
            counted[job] = each.promise if each.promise > each.most else each.most
        return counted, self.others(slot), exclusive

    def committed(self, slot: str) -> int:
        """Return the bytes that count as taken on a slot, which may exceed its total."""
        return self.others(slot) + sum(self.counted(slot).values())

    def free(self, slot: str) -> int:
        """Return the bytes that can still be promised on a slot; 0 if it is unknown."""
        known = self._slots.get(slot)
        return 0 if known is None else max(known.total - self.committed(slot), 0)

    def on_host(self) -> dict[int, HostShare]:
        """Return the host share of each job that holds one or has no GPU."""
        return dict(self._on_host)

    def free_on_host(self) -> HostShare | None:
        """Return the free share of the host, never below zero; None if it is not counted."""
        if self.host is None:
            return None
        held = sum_shares(self._on_host.values())
        return HostShare(max(self.host.cores - held.cores, 0), max(self.host.memory - held.memory, 0))

    def _check_host(self, job: int, share: HostShare) -> None:
        if job in self._on_host:
            raise Overbooked(f"job {job} already holds a share of the host; release it first")
        if share is NO_SHARE:
            return
        if min(share) < 0:
            raise Overbooked(f"job {job} cannot be promised {tuple(share)} of the host")
        free = self.free_on_host()
        if free is not None and not free.holds(share):
            raise Overbooked(f"job {job} needs {share.text}; {free.text or 'nothing'} are left")

    def _check(self, job: int, slot: str, promise: int, exclusive: bool) -> int:
        """Refuse an impossible promise; return the bytes that others use on the slot."""
        known = self._slots.get(slot)
        if known is None or known.lost or known.drained:
            state = "not there" if known is None else "lost" if known.lost else "drained"
            raise Overbooked(f"job {job} cannot be promised memory on {slot}: it is {state}")
        counted, others, taken = self.standing(slot)
        if job in counted:
            raise Overbooked(f"job {job} already holds a promise on {slot}; release it first")
        if promise < 0:
            raise Overbooked(f"job {job} cannot be promised {promise} bytes on {slot}")
        if taken:
            raise Overbooked(f"job {job} cannot join on {slot}: job {self.exclusive(slot)} has it to itself")
        if counted and (exclusive or known.mig):
            what = "a MIG instance takes one job" if known.mig else "it asks to be alone"
            raise Overbooked(f"job {job} cannot join job {next(iter(counted))} on {slot}: {what}")
        free = max(known.total - others - sum(counted.values()), 0)
        if promise > free:
            left = f"{format_bytes(free)} of {format_bytes(known.total)} are left"
            raise Overbooked(f"job {job} needs {format_bytes(promise)} on {slot}; {left}")
        return others


def sum_shares(shares: Iterable[HostShare]) -> HostShare:
    """Return the sum of host shares.

    >>> sum_shares([HostShare(1, 5), HostShare(2, 0)])
    HostShare(cores=3, memory=5)
    """
    parts = list(shares)
    return HostShare(sum(share.cores for share in parts), sum(share.memory for share in parts))
