"""The largest number that fits, with few trials, where what it takes grows nearly linearly with it."""

from __future__ import annotations

from collections.abc import Callable

FIRST_GROWTH = 4
MOST_GROWTH = 64  # times the largest number that fits so far; a line through two small numbers may be far off
LARGEST = 1 << 24
TRIALS_BY_LINE = 8  # then by halving alone
# A card is full when tensors take nearly all of it, not all: the allocator's blocks never fill it quite. Trials that
# do not know better look between these shares of the limit.
LEAST_SHARE, FIRST_SHARE = 0.85, 0.98


class Search:
    """Finds the largest number that fits; `trial` says how many bytes a number takes and whether it fits.

    The answer fits and the next one does not. What a number takes is not strictly monotone (kernels change with the
    shape), so a still larger one might fit again; that is not looked for. `limit` is what can be taken at most.

    >>> search = Search(lambda number: (100 * number + 7, number <= 48), limit=5000)
    >>> search.largest(start=8), search.trials
    (48, 4)
    """

    def __init__(self, trial: Callable[[int], tuple[int, bool]], limit: int, step: int = 1) -> None:
        self._trial, self._limit, self._step = trial, limit, step
        self._taken: dict[int, int] = {}
        self._low, self._high = 0, LARGEST // step + 1  # fits, does not fit (or was not tried); in steps
        self._stretch = 1

    @property
    def trials(self) -> int:
        """How many numbers were tried."""
        return len(self._taken)

    def largest(self, start: int) -> int:
        """The largest number that fits, a multiple of the step; 0 where not even the first does."""
        number = max(1, start // self._step)
        while True:
            self._taken[number], fits = self._trial(number * self._step)
            if fits:
                self._low = number
                if number >= self._high:  # it was only a guess
                    self._high, self._stretch = number + self._stretch, 2 * self._stretch
            else:
                self._high = number
            if self._high - self._low == 1 and (self._high in self._taken or self._high * self._step > LARGEST):
                return self._low * self._step
            number = min(max(self._next(), self._low + 1), max(self._high - 1, self._low + 1))

    def _next(self) -> int:
        """By the line while a bound is far from the limit; then by halving, for that always comes to an end."""
        low, high, limit = self._low, self._high, self._limit
        if low == 0:
            return high // FIRST_GROWTH
        if high not in self._taken:
            if self.trials == 1:
                return FIRST_GROWTH * low
            if self._taken[low] < LEAST_SHARE * limit:
                return min(self._by_line(FIRST_SHARE * limit), MOST_GROWTH * low)
            if high * self._step > LARGEST:
                self._high = high = max(low + 1, self._by_line(limit) + 1)  # tensors cannot take more than there is
            return (low + high) // 2
        most = min(self._taken[high], limit)
        if self._taken[low] < LEAST_SHARE * most and self.trials < TRIALS_BY_LINE:
            guess = self._by_line((LEAST_SHARE + 1) / 2 * most)
            if low < guess < high:
                return guess
        return (low + high) // 2

    def _by_line(self, wanted: float) -> int:
        """Where the line through two trials takes so much; far away where there is no such line.

        The two are the largest that fit, where there are two: a run without limit takes more than one that has to fit.
        """
        fit = sorted(number for number in self._taken if number <= self._low)
        near = fit[-2:] if len(fit) > 1 else list(self._taken)[:2]
        first, second = min(near), max(near)
        rise = self._taken[second] - self._taken[first]
        return LARGEST if rise <= 0 else first + int((wanted - self._taken[first]) * (second - first) / rise)
