"""When a training loop's memory has settled: an iteration asked for exactly what the one before it asked for.

From then on nothing new happens, except that the allocator's free blocks may still be cut up further. So the last
iteration's requests are repeated on the allocator alone until its reserved memory no longer grows, which costs
milliseconds, and the loop can be stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

MOST_REPEATED_CALLS = 200_000  # allocator calls; a second's work
QUIET_REPETITIONS = 2
MOST_REPETITIONS = 20


class Settled(BaseException):
    """Ends the training function from inside its optimizer step; not an `Exception`, so that code does not catch it."""


class Settling:
    """Watches one run; give `after_step` to `Progress.on_step`.

    `steps` is the least number of optimizer steps, `most_steps` how many to watch if the requests never repeat.
    """

    def __init__(self, gpu: VirtualGPU, steps: int = 3, most_steps: int = 30) -> None:
        self._gpu = gpu
        self._steps, self._most_steps = steps, most_steps
        self._marks: list[int] = [0]

    def after_step(self) -> None:
        """One optimizer step is done; raises `Settled` when nothing new is to be expected."""
        memory = self._gpu.memory
        self._marks.append(len(memory.requests))
        done = len(self._marks) - 1
        if done < self._steps:
            return
        period = self._period()
        if period is not None:
            self._repeat(memory.requests[self._marks[-1 - period] :])
            raise Settled
        if done >= self._most_steps:
            self._gpu.note("settling", f"the requests did not repeat within {done} optimizer steps; stopped there")
            raise Settled

    def _period(self) -> int | None:
        """After how many optimizer steps the requests repeat: 1, or more for several optimizers and accumulation."""
        requests, marks = self._gpu.memory.requests, self._marks
        for period in range(1, min(8, (len(marks) - 1) // 2) + 1):
            middle = marks[-1 - period]
            last = _sizes(requests[middle:])
            if last and last == _sizes(requests[marks[-1 - 2 * period] : middle]):
                return period
        return None

    def _repeat(self, requests: list[int]) -> None:
        times = min(MOST_REPETITIONS, MOST_REPEATED_CALLS // max(1, len(requests)))
        self._gpu.memory.repeat(requests, times, QUIET_REPETITIONS)


def _sizes(requests: list[int]) -> list[int]:
    """What was asked for, without the frees: how long ago a block was taken differs once more after the first time."""
    return [number for number in requests if number > 0]
