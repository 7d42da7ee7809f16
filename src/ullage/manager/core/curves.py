"""The memory of attempts over time: few figures for each, however long it lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 256  # figures of one attempt
_GAP = 10.0  # seconds without a look that are no gap: it held the same, or somewhat less


@dataclass
class MemoryCurve:
    """The most bytes that an attempt held on one GPU, in equal steps from its start; `None` where nobody looked.

    The steps become twice as long whenever there are too many of them.

    >>> curve = MemoryCurve()
    >>> for second in range(600):
    ...     curve.see(float(second), second)
    >>> curve.step, len(curve.values), curve.values[:3], curve.values[-1]
    (4.0, 150, [3, 7, 11], 599)
    """

    step: float = 1.0
    values: list[int | None] = field(default_factory=list)
    kept: float = 0.0  # seconds of it that are on disk

    @property
    def seconds(self) -> float:
        """How much of the time it has."""
        return self.step * len(self.values)

    def see(self, seconds: float, used: int) -> None:
        """What it holds, so many seconds after its start."""
        while seconds >= self.step * MOST:
            self.values = [_larger(self.values[place : place + 2]) for place in range(0, len(self.values), 2)]
            self.step *= 2
        place = int(max(0.0, seconds) // self.step)
        missing = place + 1 - len(self.values)
        between = used if self.values and missing * self.step <= _GAP else None
        self.values += [between] * missing
        self.values[place] = _larger([self.values[place], used])


def _larger(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
