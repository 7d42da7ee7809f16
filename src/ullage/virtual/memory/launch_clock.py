"""Clocks of the host, which launches, and of each stream: they show how far the host is ahead of the GPU.

The host takes the same time for every launch, the GPU somewhat more than the least time of the kernel. A GPU that is
slower than its host falls behind until the host waits for it, or the launch queue is full. Only code that shares memory
between streams needs this (`Tensor.record_stream`).
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ullage.hardware import GPU
from ullage.performance.data_sheet import LATENCY_S, LAUNCHES_HOST_S, LAUNCHES_SHARE_OF_LEAST_TIME
from ullage.performance.work import work_of

# Seconds of the host, from the times of all requests of 14 trainings with FSDP1, alone on an H200, and the calls
# between them (benchmarks/results/many-ranks.md): for an operator, with a kernel or without; for a collective and the
# code around it; for a stream that waits for another, and an event; for memory that is freed at once, freed while other
# streams may use it, and freed by FSDP, whose weights have a stream of their own; for the first use of a kernel, which
# loads it; for a new segment.
LAUNCH = VIEW = LAUNCHES_HOST_S
_COLLECTIVE, _STREAM_WAITS, _EVENT = 100e-6, 150e-6, 20e-6
FREE, _FREE_LATER, _FREE_GATHERED = 5e-6, 15e-6, 100e-6
_LOAD, SEGMENT = 4.4e-3, 200e-6
_GAP = 1e-6  # between two kernels
MOST_LAUNCHES = 1024  # launches that wait for the GPU, including events and waits for them
_COLLECTIVES = ("collective.", "c10d.")
_NO_OPERATORS = (*_COLLECTIVES, "cuda.")


class LaunchClock:
    """The clocks of one virtual GPU, in seconds; `stream` returns the current stream's number."""

    def __init__(self, gpu: GPU, stream: Callable[[], int] = lambda: 0) -> None:
        self._card, self._stream = gpu, stream
        self.host = 0.0
        self._done: dict[int, float] = {}  # by stream: when it will have finished all launched work
        self._launched: deque[float] = deque(maxlen=MOST_LAUNCHES)
        self._costs: dict[int, tuple[float, float]] = {}  # host and GPU seconds of calls, by number
        self._loaded: set[tuple[str, ...]] = set()

    def call(self, number: int, described: Callable[[int], Mapping[str, Any]]) -> None:
        """Launch an operator; `described` returns the call of that number as `OperatorCalls.step` does."""
        costs = self._costs.get(number)
        if costs is None:
            costs = self._costs[number] = self._first(described(number))
        self.host += costs[0]
        if not costs[1]:
            return
        self._wait_for_room()
        stream = self._stream()
        done = self._done[stream] = max(self._done.get(stream, 0.0), self.host + LATENCY_S) + costs[1]
        self._launched.append(done)

    def _wait_for_room(self) -> None:
        if len(self._launched) == MOST_LAUNCHES:
            self.host = max(self.host, self._launched[0])

    def done(self, stream: int | None = None) -> float:
        """Return when the GPU, or a stream, will have finished all launched work."""
        return max(self._done.values(), default=0.0) if stream is None else self._done.get(stream, 0.0)

    def wait(self, until: float) -> None:
        self.host = max(self.host, until)

    def stream_waits(self, stream: int, until: float) -> None:
        """Delay the next work of a stream until a time."""
        self._done[stream] = max(self._done.get(stream, 0.0), until)

    def record(self, stream: int) -> None:
        self.host += _EVENT
        self._queue(stream)

    def stream_waits_for(self, stream: int, other: int) -> None:
        """`Stream.wait_stream`: an event of the other stream, and a wait for it."""
        self.host += _STREAM_WAITS
        self.join(stream, other)

    def join(self, stream: int, other: int) -> None:
        """Wait for an event of another stream in native code, which takes no time on the host."""
        self._queue(other)
        self._queue(stream)
        self.stream_waits(stream, self.done(other))

    def free_later(self, home: int, streams: set[int]) -> float:
        """Free memory that other streams may use; return when they are done with it."""
        self.host += _FREE_GATHERED if home else _FREE_LATER
        for stream in sorted(streams):
            self._queue(stream)
        return max(self.host, *map(self.done, streams))

    def _queue(self, stream: int) -> None:
        """Put an event or a wait into the launch queue until its stream has reached it."""
        self._wait_for_room()
        self._launched.append(max(self.host, self.done(stream)))

    def _first(self, call: Mapping[str, Any]) -> tuple[float, float]:
        operator = str(call["operator"])
        if operator.startswith(_COLLECTIVES):
            return _COLLECTIVE, 0.0
        if call.get("view") or operator.startswith(_NO_OPERATORS):
            return VIEW, 0.0
        try:
            seconds = work_of(call).least_time(self._card)
        except (LookupError, TypeError, ValueError):  # only the name of the call is known
            return VIEW, 0.0
        kernel = operator, *(str(arg["dtype"]) for arg in call["args"] if isinstance(arg, Mapping) and "dtype" in arg)
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            self.host += _LOAD
        return LAUNCH, seconds / LAUNCHES_SHARE_OF_LEAST_TIME + _GAP
