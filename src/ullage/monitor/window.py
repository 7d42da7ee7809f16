"""Readings of the last so many seconds of one GPU, and what they come to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from ullage.errors import UnknownName
from ullage.monitor.readings import FIELDS, Reading


class Window:
    """A look at a sliding window: means, percentiles and ages, field by field; `None` where nothing is known.

    `looks` are pairs of a moment and a reading, oldest first, and `now` is a moment of the same clock. Unknown values
    are left out of a mean, and `count` tells how many are in it. A late look counts as much as one in time, and a value
    that looks repeat counts once, in the look that read it.

    >>> window = Window([(0.0, Reading(0.0, smact=0.2)), (1.0, Reading(1.0, smact=0.6)), (2.0, Reading(2.0))], now=3.0)
    >>> window.mean("smact"), window.count("smact"), window.age("smact"), window.mean("drama")
    (0.4, 2, 2.0, None)
    """

    def __init__(self, looks: Sequence[tuple[float, Reading]], now: float) -> None:
        self._looks, self._now = looks, now

    def __len__(self) -> int:
        return len(self._looks)

    def values(self, field: str) -> list[float]:
        """What is known of a field, oldest first."""
        if field not in FIELDS:
            raise UnknownName("field of a reading", field, FIELDS)
        found = (getattr(reading, field) for _, reading in self._looks if field not in reading.ages)
        return [value for value in found if value is not None]

    def count(self, field: str) -> int:
        """How many looks read the field and know it."""
        return len(self.values(field))

    def mean(self, field: str) -> float | None:
        """The mean of what is known."""
        values = self.values(field)
        return sum(values) / len(values) if values else None

    def percentile(self, field: str, percent: float) -> float | None:
        """The smallest known value that at least so many percent of the known values do not exceed.

        >>> looks = [(0.0, Reading(0.0, power_w=watts)) for watts in (300, 100, 200, 400)]
        >>> Window(looks, now=0.0).percentile("power_w", 50)
        200
        """
        values = sorted(self.values(field))
        if not values:
            return None
        return values[min(len(values), max(1, math.ceil(percent / 100 * len(values)))) - 1]

    def age(self, field: str | None = None) -> float | None:
        """Seconds since the newest look, or since the newest known value of `field` was read."""
        for moment, reading in reversed(self._looks):
            if field is None or getattr(reading, field) is not None:
                return max(0.0, self._now - moment) + (reading.ages.get(field, 0.0) if field else 0.0)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Mean, median, 95th percentile, age and count of each field, ready for JSON.

        >>> Window([], 0.0).to_dict()["smact"]
        {'mean': None, 'p50': None, 'p95': None, 'age': None, 'count': 0}
        """
        return {
            field: {
                "mean": self.mean(field),
                "p50": self.percentile(field, 50),
                "p95": self.percentile(field, 95),
                "age": self.age(field),
                "count": self.count(field),
            }
            for field in FIELDS
        }


def forget_old(looks: deque[tuple[float, Reading]], oldest: float) -> None:
    """Drop looks from before a moment.

    >>> looks = deque([(1.0, Reading(1.0)), (5.0, Reading(5.0))]); forget_old(looks, 2.0); len(looks)
    1
    """
    while looks and looks[0][0] < oldest:
        looks.popleft()
