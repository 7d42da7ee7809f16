"""Means over seeds, with 95% confidence intervals by Student's t."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean of `count` values, and half the width of its 95% confidence interval (None for one value)."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    @property
    def sign(self) -> int:
        """Return 1 if the interval is above 0, -1 if it is below, 0 otherwise."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Return the interval of one or more values."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count < 2:
            return cls(mean, None, count)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, student_t(count - 1) * math.sqrt(variance / count), count)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the attributes as a dictionary, with both ends of the interval."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "count": self.count}


def changes(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Return the change of the mean against values of the same seeds, as a ratio of the means; None if undefined. Its
    uncertainty comes from the distances of single seeds from the ratio, since seeds may differ tenfold."""
    whole = math.fsum(base)
    if not whole:
        return None
    ratio = math.fsum(values) / whole
    apart = Interval.of([value - ratio * before for value, before in zip(values, base, strict=True)])
    half = None if apart.half is None else apart.half * len(base) / abs(whole)
    return Interval(ratio - 1, half, len(base))


@functools.cache
def student_t(freedom: int) -> float:
    """Return the quantile of Student's t that contains 95% of its values.

    >>> round(student_t(4), 3), round(student_t(1000), 3)
    (2.776, 1.962)
    """
    low, high = 0.0, 700.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability that |T| < t, by the finite series for integer degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = total = 1.0 if not odd else cosine
    for number in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
