"""The shared state of a daemon's parts: settings, records, the ledger, and the current GPUs."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.jobs.schedules import LAST_MOMENT
from ullage.manager.core.usage import EnergyMeter, FairShare, MemoryCurve
from ullage.manager.core.watchdog import CrashMarker
from ullage.manager.core.works import WorkloadProfiles
from ullage.manager.monitor.readings import Device
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.monitor.sources import VirtualSource
from ullage.manager.placement import Activity, Booking, Ledger, Slot, Waiting, claimed
from ullage.manager.placement.policies import Policy
from ullage.manager.running.cgroups import JOBS
from ullage.manager.running.launcher import Launcher
from ullage.manager.running.mps import TimeSlicing
from ullage.manager.running.supervisor import TOKEN
from ullage.manager.settings import ManagerSettings
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, Drain, JobRecord
from ullage.sandbox.process_identity import Process, start_of
from ullage.virtual.shared_card.cards import DeclaredActivity

_STUCK = 60.0  # seconds without a step after which a daemon is unhealthy
_MARK = f"{TOKEN}=".encode()


class SlotReader:
    """Turns the monitor's readings into slots for placement and memory by attempt. A process belongs to an attempt by
    its cgroup's name or the token in its environment."""

    def __init__(self, monitor: Monitor, busy_window: float) -> None:
        self.monitor, self.busy_window = monitor, busy_window
        self._tokens: dict[Process, str | None] = {}

    def devices(self) -> list[Device]:
        return [device for device in self.monitor.devices() if device.takes_jobs]

    def named(self, gpu: str | int) -> Device:
        devices = self.devices()
        device_named = next((device for device in devices if str(gpu) in (str(device.index), device.id)), None)
        if device_named is None:
            there = ", ".join(f"{device.index} ({device.id})" for device in devices[:16])
            raise InvalidValue(f"the GPU must be named by index or UUID, got {str(gpu)[:80]!r}. There are: {there}")
        return device_named

    def look(
        self, drained: Collection[str], booked: Sequence[tuple[str, Booking]] = ()
    ) -> tuple[list[Slot], dict[str, dict[str, int]]]:
        """Return the slots, and the memory by token and slot. `drained` devices get no new jobs; `booked` ones get only
        some users' jobs at some times."""
        held: dict[str, dict[str, int]] = {}
        slots = []
        for device in self.devices():
            bookings = tuple(booking for gpu, booking in booked if device.id == gpu)
            slots.append(self._slot(device, device.id in drained, held, bookings))
        if len(self._tokens) > 4096:
            self._tokens = {process: token for process, token in self._tokens.items() if start_of(process.pid)}
        slots.sort(key=lambda slot: slot.index)  # a lost one keeps its place
        return slots, held

    def _slot(
        self, device: Device, drained: bool, held: dict[str, dict[str, int]], bookings: tuple[Booking, ...]
    ) -> Slot:
        lost = self.monitor.lost(device.id) is not None
        latest, window = self.monitor.latest(device.id), self.monitor.window(device.id)
        foreign = 0
        for pid, used in (self.monitor.processes(device.id) or {}).items():
            owner = self.owner(pid)
            if owner is None:
                continue  # an invisible process (in another container) may belong to any job
            if not owner:
                foreign += used or 0
            elif used is not None:
                of_job = held.setdefault(owner, {})
                of_job[device.id] = of_job.get(device.id, 0) + used
        return Slot(
            id=device.id,
            index=device.index,
            name=device.name,
            total=device.total or 0,
            used=latest.memory_used if latest else None,
            mig=device.mig,
            drained=drained,
            lost=lost,
            foreign=foreign,
            bookings=bookings,
            busy_now=self._busy_now(device.id),
            activity=Activity(
                gract=window.mean("gract"),
                smact=window.mean("smact"),
                smocc=window.mean("smocc"),
                drama=window.mean("drama"),
                age=window.age("smact"),
            ),
        )

    def _busy_now(self, device: str) -> float | None:
        """Return recent SM activity, or GPU activity or NVML's utilization if it is not measured."""
        window = self.monitor.window(device, self.busy_window)
        means = [window.mean(field) for field in ("smact", "gract", "utilization")]
        return next((mean for mean in means if mean is not None), None)

    def owner(self, pid: int) -> str | None:
        """Return the token of a process; "" if it has none, `None` if the process cannot be seen."""
        start = start_of(pid)
        if start is None:
            return None
        process = Process(pid, start)
        if process not in self._tokens:
            self._tokens[process] = _token_of(pid)
        return self._tokens[process]


def _token_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        group = Path(f"/proc/{pid}/cgroup").read_text().partition(f"/{JOBS}/")[2]
        if group:
            return group.split()[0].partition("/")[0]
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(_MARK):
                return variable.removeprefix(_MARK).decode(errors="replace")
        return ""
    return None


@dataclass
class ServiceState:
    """The health of a daemon, and its wake-up and end signals. It can be created before the loop runs."""

    began: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: str | None = None
    disk_full: bool = False
    stepped: float = field(default_factory=time.monotonic)  # when its last step ended

    def health(self) -> str:
        """Return the daemon's health in one word. Thread-safe."""
        if self.ending.is_set():
            return "ending"
        if time.monotonic() - self.stepped > _STUCK:
            return "stuck"
        return "trouble" if self.trouble else "ok"

    def wake(self) -> None:
        self.woken.set()

    def end(self) -> None:
        self.ending.set()


@dataclass
class ManagerContext:
    """The parts and the state of one daemon, to be used only in the thread of its event loop."""

    folder: Path
    settings: ManagerSettings
    policy: Policy
    store: JobStore
    launcher: Launcher
    slot_reader: SlotReader
    sharing: TimeSlicing
    ledger: Ledger
    service: ServiceState
    handled: CrashMarker
    clock: Callable[[], float]
    say: Callable[[str], None]
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    fair_share: FairShare = field(init=False)
    works: WorkloadProfiles = field(init=False)
    cards: Path | None = None  # the folder of the virtual GPUs, if it serves those
    slots: list[Slot] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)  # unfinished jobs
    reasons: dict[int, str | Waiting] = field(default_factory=dict)  # why a job waits
    not_before: dict[int, float] = field(default_factory=dict)  # by the monotonic clock
    queued_at: dict[int, float] = field(default_factory=dict)  # when a job last came into the queue
    used: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes held now, by token and slot
    peaks: dict[str, int] = field(default_factory=dict)  # most bytes held on one GPU, by token
    fullest: dict[str, float] = field(default_factory=dict)  # largest used share of its GPU, by token
    pids: dict[int, int] = field(default_factory=dict)  # the first process of each job, for readings of the host
    curves: dict[str, MemoryCurve] = field(default_factory=dict)  # memory over time, by token
    warned: set[str] = field(default_factory=set)  # tokens of attempts reported for exceeding their promise

    def __post_init__(self) -> None:
        self.fair_share = FairShare(self.store, self.settings.fairness.half_life, claim=self.claim)
        self.works = WorkloadProfiles(self.store, self.settings.sharing)
        source = self.slot_reader.monitor.source
        if isinstance(source, VirtualSource):
            source.predicted = self._predicted_activity

    def _predicted_activity(self, pid: int, gpu: str) -> DeclaredActivity | None:
        """Return the predicted activity of a job's process on its GPU. Thread-safe."""
        token = self.slot_reader.owner(pid)
        jobs = (each.job for each in list(self.store.attempts.values()) if token and each.token == token)
        work = next((self.store.job(job).work for job in jobs), None)
        alone = None if work is None else self.works.utilization(work, gpu)
        return None if alone is None else DeclaredActivity(alone.busy, alone.smact)

    def claim(self, job: JobRecord) -> float:
        """Return the part of a GPU that a job claims with its minimum speed."""
        heeded = job.work is not None and self.policy.predicts
        return claimed(job.option("min_speed"), self.settings.placing.min_speed) if heeded else 0.0

    def checkpoint_lead(self, own: float | None) -> float:
        """Return how many seconds before its end a job is asked for a checkpoint."""
        return self.settings.fairness.checkpoint_lead if own is None else own

    def gpu_part(self, memory: Mapping[str, int], exclusive: bool) -> float:
        if exclusive:
            return float(len(memory))
        totals = {slot.id: slot.total for slot in self.slots if slot.id in memory}
        return sum(min(1.0, memory[slot] / total) for slot, total in totals.items() if total)

    def attempt_folder(self, attempt: AttemptRecord) -> Path:
        return self.launcher.folder(attempt.job, attempt.number)

    def look(self) -> None:
        """Update the slots and the memory of each attempt from the monitor."""
        self.drains = self.store.history.drains(self.clock())
        ends = {each.id: LAST_MOMENT if each.until is None else each.until for each in self.drains}
        booked = [(each.gpu, Booking(each.id, each.begin, ends[each.id], each.text)) for each in self.drains]
        self.slots, self.used = self.slot_reader.look(self.drained, booked)
        self.ledger.see(self.slots)
        self.slot_reader.monitor.follow(self.pids.values())
        for job, attempt in self.store.attempts.items():
            held = self.used.get(attempt.token, {})
            for slot in attempt.slots:
                self.ledger.observe(job, slot, held.get(slot))
            full = [
                slot.used / slot.total for slot in self.slots if slot.id in attempt.slots and slot.used and slot.total
            ]
            self.fullest[attempt.token] = max(self.fullest.get(attempt.token, 0.0), *full, 0.0)
            if held:
                self.peaks[attempt.token] = max(self.peaks.get(attempt.token, 0), *held.values())
                seconds = self.clock() - (attempt.started or attempt.placed)
                self.curves.setdefault(attempt.token, MemoryCurve()).see(seconds, max(held.values()))
        self.fair_share.look(self.store.attempts.values(), self.slots)
        self._measure_energy()

    def _measure_energy(self) -> None:
        latest = self.slot_reader.monitor.latest
        readings = {slot.id: latest(slot.id) for slot in self.slots}
        power = {slot: None if reading is None else reading.power_w for slot, reading in readings.items()}
        self.energy.look(self.store.attempts.values(), power.get)

    @property
    def drained(self) -> dict[str, str]:
        return {each.gpu: each.reason for each in self.drains if each.closes(self.clock())}

    def keep_curve(self, attempt: AttemptRecord) -> None:
        """Store an attempt's memory over time, if any was measured."""
        curve = self.curves.get(attempt.token)
        if curve is not None:
            self.store.keep_curve(attempt.job, attempt.number, curve.step, curve.values)
            curve.stored = curve.seconds

    def keep_curves(self) -> None:
        """Store the memory over time of running attempts whose curve has a new step."""
        for attempt in self.store.attempts.values():
            curve = self.curves.get(attempt.token)
            if curve is not None and curve.seconds != curve.stored:
                self.keep_curve(attempt)

    def energy_of(self, attempt: AttemptRecord) -> float | None:
        self._measure_energy()
        return self.energy.end(attempt.token)

    def reason(self, job: int) -> str | None:
        """Return why a job waits, if placement has decided about it."""
        decision = self.reasons.get(job)
        return decision if decision is None or isinstance(decision, str) else decision.reason

    @property
    def largest(self) -> int:
        return max((slot.total for slot in self.slots if not slot.lost), default=0)
