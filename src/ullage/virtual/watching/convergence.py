"""Detect when a training loop repeats: an iteration makes the same requests as the one before it.

From then on only free blocks can still be split further. So these requests are repeated on the allocator alone until
its reserved memory stops growing, which takes milliseconds, and the loop can stop.
"""

from collections.abc import Callable

from ullage.units import MIB, format_bytes
from ullage.virtual.state import GPUState

MOST_REPEATED_CALLS = 200_000  # allocator calls; a second's work
QUIET_REPETITIONS = 2
MOST_REPETITIONS = 20
MOST_STEPS = 30
MOST_UNLIKE = 4  # iterations with equal sizes whose frees cannot be repeated
LEAST_GROWTH = MIB  # bytes an iteration that are worth a note


class MemoryConverged(BaseException):
    """Raised in an optimizer step to end the training function; no `Exception`, so that code does not catch it."""


class ConvergenceWatch:
    """Watches a run until its requests repeat; pass `after_step` to `Progress.on_step`. It watches `steps` to
    `MOST_STEPS` optimizer steps; `extrapolate` (`Progress.extrapolate`) may extrapolate the last of `steps`."""

    def __init__(self, gpu: GPUState, steps: int = 3, extrapolate: Callable[[], bool] | None = None) -> None:
        self._gpu, self._extrapolate = gpu, extrapolate
        self._steps, self._most_steps = steps, max(steps, MOST_STEPS)
        self._marks: list[int] = [len(gpu.memory.requests)]
        self._in_use: list[int] = [0]
        self._unlike = self._held_back = 0

    def after_step(self) -> None:
        """Call after an optimizer step; raise `MemoryConverged` if later steps need no more memory."""
        settled = self.is_settled()
        if not settled and len(self._marks) == self._steps and self._extrapolate is not None and self._extrapolate():
            settled = self.is_settled()
            assert settled, "a step that was foreseen can be repeated"
        if settled:
            raise MemoryConverged

    def is_settled(self, go_on: bool = False, hold: bool = False) -> bool:
        """Call after an optimizer step; return whether later steps need no more memory. With `go_on` the run can
        continue in the converged state. With `hold` new requests are known to come."""
        memory = self._gpu.memory
        memory.waiting.synchronized()  # late frees belong to this step
        self._marks.append(len(memory.requests))
        self._in_use.append(memory.allocator.allocated)
        done = len(self._marks) - 1
        fills, self._held_back = memory.held_back > self._held_back, memory.held_back
        if done < self._steps or hold:
            return False
        if fills:  # growth that ends: it must not be repeated
            return done >= self._most_steps
        period = self._period()
        if period is not None:
            requests = memory.requests[self._marks[-1 - period] :]
            live = {span.index for span in memory.spans if span.block is not None}
            if requests.can_repeat(live, len(memory.spans)):
                self._note_growth(period)
                times = min(MOST_REPETITIONS, MOST_REPEATED_CALLS // max(1, len(requests)))
                memory.repeat(requests, times, QUIET_REPETITIONS, go_on)
                return True
            self._unlike += 1  # the same sizes, but other tensors were freed: the next iterations may be alike
            if self._unlike > MOST_UNLIKE:
                return True
        if done >= self._most_steps:
            self._gpu.note("repetition", f"allocations did not repeat within {done} steps; Ullage stopped there")
            return True
        return False

    def _note_growth(self, period: int) -> None:
        """Note growth: a loop that keeps tensors of past steps needs more the longer it runs."""
        now, before, first = (self._in_use[-1 - back * period] for back in range(3))
        growth = now - before
        if growth >= LEAST_GROWTH and growth == before - first:
            self._gpu.note(
                "growth",
                f"memory in use grows by {format_bytes(growth)} in each iteration: something keeps tensors of past "
                f"iterations, so a longer run needs more (measured over {MOST_REPETITIONS} iterations)",
            )

    def _period(self) -> int | None:
        """Return the number of optimizer steps after which requests repeat: 1, or more with several optimizers or
        accumulation."""
        requests, marks = self._gpu.memory.requests, self._marks
        for period in range(1, min(8, (len(marks) - 1) // 2) + 1):
            middle = marks[-1 - period]
            # The age of a block that is freed differs once more after the first time.
            last = requests.sizes(middle)
            if last and last == requests.sizes(marks[-1 - 2 * period], middle):
                return period
        return None
