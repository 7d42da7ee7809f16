"""Jobs that are read alone and together in turns, in the same processes, so that disturbances affect both.

The speed of a host varies by a tenth from one minute to the next. So a job's shared time is compared with its times
alone just before and just after.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

Row = dict[str, Any]
Moments = Sequence[tuple[float, float]]  # when a job was read, and how long its step took

_SUMS = ("read_s", "energy_j")
_PER_JOB = ("step_s", "step_q1", "step_median", "step_q3")


def phases(jobs: Sequence[str], rounds: int) -> list[str | None]:
    """Return the order of the readings: each job alone, and after each of them all (`None`); the first once more.

    >>> phases("ab", 1)
    ['a', None, 'b', None, 'a']
    """
    one_round = [who for name in jobs for who in (name, None)]
    return [*one_round * rounds, jobs[0]]


def step_alone_at(moment: float, alone: Moments) -> float:
    """Return a job's step alone at a moment, interpolated between the readings before and after.

    >>> step_alone_at(3.0, [(1.0, 10.0), (5.0, 12.0)])
    11.0
    >>> step_alone_at(7.0, [(1.0, 10.0), (5.0, 12.0)])
    12.0
    """
    before = max((one for one in alone if one[0] <= moment), default=None)
    after = min((one for one in alone if one[0] > moment), default=None)
    if before is None or after is None:
        return (before or after or (0.0, 0.0))[1]
    share = (moment - before[0]) / (after[0] - before[0])
    return (1 - share) * before[1] + share * after[1]


def slowdowns(turns: Sequence[Mapping[str, Sequence[float]]]) -> list[float]:
    """Return each job's shared time divided by its time alone, the median over all turns.

    >>> slowdowns([{"step_s": [2.0], "alone_s": [1.0]}, {"step_s": [3.0], "alone_s": [1.0]}])
    [2.5]
    """
    of_turns = ([step / own for step, own in zip(turn["step_s"], turn["alone_s"], strict=True)] for turn in turns)
    return [median(of_job) for of_job in zip(*of_turns, strict=True)]


def joined(readings: Sequence[Row]) -> Row:
    """Merge readings of the same jobs: the median of their steps, and the means of the GPU's activity."""
    merged: Row = {}
    for name, first in readings[0].items():
        values = [reading[name] for reading in readings if reading.get(name) is not None]
        if isinstance(first, list):
            middle = median if name in _PER_JOB else sum
            merged[name] = [middle(of_job) for of_job in zip(*values, strict=True)]
        elif isinstance(first, int | float):
            merged[name] = round(sum(values) if name in _SUMS else fmean(values), 4)
        else:
            merged[name] = first
    return merged
