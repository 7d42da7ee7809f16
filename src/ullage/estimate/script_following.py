"""How far a script is followed.

First until its training has settled: at least `steps` optimizer steps (backward passes, where there is no optimizer),
and until an iteration asks for the same memory as the one before. Then it is looked around for what comes beside
training, validation and checkpoints: epochs over DataLoaders end early (`script_loaders.py`), and the script goes on
until its end, until a second validation has raised no peak, or until as much time has passed again as settling took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ullage.estimate import script_lightning
from ullage.estimate.script_loaders import Loaders
from ullage.virtual.backward_passes import BackwardPasses
from ullage.virtual.phases import Phases
from ullage.virtual.replacements import Replacements
from ullage.virtual.settling import Settling

if TYPE_CHECKING:
    from ullage.virtual import VirtualGPU

SHORTEST_LOOK, LONGEST_LOOK = 3.0, 20.0  # seconds
STEPS_WITHOUT_GPU = 10  # after so many optimizer steps that never asked for memory there, the script trains on the CPU


class Following:
    """Watches one run of a script; calls `stop` when there is nothing more to see."""

    def __init__(self, card: VirtualGPU, steps: int | None, stop: Callable[[], None]) -> None:
        self._card, self._steps, self._stop = card, steps, stop
        self._begin = time.monotonic()
        self._validations_before = self._validations = 0  # seen before training settled, and after
        self._peaks = 0, 0
        self.phases = Phases(card)
        self.loaders = Loaders(card.memory, card.note)
        self._watch_anew()
        self.backward = BackwardPasses(self._after_backward, self._watch_anew)

    def install(self, replacements: Replacements) -> None:
        """Begin to watch."""
        self._card.progress.on_step = self._after_step
        replacements.on_undo(self.phases.install())
        self.backward.install(replacements)
        self.loaders.install(replacements)
        script_lightning.install(self.loaders, replacements)

    @property
    def settled(self) -> bool:
        """Whether training has settled."""
        return self._look_until is not None

    @property
    def steps(self) -> int:
        """Optimizer steps; backward passes where no optimizer was made."""
        return self._card.progress.optimizer_steps or (0 if self.backward.optimizers else self.backward.count)

    def _watch_anew(self) -> None:
        """At the beginning, and when the first optimizer is made: backward passes before it were no training."""
        self._settling = Settling(self._card, self._steps or 1)
        self._look_until: float | None = None
        self.loaders.hurry = self.phases.settled = False

    def _after_backward(self) -> None:
        self.loaders.after_backward()
        if not self.backward.optimizers:
            self._after_step()

    def _after_step(self) -> None:
        if self._steps is None:
            return
        if not self._card.memory.requests:
            if self.steps >= STEPS_WITHOUT_GPU:
                self._stop()
        elif self._look_until is None:
            if self._settling.is_settled(go_on=True):
                self._look_around()
        elif self._has_looked_enough():
            self._stop()

    def _look_around(self) -> None:
        now = time.monotonic()
        self._look_until = now + min(LONGEST_LOOK, max(SHORTEST_LOOK, now - self._begin))
        self.loaders.hurry, self.loaders.look_until = True, self._look_until
        self.phases.settled = True
        self._validations_before = len(self.phases.stretches())

    def _has_looked_enough(self) -> bool:
        assert self._look_until is not None
        if time.monotonic() > self._look_until:
            return True
        seen = len(self.phases.stretches()) - self._validations_before
        if seen <= self._validations:
            return False
        peaks, before = (self._card.peak_allocated, self._card.peak_reserved), self._peaks
        self._validations, self._peaks = seen, peaks
        return seen >= 2 and peaks == before
