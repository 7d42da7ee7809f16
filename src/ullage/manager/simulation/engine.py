"""The virtual clock: jobs arrive, are placed, allocate memory, work, slow each other down, and end.

`placement` makes every decision, as in the daemon; only the jobs, the GPUs and the monitor are simulated.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from ullage.errors import InvalidValue
from ullage.manager.placement import (
    Activity,
    Decision,
    Failure,
    Job,
    Ledger,
    Running,
    Slot,
    UsageAccounts,
    after_failure,
    fair_order,
    part_of_gpu,
)
from ullage.manager.placement.gpus import Gpu, HostLeft, gpu_of
from ullage.manager.placement.plan import Situation, best_plan
from ullage.manager.placement.policies import Policy
from ullage.manager.policy_files import load_policy
from ullage.manager.simulation.card import SimulatedCard, SimulatedRun, cards_of
from ullage.manager.simulation.interference import Interference
from ullage.manager.simulation.known import promise_of
from ullage.manager.simulation.result import (
    DONE,
    FAILED,
    FINISHED,
    GPU_LOST,
    MOST_SERIES,
    OUT_OF_MEMORY,
    TIME_LIMIT,
    WAITING,
    SimulatedAttempt,
    SimulatedJob,
    SimulationResult,
)
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.trace import WORKING, JobKind, JobTrace, Phase, TraceJob
from ullage.sandbox.gc_control import gc_disabled

Progress = Callable[[int, int], None]
"""Called from time to time with the number of finished jobs and the number of all jobs."""

_MEASURED_ERRORS = {"mps": 0.4, "time-slicing": 0.2}
_WAYS = ("mps", "time-slicing", "mig", "off")
_TOLD_EVERY = 1000  # finished jobs
_ACTIVITY = attrgetter("activity")
_LOOKS = 18  # readings per window of a GPU whose jobs have changed
_MOST_OFTEN = 2.0  # least seconds between two readings


def simulate(
    trace: JobTrace, scenario: Scenario, progress: Progress | None = None, policy: Policy | None = None
) -> SimulationResult:
    """Simulate a trace in a scenario, under the scenario's policy unless you give another.

    >>> from ullage.manager.simulation.trace import JobKind
    >>> from ullage.units import GIB
    >>> jobs = [TraceJob(number, 0.0, JobKind("toy", memory=30 * GIB), work_s=60.0) for number in (1, 2)]
    >>> scenario = Scenario(gpus="A100-40GB", estimator="oracle").but(startup_s=10.0, monitor_delay_s=0.0)
    >>> found = simulate(JobTrace("toy", jobs), scenario)
    >>> [(job.state, job.attempts[0].begin, job.attempts[0].end) for job in found.jobs]
    [('done', 0.0, 70.0), ('done', 70.0, 140.0)]
    """
    with gc_disabled():  # a run leaves no reference cycles, and collecting takes a tenth of its time
        return _Engine(trace, scenario, progress, policy or load_policy(scenario.policy)).run()


class _Waiting:
    """The state of a job between its attempts."""

    __slots__ = ("attempts", "exclusive", "lost", "memory_failures", "promise", "queued", "state")

    def __init__(self, promise: int | None, exclusive: bool) -> None:
        self.promise, self.exclusive = promise, exclusive
        self.queued: float | None = None
        self.memory_failures = self.lost = 0
        self.attempts: list[SimulatedAttempt] = []
        self.state = WAITING


class _Engine:
    def __init__(self, trace: JobTrace, scenario: Scenario, progress: Progress | None, policy: Policy) -> None:
        self.trace, self.scenario, self.world, self.progress = trace, scenario, scenario.world, progress
        way = scenario.sharing.partition(":")[0]
        if way not in _WAYS:
            raise InvalidValue(f"the way of sharing must be one of {', '.join(_WAYS)}, got {scenario.sharing!r}")
        self.policy = policy
        self.cards = cards_of(scenario.gpus, scenario.sharing, self.world.node_gpus, MOST_SERIES)
        self.by_id = {card.id: card for card in self.cards}
        self.kinds = trace.kinds
        how = way if way == "time-slicing" else "mps"
        error, on = self.world.interference_error, self.world.interference
        error = _MEASURED_ERRORS[how] if error is None else error
        self.phases = [self._phases_of(kind) for kind in self.kinds]
        own = {id(phase): phase for phases in self.phases for phase in phases if phase.alone}
        self.interference = Interference([*self.kinds, *own.values()], how, error, scenario.seed, on)
        self.numbers = self.interference.numbers
        self.largest = max(card.spec.usable for card in self.cards)
        self.promises = [promise_of(kind, scenario.estimator) for kind in self.kinds]
        self.busy = self._busy_alone({card.whole.name for card in self.cards})
        rules = replace(scenario.rules, predict=self.interference.predict if scenario.foresight else None)
        if way == "off":
            rules = replace(rules, max_jobs_per_gpu=1)
        self.rules = rules
        slots = [card.slot() for card in self.cards]
        self.ledger = Ledger(slots)
        self.gpus: list[Gpu] = [gpu_of(slot, slot.index, self.ledger, {}, rules, 0.0) for slot in slots]
        self.last = -1  # the GPU that got the last job
        self.accounts = UsageAccounts(scenario.half_life_s) if rules.fair else None
        self.horizon = rules.window + self.world.monitor_delay_s + (self.world.reading_s or 0.0)  # of readings
        usual = 1.0 if len(self.cards) <= MOST_SERIES else 30.0
        self.reads_every = usual if self.world.reading_s is None else self.world.reading_s
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = itertools.count()
        self.states: dict[int, _Waiting] = {}
        self.queue: dict[int, Job] = {}
        self.trace_jobs: dict[int, TraceJob] = {}
        self.runs: dict[int, SimulatedRun] = {}
        self.hot: set[int] = set()  # cards on which readings still change
        self.wanted: float | None = None  # the time of the next pass
        self.last_pass = -math.inf
        self.returning = 0  # jobs that come back into the queue after a pause
        self.passes = self.over = 0
        self.draw = random.Random(f"nodes {scenario.seed}")

    # Kinds of jobs.

    def _phases_of(self, kind: JobKind) -> Sequence[Phase]:
        """Return a kind's phases; without start-up times, only those from the allocation of memory on."""
        usual = self.world.startup_s
        if not kind.phases:
            return Phase("starting", usual), WORKING
        return kind.phases if usual else tuple(itertools.dropwhile(lambda phase: not phase.holds_memory, kind.phases))

    def _busy_alone(self, names: set[str]) -> list[float | None]:
        """Return the highest SM activity of each kind on any of these GPUs; None if unknown."""
        names = names if self.scenario.foresight else set()
        known = [[kind.alone[name].smact for name in names if name in kind.alone] for kind in self.kinds]
        return [max(shares, default=None) for shares in known]

    # The clock.

    def run(self) -> SimulationResult:
        """Run from the first arrival until no event is left."""
        jobs = self.trace.jobs
        if any(later.arrival < sooner.arrival for sooner, later in itertools.pairwise(jobs)):
            jobs = sorted(jobs, key=lambda job: job.arrival)
        self.now = jobs[0].arrival if jobs else 0.0
        for card in self.cards:
            card.at = self.now
            card.changed(self.now, self.horizon)
        if self.world.node_mtbf_s is not None:
            for node in sorted({card.node for card in self.cards}):
                self._at(self.now + self.draw.expovariate(1 / self.world.node_mtbf_s), self._lose, node)
        coming = 0
        while coming < len(jobs) or self.runs or self.queue or self.wanted is not None or self.returning:
            moment = jobs[coming].arrival if coming < len(jobs) else math.inf
            moment = min(moment, self.events[0][0] if self.events else math.inf)
            if self.wanted is not None and self.wanted < moment:
                self.now, self.wanted = self.wanted, None
                self._pass()
                continue
            if moment == math.inf or (coming == len(jobs) and not self.runs and not self.returning and self._stuck()):
                break
            self.now = moment
            while coming < len(jobs) and jobs[coming].arrival == moment:
                self._arrive(jobs[coming])
                coming += 1
            while self.events and self.events[0][0] == moment:
                _, _, what, values = heapq.heappop(self.events)
                what(*values)
        return self._result(jobs)

    def _at(self, moment: float, what: Callable[..., None], *values: object) -> None:
        heapq.heappush(self.events, (moment, next(self.order), what, values))

    def _stuck(self) -> bool:
        """Whether the queue can never move: no pass is due, and no GPU can come back."""
        return self.wanted is None and not any(card.lost for card in self.cards)

    def _want_pass(self, moment: float) -> None:
        moment = max(moment, self.last_pass + self.scenario.pause_s, self.now)
        self.wanted = moment if self.wanted is None else min(self.wanted, moment)

    # Jobs.

    def _arrive(self, job: TraceJob) -> None:
        number = self.numbers[id(job.kind)]
        promise = self.promises[number]
        self.states[job.id] = state = _Waiting(promise, exclusive=False)
        state.queued = None if job.submitted is None else job.arrival
        self.trace_jobs[job.id] = job
        self._enqueue(job, recovery=False)

    def _enqueue(self, job: TraceJob, recovery: bool) -> None:
        number, state = self.numbers[id(job.kind)], self.states[job.id]
        busy = self.busy[number]
        exclusive = state.exclusive or (state.promise or 0) > self.largest  # larger than any GPU: exclusive
        promise = state.promise if state.promise is None else min(state.promise, self.largest)
        self.queue[job.id] = Job(
            job.id,
            job.user,
            job.arrival if job.submitted is None else job.submitted,
            job.gpus,
            promise,
            job.kind.memory,
            exclusive,
            job.priority,
            recovery,
            busy,
            work=None if busy is None else str(number),
            min_speed=0.0 if busy is None else self.scenario.min_speed,
            time_limit=job.time_limit,
            queued=state.queued,
            part=part_of_gpu(promise, self.largest, exclusive, busy or 0.0),
        )
        self._want_pass(self.now)

    def _back(self, job: TraceJob) -> None:
        self.returning -= 1
        self.states[job.id].queued = self.now
        self._enqueue(job, recovery=True)

    # A pass over the queue.

    def _pass(self) -> None:
        self.last_pass = self.now
        self._read_cards()
        if self.queue:
            self.passes += 1
            waiting, most = list(self.queue.values()), self.scenario.at_a_time
            alone = len(waiting) == 1  # fair shares do not matter
            users = {job.user for job in waiting}
            usage = None if self.accounts is None or alone else self.accounts.usage(self.now, users)
            if most is not None:
                waiting = fair_order(waiting, self.rules, self.now, usage)[:most]
            queue = fair_order(waiting, self.rules, self.now, usage)
            situation = Situation(queue, self.gpus, HostLeft(), frozenset(), {}, self.last, self.rules, self.now)
            for decision in best_plan(situation, self.policy).placed:
                self.ledger.accept(decision)
                self._start(decision.job, decision.slots, decision.promise, decision.exclusive)
                if not self.scenario.bookkeeping:
                    self._forget(decision)
                if most is not None and self.queue:
                    self._want_pass(self.now)
        if self.queue and self.hot:
            pause = _MOST_OFTEN if self.policy.predicts else self.rules.window / _LOOKS
            self._want_pass(self.now + max(self.reads_every, pause))

    def _start(self, number: int, slots: Sequence[str], promise: int, exclusive: bool) -> None:
        job, trace_job = self.queue.pop(number), self.trace_jobs[number]
        cards = [self.by_id[slot] for slot in slots]
        running = Running(job, tuple(slots), self.now)
        phases = self.phases[self.numbers[id(trace_job.kind)]]
        pace = self._pace(trace_job, cards[0])
        run = SimulatedRun(trace_job, phases, cards, promise, exclusive, self.now, running, pace, self.now)
        self.runs[number] = run
        for card in cards:
            card.count(self.now)
            card.runs[number], card.running[number] = run, running
            card.changed(self.now, self.horizon)
            self._heat(card)
            self._look_at(card)
        self.last = cards[-1].index
        if self.accounts is not None:
            self.accounts.hold(job.user, job.part * job.gpus, self.now)
        self._enter_phase(run)
        if trace_job.time_limit is not None:
            self._at(self.now + trace_job.time_limit, self._finish, run, TIME_LIMIT, FAILED)

    def _forget(self, decision: Decision) -> None:
        """Forget a promise: until a reading shows the job's memory, placement only knows that the job is there."""
        self.ledger.release(decision.job)
        self.ledger.adopt(decision.job, dict.fromkeys(decision.slots, 0), exclusive=self.policy.alone)
        for name in decision.slots:
            self._look_at(self.by_id[name])

    def _enter_phase(self, run: SimulatedRun) -> None:
        phase = run.phases[run.phase]
        takes_memory = phase.holds_memory and run.started is None
        if takes_memory and not self._take_memory(run):
            return
        run.left = run.trace_job.work_s if phase.seconds is None else phase.seconds
        run.at = self.now
        before, number = run.activity, self.numbers[id(phase if phase.alone else run.trace_job.kind)]
        run.activity = number if phase.uses_gpu else None
        if run.activity != before:
            for card in run.cards:
                card.count(self.now)
                card.speeds.pop(run.trace_job.id, None)
                if before is not None:
                    card.active.remove(run)
                if run.activity is not None:
                    card.active.append(run)
        if run.activity != before or takes_memory:
            self._settle(run.cards)
        if run.activity in (None, before):  # `_settle` has not set its speed
            self._hasten(run)

    def _leave_phase(self, run: SimulatedRun, turn: int) -> None:
        """End a phase, if the job still runs and its speed has not changed since `turn`."""
        if turn != run.turn or self.runs.get(run.trace_job.id) is not run:
            return
        run.phase += 1
        if run.phase < len(run.phases):
            self._enter_phase(run)
        else:
            self._finish(run, FINISHED, DONE)

    def _take_memory(self, run: SimulatedRun) -> bool:
        need = run.trace_job.kind.memory
        room = min(card.spec.usable - self.world.fragmentation - card.used for card in run.cards)
        if all(not card.started for card in run.cards):
            room += self.world.fragmentation  # no fragmentation by other jobs
        if need > room:
            self._end(run, OUT_OF_MEMORY)
            self._recover(run, "memory", run.promise or None, max(room, 0))
            return False
        run.started = self.now
        for card in run.cards:
            card.count(self.now)
            card.used += need
            card.started.append(run)
        return True

    def _finish(self, run: SimulatedRun, cause: str, state: str) -> None:
        """End a job, if it still runs."""
        if self.runs.get(run.trace_job.id) is run:
            self._end(run, cause)
            self._leave(run.trace_job.id, state)

    def _leave(self, job: int, state: str) -> None:
        self.states[job].state = state
        self.over += 1
        if self.progress is not None and self.over % _TOLD_EVERY == 0:
            self.progress(self.over, len(self.trace.jobs))

    def _end(self, run: SimulatedRun, cause: str) -> None:
        """End an attempt, and free its memory and promise."""
        number = run.trace_job.id
        del self.runs[number]
        self.ledger.release(number)
        for card in run.cards:
            card.count(self.now)
            del card.runs[number], card.running[number]
            card.speeds.pop(number, None)
            if run.started is not None:
                card.used -= run.trace_job.kind.memory
                card.started.remove(run)
            if run.activity is not None:
                card.active.remove(run)
        self._settle(run.cards)
        for card in run.cards:
            self._read(card)
        gpus = tuple(card.index for card in run.cards)
        self.states[number].attempts.append(SimulatedAttempt(run.placed, self.now, gpus, run.promise, cause))
        if self.accounts is not None:
            self.accounts.hold(run.job.user, -run.job.part * run.job.gpus, self.now)
        if self.queue:
            self._want_pass(self.now)

    def _recover(self, run: SimulatedRun, kind: str, promise: int | None, used: int | None = None) -> None:
        state, memory = self.states[run.trace_job.id], kind == "memory"
        before = state.memory_failures if memory else state.lost
        failure = Failure("memory" if memory else "system", before, promise, used, None, state.exclusive, run.exclusive)
        retry = after_failure(failure, self.largest, self.scenario.recovery)
        state.memory_failures += memory
        state.lost += not memory
        if not retry.again:
            self._leave(run.trace_job.id, FAILED)
            return
        state.promise, state.exclusive = retry.promise, retry.exclusive
        self.returning += 1
        self._at(self.now + self.world.retry_s, self._back, run.trace_job)

    # GPUs.

    def _settle(self, cards: Sequence[SimulatedCard]) -> None:
        """Update speeds after a change of the jobs on these cards, and all cards of these jobs. Call `count` before."""
        hastened: dict[int, SimulatedRun] = {}
        for card in cards:
            active = sorted(card.active, key=_ACTIVITY)
            numbers = tuple(map(_ACTIVITY, active))
            if card.mig:
                speeds = [self.interference.on_instance(number, card.spec, card.whole) for number in numbers]
            else:
                speeds = self.interference.true(card.spec.name, numbers)
            for run, speed in zip(active, speeds, strict=True):
                number = run.trace_job.id
                card.speeds[number] = speed
                hastened.pop(number, None)
                hastened[number] = run
        shown = {card.index: card for card in cards}
        for run in hastened.values():
            self._hasten(run)
            for card in run.cards:
                shown[card.index] = card
        for card in shown.values():
            card.count(self.now)
            self._show(card)

    def _show(self, card: SimulatedCard) -> None:
        """Update the activity and power of a card from the speeds of its jobs."""
        smact, power, name = 0.0, card.waiting_w if card.started else card.resting_w, card.spec.name
        for run in card.active:
            alone = self.interference.alone(_ACTIVITY(run), name)
            smact += alone.smact * run.speed / card.part
            power += max(0.0, alone.power_w - card.base_w) * run.speed
        limit = card.spec.power_w
        card.smact, card.power_w = min(1.0, smact), min(power, limit) if limit else power
        card.changed(self.now, self.horizon)
        self._heat(card)

    def _hasten(self, run: SimulatedRun) -> None:
        """Continue a job at the speed on the slowest of its cards, or at full speed in phases without the GPU."""
        run.left -= (self.now - run.at) * run.speed
        run.at = self.now
        number = run.trace_job.id
        speed = min([card.speeds.get(number, 1.0) for card in run.cards])
        run.speed = 1.0 if run.activity is None else speed * run.pace
        run.turn += 1
        self._at(self.now + max(run.left, 0.0) / run.speed, self._leave_phase, run, run.turn)

    def _pace(self, trace_job: TraceJob, card: SimulatedCard) -> float:
        """Return a job's speed on this kind of GPU relative to the GPU of the trace."""
        reference, name = self.trace.gpu, card.whole.name
        alone = trace_job.kind.alone
        if reference is None or reference == name or reference not in alone or name not in alone:
            return 1.0
        return alone[reference].step_s / alone[name].step_s

    # The monitor.

    def _heat(self, card: SimulatedCard) -> None:
        """Note that readings of the card may change until a whole window has passed."""
        card.hot_until = self.now + self.horizon
        self.hot.add(card.index)

    def _read_cards(self) -> None:
        """Give placement new readings of cards with changes."""
        looked = self._looked()
        for card in [self.cards[index] for index in sorted(self.hot)]:
            over = self.now >= card.hot_until
            if over or looked - card.read >= self.reads_every:
                self._read(card, late=True)
            if over:
                self.hot.discard(card.index)

    def _looked(self) -> float:
        every = self.world.reading_s
        return self.now - self.now % every if every else self.now

    def _read(self, card: SimulatedCard, late: bool = False) -> None:
        """Give placement a reading; it is `late` unless a job has started or ended, which is known at once."""
        delay = self.world.monitor_delay_s
        card.read = self._looked()
        delay += self.now - card.read if late else 0.0
        moment = self.now - delay
        used, smact = card.reading(moment, self.rules.window)
        busy_now = card.reading(moment, self.rules.busy_window)[1] if self.policy.predicts else None
        if used != card.shown:
            card.shown = used
            for number, run in card.runs.items():
                taken = run.started is not None and run.started <= moment
                self.ledger.observe(number, card.id, run.trace_job.kind.memory if taken else None)
        slot = self.gpus[card.index].slot.read_again(used, Activity(smact=smact, age=delay), busy_now)
        slot = replace(slot, lost=card.lost) if slot.lost != card.lost else slot
        self.ledger.update_slot(slot)
        self._look_at(card, slot)

    def _look_at(self, card: SimulatedCard, slot: Slot | None = None) -> None:
        """Update placement's view of a GPU whose promises, jobs or reading have changed."""
        slot = slot or self.gpus[card.index].slot
        self.gpus[card.index] = gpu_of(slot, card.index, self.ledger, card.running, self.rules, self.now)

    # Failures of nodes.

    def _lose(self, node: int) -> None:
        cards = [card for card in self.cards if card.node == node]
        for card in cards:
            card.lost = True
        for run in list({id(run): run for card in cards for run in card.runs.values()}.values()):
            self._end(run, GPU_LOST)
            self._recover(run, "system", self.states[run.trace_job.id].promise)
        for card in cards:
            self._read(card)
        self._at(self.now + self.world.node_repair_s, self._repair, node)

    def _repair(self, node: int) -> None:
        for card in self.cards:
            if card.node == node:
                card.lost = False
                self._read(card)
        self._want_pass(self.now)
        if self.world.node_mtbf_s is not None:
            self._at(self.now + self.draw.expovariate(1 / self.world.node_mtbf_s), self._lose, node)

    # The result.

    def _result(self, jobs: Sequence[TraceJob]) -> SimulationResult:
        for card in self.cards:
            card.count(self.now)
            card.changed(self.now, self.horizon)
        results = [
            SimulatedJob(
                job.id,
                job.kind.name,
                job.user,
                job.arrival,
                job.work_s,
                job.gpus,
                self.states[job.id].state,
                tuple(self.states[job.id].attempts),
            )
            for job in jobs
        ]
        seconds = self.now - jobs[0].arrival if jobs else 0.0
        whole = seconds * len(self.cards) or 1.0
        return SimulationResult(
            scenario=self.scenario,
            trace=self.trace.name,
            jobs=results,
            gpus=[card.figures() for card in self.cards if card.series],
            energy_j=sum(card.energy_j for card in self.cards),
            busy_s=sum(card.busy_s for card in self.cards),
            smact=sum(card.smact_s for card in self.cards) / whole,
            memory=sum(card.byte_s / card.spec.usable for card in self.cards) / whole,
            passes=self.passes,
        )
