"""The speeds of jobs that share a simulated GPU: predicted and true ones."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ullage.hardware import GPU, gpu
from ullage.manager.placement import Slot, Speeds
from ullage.manager.simulation.trace import JobKind, Phase
from ullage.performance.contention import mig_step, shared_steps
from ullage.performance.result import Utilization
from ullage.performance.sharing import load, share_of_gpu

_Set = tuple[str, tuple[int, ...]]  # the GPU, and the numbers of the kinds in order
_MOST_KNOWN = 1_000_000


class Interference:
    """The speeds (1 alone) of kinds of jobs, or of their phases, that share a GPU by `how` ("mps" or "time-slicing").

    An unknown kind keeps a GPU busy all the time. The true loss of each set of kinds differs from the predicted one by
    a factor with the logarithmic standard deviation `error`, drawn once by `seed`. With `on=False` the true loss is
    zero.
    """

    def __init__(
        self, kinds: Sequence[JobKind | Phase], how: str, error: float = 0.0, seed: int = 0, on: bool = True
    ) -> None:
        self.kinds, self._how, self._error, self._seed, self._on = kinds, how, error, seed, on
        self.numbers = {id(kind): number for number, kind in enumerate(kinds)}
        self._alone: dict[tuple[str, int], Utilization] = {}
        self._predicted: dict[_Set, list[float]] = {}
        self._predictions: dict[tuple[str, ...], Speeds | None] = {}
        self._true: dict[_Set, list[float]] = {}
        self._together: dict[tuple[str, tuple[tuple[int, int], ...]], dict[int, float]] = {}

    def alone(self, number: int, name: str) -> Utilization:
        usage = self._alone.get((name, number))
        if usage is None:
            alone, card = self.kinds[number].alone, gpu(name)
            usage = self._alone[name, number] = alone.get(name) or alone.get(card.parent or "") or _always_busy(card)
        return usage

    def predict(self, works: Sequence[str], slot: Slot) -> Speeds | None:
        """Predict speeds for placement; workloads are numbers of kinds. None if one is unknown."""
        key = (slot.name, *works)
        if key not in self._predictions:
            numbers = [int(work) for work in works]
            known = all(slot.name in self.kinds[number].alone for number in numbers)
            there = tuple(sorted(numbers))
            speeds = dict(zip(there, self._shares(slot.name, there), strict=True)) if known else {}
            _keep(self._predictions, key, Speeds([speeds[number] for number in numbers]) if known else None)
        return self._predictions[key]

    def true(self, name: str, there: tuple[int, ...]) -> list[float]:
        speeds = self._true.get((name, there))
        if speeds is None:
            speeds = self._with_error(name, there) if self._on else [1.0] * len(there)
            _keep(self._true, (name, there), speeds)
        return speeds

    def together(self, name: str, counts: Mapping[int, int]) -> dict[int, float]:
        """Return the predicted speeds of kinds on a GPU, given the number of jobs of each."""
        key = (name, tuple(sorted(counts.items())))
        if key not in self._together:
            speeds = self._in_company(name, [number for number, _ in key[1]], [count for _, count in key[1]])
            self._together[key] = dict(zip([number for number, _ in key[1]], speeds, strict=True))
        return self._together[key]

    def _shares(self, name: str, there: tuple[int, ...]) -> list[float]:
        speeds = self._predicted.get((name, there))
        if speeds is None:
            speeds = self._in_company(name, there) if len(there) > 1 else [1.0] * len(there)
            _keep(self._predicted, (name, there), speeds)
        return speeds

    def _in_company(self, name: str, there: Sequence[int], counts: Sequence[int] | None = None) -> list[float]:
        alone = [self.alone(number, name) for number in there]
        steps = shared_steps(alone, self._how, load(), counts)
        return [min(1.0, job.step_s / step.step_s) for job, step in zip(alone, steps, strict=True)]

    def _with_error(self, name: str, there: tuple[int, ...]) -> list[float]:
        shares = self._shares(name, there)
        if not self._error or len(there) < 2:
            return shares
        names = "|".join(self.kinds[number].name for number in there)
        draw = random.Random(f"{self._seed}|{name}|{names}")
        return [1 / (1 + (1 / share - 1) * math.exp(draw.gauss(0.0, self._error))) for share in shares]

    def on_instance(self, number: int, part: GPU, whole: GPU) -> float:
        """Return the speed of a kind on a MIG instance relative to the whole GPU."""
        if not self._on:
            return 1.0
        job = self.alone(number, whole.name)
        return min(1.0, job.step_s / mig_step(job, *share_of_gpu(part, whole), load()).step_s)


def _keep(known: dict[Any, Any], key: object, value: object) -> None:
    if len(known) > _MOST_KNOWN:
        known.clear()
    known[key] = value


def _always_busy(card: GPU) -> Utilization:
    return Utilization(
        gpu=card.name,
        step_s=1.0,
        gpu_s=1.0,
        host_s=0.0,
        smact=1.0,
        smocc=0.5,
        drama=0.5,
        tensor=0.0,
        power_w=card.power_w or 300.0,
        energy_j=card.power_w or 300.0,
        flops=0.0,
        bytes=0.0,
        kernels=1000,
        steady=True,
        measured=False,
    )
