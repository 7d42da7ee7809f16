"""How far the host is ahead of the GPU: two clocks, one that launches and one that works.

The host takes the same time for every launch, the GPU what its data sheet says for the kernel. A GPU that is slower
than its host falls behind by what it has not done yet, until the host waits for it: because the script does, or because
there is no room for another launch. Only code that shares memory between streams has to know (`Tensor.record_stream`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ullage.hardware import GPU
from ullage.hardware.work import work_of

# Seconds of the host for an operator with a kernel, and without: of 15 and 30 microseconds the one that was nearer to 8
# trainings with FSDP1 and `limit_all_gathers=False`, judged on 7 others (benchmarks/results/many-ranks.md).
LAUNCH, VIEW = 30e-6, 6e-6
_GAP = 1e-6  # between two kernels
MOST_LAUNCHES = 1024  # that wait for the GPU
_NO_OPERATORS = ("collective.", "cuda.", "c10d.")


class HostLead:
    """The two clocks of one virtual GPU, in seconds.

    >>> from ullage.hardware import gpu
    >>> made = {"shape": [8192, 8192], "dtype": "float32"}
    >>> product = {"operator": "aten.mm.default", "args": [made, made], "kwargs": {}, "outputs": [made]}
    >>> lead = HostLead(gpu("H200"))
    >>> for _ in range(10): lead.call(0, lambda number: product)
    >>> lead.gpu - lead.host > 0.1
    True
    """

    def __init__(self, gpu: GPU) -> None:
        self._card = gpu
        self.host = 0.0
        self.gpu = 0.0
        """When the GPU will have done all that was launched so far."""
        self._launched: deque[float] = deque(maxlen=MOST_LAUNCHES)
        self._seconds: dict[int, float] = {}  # of kernels, by the number of the call; 0 where there is none

    def call(self, number: int, described: Callable[[int], Mapping[str, Any]]) -> None:
        """An operator is called; `described` gives the call of that number as `OperatorCalls.step` does."""
        seconds = self._seconds.get(number)
        if seconds is None:
            seconds = self._seconds[number] = self._time_of(described(number))
        if not seconds:
            self.host += VIEW
            return
        self.host += LAUNCH
        if len(self._launched) == MOST_LAUNCHES:
            self.host = max(self.host, self._launched[0])
        self.gpu = max(self.gpu, self.host) + seconds + _GAP
        self._launched.append(self.gpu)

    def wait(self) -> None:
        """The host waits for the GPU."""
        self.host = max(self.host, self.gpu)

    def _time_of(self, call: Mapping[str, Any]) -> float:
        if call.get("view") or str(call["operator"]).startswith(_NO_OPERATORS):
            return 0.0
        try:
            return work_of(call).least_time(self._card)
        except (LookupError, TypeError, ValueError):  # a call of which only the name is known
            return 0.0
