"""The slots as passes see them: all of them, and those that take jobs in the order in which they are tried."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from ullage.manager.placement.candidates import Candidate, candidate_of, candidates, expected_load
from ullage.manager.placement.ledger import Ledger
from ullage.manager.placement.outcome import Keeping
from ullage.manager.placement.policies import Policy
from ullage.manager.placement.rules import RequestMaker, Rules
from ullage.manager.placement.snapshot import Activity, Running, Slot

_RANK = attrgetter("rank")
_NOTICED = 0.02  # of SM activity
_MOST_CHANGES = 4  # times the number of slots


class Board:
    """What a pass works on. `given` are the site's rules, `rules` what the policy heeds of them. `open` are the
    candidates that take jobs, best first; `last` is the position of the slot that got the last job.

    A board can be kept from pass to pass (`deciding.place`) by one who tells of every slot that changed (`put`). It
    remembers which requests found no slot, so that those look only at what has `changed` since, and for whom slots
    were kept, so that the choice does not wander.
    """

    def __init__(
        self,
        policy: Policy,
        rules: Rules,
        slots: Sequence[Slot],
        ledger: Ledger,
        running: Iterable[Running],
        now: float,
    ) -> None:
        self.policy, self.ledger, self.given = policy, ledger, rules
        self.rules = rules if policy.predicts else replace(rules, predict=None)
        self.requests = RequestMaker(self.rules, policy.oracle, policy.alone)
        self.seen = candidates(slots, ledger, running, self.rules, now)
        self.bookings = any(slot.bookings for slot in slots)
        self.by_id = {candidate.slot.id: candidate for candidate in self.seen}
        self.last = -1 if ledger.last is None or ledger.last not in self.by_id else self.by_id[ledger.last].position
        self.open: list[Candidate] = [candidate for candidate in self.seen if candidate.obstacle is None]
        self.sort()
        self.changed: list[int] = []  # positions
        self.failed: dict[object, tuple[int, int]] = {}  # too few: after how many changes, how many
        self.offers: dict[object, list[int]] = {}
        self.losses: dict[object, float | None] = {}  # by who is there and who comes
        self.kept: dict[int, Keeping] = {}  # by job
        self.remembers = True  # what earlier passes kept

    def sort(self) -> None:
        """Rank all that are open anew."""
        for candidate in self.open:
            candidate.rank = self._rank(candidate)
        self.open.sort(key=_RANK)
        self._ranks = [candidate.rank for candidate in self.open]  # beside it, since they are quicker to search

    def _rank(self, candidate: Candidate) -> tuple[object, ...]:
        return (*self.policy.rank(candidate, self.last), candidate.position)

    def add(self, candidate: Candidate) -> None:
        """Open a slot to jobs, if nothing keeps all of them away."""
        if candidate.obstacle is None:
            candidate.rank = self._rank(candidate)
            place = bisect_left(self._ranks, candidate.rank)
            self._ranks.insert(place, candidate.rank)
            self.open.insert(place, candidate)

    def remove(self, candidate: Candidate) -> bool:
        """Close a slot; whether it was open."""
        place = self._place(candidate)
        if place is None:
            return False
        del self._ranks[place], self.open[place]
        return True

    def _place(self, candidate: Candidate) -> int | None:
        """Where it stands among those that are open; None where it does not."""
        place = bisect_left(self._ranks, candidate.rank)
        return place if place < len(self.open) and self.open[place] is candidate else None

    def slot(self, slot: str) -> Slot:
        """A slot as it was last told of."""
        candidate = self.by_id[slot]
        known, activity = candidate.slot, candidate.drifted
        return known if activity is None else known.read_again(known.used, activity)

    def put(self, slot: Slot, here: Mapping[int, Running], now: float) -> None:
        """A slot has changed: it, its promises in the ledger, or the jobs that are `here`, by number."""
        self.ledger.see_again(slot)
        before = self.by_id[slot.id]
        self.remove(before)
        after = candidate_of(slot, before.position, self.ledger, here, self.rules, now)
        self.seen[before.position] = self.by_id[slot.id] = after
        self._changed(after, after.offers_as(before))

    def _changed(self, candidate: Candidate, offers: bool) -> None:
        """Open it where it belongs now; whether it `offers` what it did before."""
        self.add(candidate)
        if not offers:
            self.offers.clear()
        self.changed.append(candidate.position)
        if len(self.changed) > _MOST_CHANGES * len(self.seen):
            self.changed.clear()
            self.failed.clear()

    def drift(self, slot: str, smact: float, age: float, now: float) -> None:
        """Nothing but time and the SM activity has changed on a slot, by a reading of that age; it is the same unless
        two percent are to be expected more or less than before."""
        candidate = self.by_id[slot]
        load = expected_load(candidate.slot, smact, age, candidate.holders, self.rules, now)
        if load is None or candidate.load is None or abs(load - candidate.load) > _NOTICED:
            self.remove(candidate)
            closed = candidate.obstacle is not None
            candidate.expect(Activity(smact=smact, age=age), load, self.rules)
            self._changed(candidate, candidate.count > 0 or closed == (candidate.obstacle is not None))

    def since(self, mark: int) -> list[Candidate]:
        """The open slots that have changed since there were so many changes, best first."""
        current = [self.seen[position] for position in dict.fromkeys(self.changed[mark:])]
        return sorted((each for each in current if self._place(each) is not None), key=_RANK)
