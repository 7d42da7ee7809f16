"""A simulated GPU or MIG instance: its jobs, its present activity, and the readings of a monitor."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ullage.hardware import GPU, gpu_list
from ullage.manager.placement import Activity, Job, Running, Slot
from ullage.manager.simulation.result import GpuSeries
from ullage.manager.simulation.trace import Phase, TraceJob
from ullage.performance.result import resting_w, waiting_w
from ullage.performance.sharing import instance_of, share_of_gpu


@dataclass(eq=False, slots=True)
class SimulatedRun:
    """An attempt on cards since `placed`, in its phase number `phase`; it holds its memory since `started`. Alone it
    works at `pace`. `activity` is the number of its kind of activity on the GPU (None: none). At time `at`, `left`
    seconds of the phase were left, and pass at `speed`; `turn` counts changes of speed."""

    trace_job: TraceJob
    phases: Sequence[Phase]
    cards: "list[SimulatedCard]"
    promise: int
    exclusive: bool
    placed: float
    running: Running
    pace: float
    at: float
    phase: int = 0
    activity: int | None = None
    left: float = 0.0
    speed: float = 0.0
    started: float | None = None
    turn: int = 0

    @property
    def job(self) -> Job:
        return self.running.job


@dataclass(eq=False, slots=True)
class SimulatedCard:
    """A GPU, or a MIG instance with a `part` of the SMs of the `whole`.

    It draws `resting_w` when idle; with jobs it draws `waiting_w`, and for each job its draw beyond `base_w` on the
    whole GPU. `used`, `smact` and `power_w` are present values, `past` earlier ones (since, SM activity, bytes). `read`
    is the time of placement's last reading, `shown` its bytes; readings may change until `hot_until`.
    """

    id: str
    index: int
    node: int
    spec: GPU
    whole: GPU
    part: float
    resting_w: float
    waiting_w: float
    base_w: float
    series: bool
    runs: dict[int, SimulatedRun] = field(default_factory=dict)
    started: list[SimulatedRun] = field(default_factory=list)
    active: list[SimulatedRun] = field(default_factory=list)  # attempts in a phase that uses the GPU
    running: dict[int, Running] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)  # by job
    used: int = 0
    smact: float = 0.0
    power_w: float = 0.0
    lost: bool = False
    at: float = 0.0
    read: float = 0.0
    hot_until: float = 0.0
    shown: int | None = None
    past: deque[tuple[float, float, int]] = field(default_factory=lambda: deque([(0.0, 0.0, 0)]))
    energy_j: float = 0.0
    busy_s: float = 0.0
    smact_s: float = 0.0
    byte_s: float = 0.0
    seen: list[tuple[float, int, int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.power_w = self.resting_w

    @property
    def mig(self) -> bool:
        return self.spec is not self.whole

    def count(self, now: float) -> None:
        """Add the activity since the last call to the sums."""
        seconds, self.at = now - self.at, now
        if seconds > 0:
            self.energy_j += seconds * self.power_w
            self.smact_s += seconds * self.smact
            self.byte_s += seconds * self.used
            self.busy_s += seconds * bool(self.runs)

    def changed(self, now: float, window: float) -> None:
        """Record the present state, after `count`, and drop the states that a monitor can no longer see."""
        past = self.past
        if past[-1][0] == now:
            past.pop()
        past.append((now, self.smact, self.used))
        while len(past) > 2 and past[1][0] < now - window:
            past.popleft()
        if self.series:
            if self.seen and self.seen[-1][0] == now:
                self.seen.pop()
            self.seen.append((now, len(self.runs), self.used, self.smact, self.power_w))

    def reading(self, moment: float, window: float) -> tuple[int, float]:
        """Return the used bytes at a recent time, and the mean SM activity of the window before it."""
        begin, total = moment - window, 0.0
        earlier, level, used = begin, 0.0, 0
        for since, smact, taken in self.past:
            if since > moment:
                break
            if level and since > begin:
                total += level * (since - (earlier if earlier > begin else begin))
            earlier, level, used = since, smact, taken
        if level:
            total += level * (moment - (earlier if earlier > begin else begin))
        return used, total / (moment - begin)

    def slot(self) -> Slot:
        """Return the card as a monitor first sees it."""
        activity = Activity(smact=0.0, age=0.0)
        return Slot(self.id, self.index, self.spec.name, self.spec.usable, 0, activity, self.mig)

    def figures(self) -> GpuSeries:
        times, jobs, memory, smact, power = zip(*self.seen, strict=True)
        return GpuSeries(self.index, self.spec.name, self.spec.usable, times, jobs, memory, smact, power)


def cards_of(gpus: str, sharing: str, node_gpus: int, most_series: int) -> list[SimulatedCard]:
    """Return the cards of "4xA100-40GB", or of several kinds of GPUs; under MIG every GPU is divided.

    >>> [card.id for card in cards_of("2xA100-40GB", "mps", 8, 64)], len(cards_of("A100-40GB", "mig:1g.5gb", 8, 64))
    (['GPU-0', 'GPU-1'], 7)
    """
    made: list[SimulatedCard] = []
    wholes = gpu_list(gpus)
    kinds = {
        whole.name: (_instances(whole, sharing), resting_w(whole.name), waiting_w(whole.name))
        for whole in {whole.name: whole for whole in wholes}.values()
    }
    for number, whole in enumerate(wholes):
        parts, resting, waiting = kinds[whole.name]
        for part in parts:
            name = f"GPU-{number}" if len(parts) == 1 else f"GPU-{number}/{len(made)}"
            sms, watts = share_of_gpu(part, whole)[0], (resting / len(parts), waiting / len(parts), waiting)
            series = len(wholes) * len(parts) <= most_series
            made.append(SimulatedCard(name, len(made), number // node_gpus, part, whole, sms, *watts, series))
    return made


def _instances(whole: GPU, sharing: str) -> list[GPU]:
    way, _, wanted = sharing.partition(":")
    if way != "mig":
        return [whole]
    part = instance_of(whole, 1 if wanted else 2, wanted)
    return [part] * (part.mig_instances or 1)
