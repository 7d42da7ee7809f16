"""Sets of jobs to measure together, read from a file or drawn, and their division into rounds."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.units import GIB, format_bytes
from ullage_lab.measure.dataset import BASE, need

Row = dict[str, Any]
RESIDENTS = 40  # resident jobs at a time; MPS allows 48
SIZES = {2: 60, 3: 20, 5: 10, 7: 10}  # out of a hundred sets
UNIFORM = (1, 2, 3, 5, 7)  # copies of one job
POOL_JOBS, POOL_SETS = 30, 60  # sets are drawn among jobs that are resident together


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """The ids of jobs that run at the same time; a repeated id means copies of that job."""

    id: str
    jobs: tuple[str, ...]

    @property
    def copies(self) -> Counter[str]:
        return Counter(self.jobs)

    @property
    def processes(self) -> list[str]:
        """Return a name for each copy.

        >>> JobSet(id="three", jobs=("a", "b", "a")).processes
        ['a#0', 'b#0', 'a#1']
        """
        return [f"{name}#{self.jobs[:place].count(name)}" for place, name in enumerate(self.jobs)]


@dataclass
class Round:
    """Sets whose jobs are all resident at the same time."""

    sets: list[JobSet] = field(default_factory=list)
    copies: Counter[str] = field(default_factory=Counter)


def rounds(sets: Sequence[JobSet], room: Mapping[str, int], total: int, residents: int = RESIDENTS) -> list[Round]:
    """Return the sets in order, with a new round whenever the next set's jobs do not fit next to those of the round.

    >>> sets = [JobSet(id=name, jobs=tuple(name)) for name in ("ab", "aa", "c")]
    >>> [[one.id for one in part.sets] for part in rounds(sets, {"a": 4, "b": 4, "c": 4}, total=12)]
    [['ab', 'aa'], ['c']]
    """
    parts: list[Round] = []
    for one in sets:
        together = (parts[-1].copies | one.copies) if parts else one.copies
        fits = sum(room[job] * count for job, count in together.items()) <= total and together.total() <= residents
        if not parts or not fits:
            parts.append(Round())
            together = one.copies
        parts[-1].sets.append(one)
        parts[-1].copies = together
    return parts


def room(row: Row) -> int:
    """Return the GPU memory of a job: as measured if the row has a figure, otherwise the count and an allowance."""
    reserved = row.get("peak_reserved")
    return need(row) + BASE if reserved is None else int(reserved) + BASE


def sets_in(rows: Sequence[Row]) -> list[JobSet]:
    """Return the sets that a file's lines name: `{"set": "pair-1", "jobs": ["resnet", "bert"]}`.

    >>> sets_in([{"id": "a", "model": "mlp:x"}, {"set": "two", "jobs": ["a", "a"]}])
    [JobSet(id='two', jobs=('a', 'a'))]
    """
    sets = []
    for row in rows:
        if "set" not in row or "model" in row:
            continue
        jobs = row.get("jobs")
        if not isinstance(jobs, list) or not jobs:
            raise InvalidValue(f"the set {row['set']}: 'jobs' must be a list of ids, got {jobs!r}")
        sets.append(JobSet(id=str(row["set"]), jobs=tuple(map(str, jobs))))
    return sets


def draw_sets(rows: Sequence[Row], count: int, seed: int, total: int = 130 * GIB) -> list[JobSet]:
    """Draw N sets of these jobs: first one small, one medium and one large job, copied; then mostly pairs.

    Jobs are small or large by the memory they take. The same seed draws the same sets of the same rows.

    >>> rows = [{"id": f"j{number}", "model": "mlp:x", "need": number * GIB} for number in range(9)]
    >>> draw_sets(rows, 3, seed=1)[1]
    JobSet(id='uniform-small-2', jobs=('j1', 'j1'))
    """
    chance = random.Random(f"ullage together {seed}")
    takes = {str(row["id"]): room(row) for row in rows if "model" in row}
    ordered = sorted((name for name in takes if takes[name] * max(UNIFORM) <= total), key=lambda name: takes[name])
    if not ordered:
        least = min(takes.values(), default=0)
        raise UllageError(
            f"no job is small enough to run {max(UNIFORM)} times in {format_bytes(total)}: the smallest is "
            f'taken to need {format_bytes(least)} (a line tells by "need", in bytes)'
        )
    sizes = {"small": 0.15, "medium": 0.5, "large": 0.85}
    sets = [
        JobSet(id=f"uniform-{size}-{copies}", jobs=(ordered[int(share * len(ordered))],) * copies)
        for size, share in sizes.items()
        for copies in UNIFORM
    ]
    while len(sets) < count:
        pool: list[str] = []
        taken = 0
        for name in chance.sample(sorted(takes), len(takes)):
            if taken + takes[name] <= total and len(pool) < POOL_JOBS:
                pool.append(name)
                taken += takes[name]
        for _ in range(POOL_SETS):
            size = chance.choices(list(SIZES), list(SIZES.values()))[0]
            jobs = chance.sample(pool, min(size, len(pool)))
            sets.append(JobSet(id=f"s{seed}-{len(sets):04d}", jobs=tuple(jobs)))
    return sets[:count]
