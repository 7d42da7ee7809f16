"""One pass over the queue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter

from ullage.manager.placement.board import Board
from ullage.manager.placement.candidates import Candidate
from ullage.manager.placement.fairness import came, fair_order, in_order, suited_first, waited
from ullage.manager.placement.guests import Guests, Kept
from ullage.manager.placement.host import HostInPass
from ullage.manager.placement.keeping import Patient, patience_of
from ullage.manager.placement.ledger import Ledger
from ullage.manager.placement.outcome import Decision, JobName, Keeping, PassOutcome, PassSummary, Waiting, by_slot
from ullage.manager.placement.policies import Policy, find_policy
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import NO_SHARE, Job, Running, Slot

_GPUS, _RANK = attrgetter("gpus"), attrgetter("rank")
_ENOUGH = 64  # slots with room to compare, the best by rank: beyond them much better ones are rare
_MOST_LOSSES = 1_000_000  # that are remembered
_NOWHERE: frozenset[int] = frozenset()
# What it does on a GPU, and the share of its speed that it wants to keep.
_Manner = tuple[str | None, float | None] | None
_Kind = tuple[int, bool, bool, frozenset[int], _Manner]  # GPUs, alone, memory known, where it may not go


def decide(
    policy: str | Policy,
    waiting: Sequence[Job],
    running: Sequence[Running],
    slots: Sequence[Slot],
    ledger: Ledger,
    rules: Rules,
    now: float,
    usage: Mapping[str, float] | None = None,
    name: JobName = str,
    kept: Mapping[int, Keeping] | None = None,
) -> PassOutcome:
    """Who goes where now. Changes nothing: write each `Decision` down with `ledger.accept(decision)`.

    `usage` is what each user used of late, in GPU-seconds, for the fair order. `slots` is the newest snapshot, which
    also counts for the ledger. A running job that the ledger does not know is counted with its promise. `name` is how
    reasons call a job. `kept` is what the last pass said of slots that it kept (`PassOutcome.kept`). Without it, all
    who came to a slot since the job that waits there had waited for its patience count as its guests: fewer are let in.

    >>> from ullage.manager.placement import Activity
    >>> slot = Slot("GPU-1", 0, "A100-40GB", total=40 << 30, used=0, activity=Activity(smact=0.1))
    >>> jobs = [Job(1, "ada", 0.0, promise=30 << 30), Job(2, "ada", 1.0, promise=30 << 30)]
    >>> outcome = decide("ullage", jobs, [], [slot], Ledger(), Rules(), now=2.0)
    >>> outcome.placed[0].job, outcome.placed[0].memory
    (1, {'GPU-1': 32212254720})
    >>> outcome.waiting[0].reason
    'needs 30.0 GiB on a GPU; GPU 0 has the most free, 10.0 GiB; GPU 0 will have room when job 1 ends'
    """
    book = ledger.copy()
    book.see(slots)
    known = book.jobs()
    for each in running:
        if each.job.id not in known:
            memory = by_slot(each.slots, each.job.promise, each.job.promises)
            book.adopt(each.job.id, memory, each.job.exclusive, each.job.host)
    arrays = Counter(each.job.array for each in running)
    chosen = find_policy(policy) if isinstance(policy, str) else policy
    board = Board(chosen, rules, slots, book, running, now)
    board.kept = {job.id: kept[job.id] for job in waiting if job.id in kept} if kept else {}
    board.remembers = kept is not None
    made = _Pass(board, HostInPass.of(book, running, now), now, arrays)
    return made.outcome(*made.over(in_order(waiting, arrays, rules, now, usage), book.jobs()), name)


def place(board: Board, waiting: Sequence[Job], now: float, usage: Mapping[str, float] | None = None) -> list[Decision]:
    """A pass over slots that somebody keeps up to date: the same decisions, at the cost of what has changed.

    What is decided is written into the board's ledger. The host is not counted, nor are arrays.

    >>> from ullage.manager.placement import Activity
    >>> slot = Slot("GPU-1", 0, "A100-40GB", total=40 << 30, used=0, activity=Activity(smact=0.1))
    >>> board = Board(find_policy("ullage"), Rules(), [slot], Ledger([slot]), [], now=0.0)
    >>> place(board, [Job(1, "ada", 0.0, promise=30 << 30)], now=2.0)[0].slots, board.ledger.free("GPU-1") >> 30
    (('GPU-1',), 10)
    """
    made = _Pass(board, HostInPass(None, NO_SHARE, [], now), now, Counter())
    placed = made.over(fair_order(waiting, board.rules, now, usage), set())[0]
    made.end()
    for decision in placed:
        board.ledger.accept(decision)
    return placed


class _Pass:
    """The state of one pass. Places only get fuller in it, so what failed once fails again."""

    def __init__(self, board: Board, host: HostInPass, now: float, arrays: Counter[int | None]) -> None:
        self.board, self.host, self.now = board, host, now
        self.policy, self.rules, self.seen, self.open = board.policy, board.rules, board.seen, board.open
        self.backfills = self.policy.backfills if self.rules.backfill is None else self.rules.backfill
        self.short_only: list[Candidate] = []  # kept for a job, but until a known time: open to jobs that end before it
        self.lent_free, self.lent_until = -1, -math.inf  # the most that a job can find there, and for how long
        self.guests = Guests(self.rules)
        self.requests = board.requests
        self.booked = [candidate for candidate in self.seen if candidate.slot.bookings] if board.bookings else []
        self.failed: dict[_Kind, int] = {}  # the smallest request of this kind that found no slot beside those kept
        self.impossible: dict[_Kind, int] = {}  # the smallest that no waiting would help
        self.reservations = self.rules.reservations
        self.patient: list[Patient] = []  # those who will have slots kept for them, once somebody passes them too late
        self.kept: list[Candidate] = []
        self.kept_at: frozenset[int] = _NOWHERE
        self.arrays = arrays  # how many jobs of each array run now
        self.refused: set[int] = set()  # those that a policy of one's own lets wait

    def over(self, queue: Sequence[Job], holders: set[int]) -> tuple[list[Decision], list[Job], list[int | None]]:
        """Give each job its turn, until no further one can be placed; none that still holds a promise.

        Who goes where, who is left, and for each of those whom it waits for, if it is for one job.
        """
        placed: list[Decision] = []
        left: list[Job] = []
        behind: int | None = None
        without_gpus = 0 in map(_GPUS, queue)  # these may start where no GPU takes a job any more
        own = self.policy.choose is not None
        if self.backfills and self.rules.predict is not None and self.rules.pairing and self.open and not own:
            queue = self._paired(queue)
        turns = iter(queue)
        for job in turns:
            if self.patient:
                self._heed_patience(job)
            throttled = job.throttle is not None and self.arrays[job.array] >= job.throttle
            if throttled or self._hopeless(job) or job.id in holders:
                left.append(job)
                continue
            request = self.requests.of(job)
            decision = self.place(job, request)
            if decision is not None:
                placed.append(decision)
                holders.add(job.id)
                self.arrays[job.array] += 1
                continue
            left.append(job)
            if not self.backfills and not job.recovery and self._could_ever(job, request):
                behind = job.id
                break
            if self._may_reserve(job) and job.id not in self.refused and self._could_ever(job, request):
                patience = patience_of(request, self.seen, self.rules, self.backfills, self.now)
                self.patient.append(Patient(job, request, patience))
            if not self.open and not self.short_only and self.guests.room < 0 and not without_gpus:
                break
        waits_for = [job.id if job.id in holders else None for job in left]
        rest = list(turns)
        return placed, left + rest, waits_for + [behind] * len(rest)

    def _paired(self, queue: Sequence[Job]) -> Sequence[Job]:
        costs: dict[object, float] = {}
        patience: dict[SlotRequest, float] = {}

        def patience_with(job: Job) -> float:
            request = self.requests.of(job)
            if request not in patience:
                patience[request] = patience_of(request, self.seen, self.rules, self.backfills, self.now)
            return patience[request]

        return suited_first(queue, self.rules, self.now, lambda job: self._cost(job, costs), patience_with)

    def _cost(self, job: Job, known: dict[object, float]) -> float:
        """What is lost of all speeds on a slot if the job is placed now; infinite where it cannot be. `known` are those
        of jobs that ask for the same."""
        request = self.requests.of(job)
        kind = self._kind(job, request)
        key = (kind, request.promise)
        if key not in known:
            known[key] = math.inf if request.gpus else 0.0
            if request.gpus and request.promise < self.failed.get(kind, math.inf):
                suited = self._suited_of_open(job, request, kind)[: request.gpus]
                if len(suited) == request.gpus:
                    known[key] = max([self._loss(job, candidate) or 0.0 for candidate in suited])
        return known[key]

    def _kind(self, job: Job, request: SlotRequest) -> _Kind:
        return request.gpus, request.alone, request.known, self._closed(job), self._manner(job, request.alone)

    def outcome(
        self, placed: Sequence[Decision], left: Sequence[Job], waits_for: Sequence[int | None], name: JobName
    ) -> PassOutcome:
        """What to tell those who wait, and who goes."""
        summaries = tuple([candidate.summary(self.rules) for candidate in self.seen])
        at_the_end = PassSummary(
            self.requests, summaries, self.arrays, self.host.summary(), self.now, frozenset(self.refused), name
        )
        fields = zip([job.id for job in left], left, repeat(at_the_end), waits_for, strict=False)
        # What Waiting(*each) does, without a call into Python for each of thousands.
        return PassOutcome(tuple(placed), tuple(map(tuple.__new__, repeat(Waiting), fields)), self.board.kept)

    def end(self) -> None:
        """Open the slots again that were kept: the next pass decides anew."""
        for candidate in self.kept:
            candidate.kept, candidate.kept_until = None, math.inf
            self.board.add(candidate)

    def place(self, job: Job, request: SlotRequest) -> Decision | None:
        """Put the job on the best places that suit it, on as many as it asks for, or nowhere."""
        if not self.host.fits(job):
            return None
        if request.gpus == 0:
            self.host.take(job)
            return Decision(job.id, (), 0, False, job.host)
        kind = self._kind(job, request)
        suited: list[Candidate] = []
        if request.promises:
            suited = self._suited(job, self._smallest(request), self.open)
        elif request.promise < self.failed.get(kind, math.inf):
            suited = self._suited_of_open(job, request, kind)
        chosen = self._chosen(job, request, suited) if len(suited) >= request.gpus else []
        if not chosen and self.short_only and job.id not in self.refused:
            suited = self._suited_with_lent(job, self._smallest(request))
            chosen = self._chosen(job, request, suited) if suited else []
        if not chosen and self.guests.may_take(request.gpus, request.alone, request.promise, kind):
            chosen = self._suited(job, request, self.guests.slots_for(job, request))[:1]
            if not chosen:
                self.guests.refuse(request.promise, kind)
        if not chosen:
            return None
        promise = min(candidate.free for candidate in chosen) if request.alone else request.promise
        slots = tuple(candidate.slot.id for candidate in chosen)
        decision = Decision(job.id, slots, promise, request.alone, job.host, request.promises)
        for candidate, memory in zip(chosen, decision.memory.values(), strict=True):
            self._take(candidate, job, memory, request.alone)
        self.board.kept.pop(job.id, None)
        self.host.take(job)
        if any(candidate.kept is not None for candidate in chosen):
            self.guests.count()
        return decision

    def _chosen(self, job: Job, request: SlotRequest, suited: Sequence[Candidate]) -> Sequence[Candidate]:
        """As many of the places as the job asks for; none where a policy of one's own lets it wait."""
        if self.policy.choose is not None:
            suited = self.policy.choose(job, request, suited, self.board.given, self.now)
            if len(suited) < request.gpus:
                self.refused.add(job.id)
                return ()
        return self._assigned(request, suited)

    def _smallest(self, request: SlotRequest) -> SlotRequest:
        """What the smallest rank asks for; a policy of one's own is offered slots that hold any of them."""
        return request if self.policy.choose is not None else request._replace(promise=request.least)

    def _assigned(self, request: SlotRequest, suited: Sequence[Candidate]) -> Sequence[Candidate]:
        """A place for each rank, in the order of the ranks; none where one finds no place."""
        first = suited[: request.gpus]
        if not request.promises or all(each.fits(request.of_rank(rank), self.rules) for rank, each in enumerate(first)):
            return first
        left, places = list(suited), dict[int, Candidate]()
        for rank in request.largest_first:
            found = next((each for each in left if each.fits(request.of_rank(rank), self.rules)), None)
            if found is None:
                return ()
            places[rank] = found
            left.remove(found)
        return [places[rank] for rank in range(request.gpus)]

    def _suited_of_open(self, job: Job, request: SlotRequest, kind: _Kind) -> list[Candidate]:
        """The open places that suit the job. If the same request found too few before, with the same slots kept, it is
        only worth looking at all if what has changed since could make up for it."""
        board, key = self.board, (kind, request.promise, self.kept_at)
        mark, most = board.failed.get(key, (-1, 0))
        suited: list[Candidate] = []
        if mark >= 0 and len(board.changed) - mark < len(self.open):
            suited = self._suited(job, request, board.since(mark)) if mark < len(board.changed) else []
            most += len(suited)
            if most < request.gpus:
                board.failed[key] = (len(board.changed), most)
                self.failed[kind] = request.promise
                return []
        if request.gpus > 1 or not suited:
            suited = self._suited(job, request, self.open)
        if len(suited) < request.gpus:
            board.failed[key] = (len(board.changed), len(suited))
            self.failed[kind] = request.promise
        return suited

    def _heed_patience(self, job: Job) -> None:
        """Before a job has its turn, keep slots for those who let it pass no more, and for all who come before them."""
        passed = [number for number, each in enumerate(self.patient, 1) if each.is_passed(job, self.now)]
        for each in self.patient[: max(passed, default=0)]:
            self.reserve(each.job, each.request)
        del self.patient[: max(passed, default=0)]

    def reserve(self, job: Job, request: SlotRequest) -> None:
        """Keep places for a job that has waited too long: none but guests join there, so they come free as jobs end.

        Those are kept that are ready soonest by time limits, then those with the least missing. For this job a slot
        that is kept only gets freer, so the choice cannot wander for ever. Where the time is known, jobs that end
        before it may still go there. Of the host as much as the job asks for is kept in the same way.
        """
        found = self._kept_before(job) or self._to_keep(job, request)
        if found is None:
            self.reservations = 0  # those before it hold the places; later jobs must not overtake it by reserving
            return
        kept, until = found
        since = self.board.kept[job.id].since
        self.host.keep(job, until)
        for candidate in kept:
            candidate.kept, candidate.kept_until = job.id, until
            self.kept.append(candidate)
            if self.board.remove(candidate) and until < math.inf:
                self.short_only.append(candidate)
                self.lent_free, self.lent_until = max(self.lent_free, candidate.free), max(self.lent_until, until)
            if self.policy.choose is None:
                self.guests.keep(Kept(candidate, job, request, since[candidate.slot.id]))
        self.kept_at |= {candidate.position for candidate in kept}
        self.reservations -= 1

    def _kept_before(self, job: Job) -> tuple[list[Candidate], float] | None:
        """What an earlier pass over this board kept for the job, unless that was too long ago."""
        found, slots = self.board.kept.get(job.id), self.board.by_id
        if found is None or self.now - found.chosen >= self.rules.patience or not found.since.keys() <= slots.keys():
            return None
        kept = [slots[name] for name in found.since]
        if any(each.kept is not None or each.slot.lost or each.slot.drained for each in kept):
            return None
        return kept, max(found.until, self.now)

    def _to_keep(self, job: Job, request: SlotRequest) -> tuple[list[Candidate], float] | None:
        """The places to keep for a job, and when they are all ready at the latest; None where there are too few."""
        able = [
            candidate
            for candidate in self.seen
            if candidate.kept is None and candidate.offer(request, self.rules) >= request.least
            if not candidate.slot.booked(job, self.now)
        ]
        if len(able) < request.gpus:
            return None
        before = self.board.kept[job.id].since if job.id in self.board.kept else {}
        begin = self.now if self.board.remembers else came(job) + self.rules.patience
        times = {each.slot.id: each.ready_at(request, self._loss(job, each) is not None, self.now) for each in able}
        held = {
            candidate.slot.id: candidate.capacity - candidate.free
            if request.alone
            else -candidate.free
            - Kept(candidate, job, request, before.get(candidate.slot.id, begin)).given_back(self.rules)
            for candidate in able
        }
        able.sort(
            key=lambda candidate: (
                times[candidate.slot.id],
                held[candidate.slot.id],
                candidate.count,
                candidate.position,
            )
        )
        kept = list[Candidate]()
        for rank in request.largest_first:
            least = request.of_rank(rank).promise
            found = next((each for each in able if each.offer(request, self.rules) >= least), None)
            if found is None:
                return None
            able.remove(found)
            kept.append(found)
        until = max([self.host.ready_at(job), *(times[candidate.slot.id] for candidate in kept)])
        since = {candidate.slot.id: before.get(candidate.slot.id, begin) for candidate in kept}
        self.board.kept[job.id] = Keeping(self.now, since, until)
        return kept, until

    def _hopeless(self, job: Job) -> bool:
        """A quick no, for the long tail of a queue: one that asked for less has found nothing, and nothing is lent."""
        if not self.host.fits(job):
            return self._need_not_be_asked(job)
        if job.gpus == 0:
            return False
        promise = job.true if self.policy.oracle else job.promise
        known, alone = promise is not None, self.policy.alone or job.exclusive
        if promise is None:
            alone = alone or self.rules.unknown == "exclusive"
            promise = 0 if alone else self.rules.free_floor or 0
        if job.promises and not alone:
            return False  # that one asked for less on each slot says nothing about ranks that differ
        kind = (job.gpus, alone, known, self._closed(job), self._manner(job, alone))
        if promise < self.failed.get(kind, math.inf):
            return False
        limit = job.time_limit
        if limit is not None and promise <= self.lent_free and self.now + limit <= self.lent_until:
            return False
        if self.guests.may_take(job.gpus, alone, promise, kind):
            return False
        if promise >= self.impossible.get(kind, math.inf):
            return True
        return self._need_not_be_asked(job)

    def _need_not_be_asked(self, job: Job) -> bool:
        """Whether a job that finds no place has nothing else to do in this pass: nobody waits behind it."""
        return (self.backfills or job.recovery) and not self._may_reserve(job)

    def _closed(self, job: Job) -> frozenset[int]:
        """The positions of slots that are booked for others while the job might run."""
        if not self.booked:
            return _NOWHERE
        return frozenset([each.position for each in self.booked if each.slot.booked(job, self.now)])

    def _may_reserve(self, job: Job) -> bool:
        return self.reservations > len(self.patient) and waited(job, self.now) >= self.rules.patience

    def _suited(self, job: Job, request: SlotRequest, pool: Sequence[Candidate]) -> list[Candidate]:
        """Places of the pool that suit the job, best first; no more than needed where no better ones can follow."""
        suited: list[Candidate] = []
        lost: dict[int, float] = {}  # by position
        lossless = looked = 0
        for candidate in pool:
            if (
                not candidate.fits(request, self.rules)
                or candidate.slot.bookings
                and candidate.slot.booked(job, self.now)
            ):
                continue
            loss = 0.0 if self.rules.predict is None else self._loss(job, candidate)
            if loss is not None:
                suited.append(candidate)
                lost[candidate.position] = loss
                lossless += loss <= 0
            looked += 1
            enough = lossless == request.gpus or looked >= _ENOUGH and len(suited) >= request.gpus
            if enough and self.policy.choose is None and not request.promises:
                break
        suited.sort(key=lambda candidate: lost[candidate.position])
        return suited

    def _loss(self, job: Job, candidate: Candidate) -> float | None:
        """How much more of their speeds is lost there in all with the job than without it, in steps of a percent; None
        where somebody would lose more than his owner accepts, where too little would be gained, or where that is not
        known and the slot is too busy."""
        if candidate.count == 0 or self.rules.predict is None:
            return 0.0
        key, known = (candidate.met(), job.work, job.min_speed), self.board.losses
        if key not in known:
            if len(known) > _MOST_LOSSES:
                known.clear()
            known[key] = self._foretell(job, candidate)
        return known[key]

    def _foretell(self, job: Job, candidate: Candidate) -> float | None:
        foretell, here, slot = self.rules.side_by_side, candidate.jobs, candidate.slot
        if len(here) > 1 and any(foretell([each, job], slot).slowed for each in here):
            return None  # another one makes nobody faster; and pairs are foretold once, groups again and again
        found = self.rules.joining(here, job, slot)
        if found.slowed is not None or not found.pays or candidate.too_busy is not None and not found.foretold:
            return None
        return round(found.lost, 2)

    def _manner(self, job: Job, alone: bool) -> _Manner:
        """What matters of a job beside others; nothing where it will have none, or where nothing is predicted."""
        return None if alone or self.rules.predict is None else (job.work, job.min_speed)

    def _take(self, candidate: Candidate, job: Job, promise: int, alone: bool) -> None:
        if candidate.kept is None:
            self.board.remove(candidate)
        candidate.take(job, promise, alone, self.rules, self.now)
        self.board.last = candidate.position
        if candidate.kept is None:
            self.board.add(candidate)
        else:
            self.short_only = [lent for lent in self.short_only if lent is not candidate or lent.obstacle is None]
            self.lent_free = max((lent.free for lent in self.short_only), default=-1)
        if self.policy.cyclic:
            self.board.sort()

    def _suited_with_lent(self, job: Job, request: SlotRequest) -> list[Candidate]:
        """Enough places for the job, kept ones among them that it may use because it ends before they are needed."""
        if job.time_limit is None:
            return []
        end = self.now + job.time_limit
        lent = [
            candidate
            for candidate in self.short_only
            if end <= candidate.kept_until and candidate.fits(request, self.rules)
        ]
        if not lent:
            return []
        suited = self._suited(job, request, sorted(lent if request.gpus == 1 else self.open + lent, key=_RANK))
        return suited if len(suited) >= request.gpus else []

    def _could_ever(self, job: Job, request: SlotRequest) -> bool:
        """Whether waiting for our own jobs helps; a job that nothing here can hold must not hold up the others."""
        if not self.host.could_ever(job):
            return False
        if request.gpus == 0:
            return True
        closed = self._closed(job)
        offers = self.board.offers.get((request.margin, request.alone, closed))
        if offers is None:
            there = [candidate for candidate in self.seen if candidate.position not in closed]
            offers = sorted((candidate.offer(request, self.rules) for candidate in there), reverse=True)
            self.board.offers[request.margin, request.alone, closed] = offers
        if request.promises:
            return request.fits_in(offers)
        if len(offers) >= request.gpus and offers[request.gpus - 1] >= request.promise:
            return True
        kind = (request.gpus, request.alone, request.known, closed, self._manner(job, request.alone))
        self.impossible[kind] = min(request.promise, self.impossible.get(kind, request.promise))
        return False
