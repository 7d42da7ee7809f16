"""Arrays are estimated by a few of their elements: where those agree, they speak for the rest.

The first, the last and what lies evenly between them are taken, since what grows with the index is largest at an end.
Where they do not agree, or have read different files, every element is estimated for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ullage.manager.core.estimates import EstimateAnswer

_NEARLY = 0.02  # of the largest answer: answers that differ by no more agree


def choose(elements: Collection[int], count: int) -> list[int]:
    """So many of the elements, evenly from the first to the last.

    >>> choose(range(1, 21), 3), choose([5, 7], 3)
    ([1, 11, 20], [5, 7])
    """
    ordered = list(elements)
    if len(ordered) <= max(count, 1):
        return ordered
    if count == 1:
        return ordered[:1]
    return [ordered[round(place * (len(ordered) - 1) / (count - 1))] for place in range(count)]


def agreed(answers: Mapping[int, EstimateAnswer]) -> EstimateAnswer | None:
    """The answer for elements that were not estimated, from those (by index) that were; `None` if these do not agree.

    >>> agreed({1: EstimateAnswer(100, "by a"), 9: EstimateAnswer(101, "by a")})
    EstimateAnswer(upper=101, note='by a (as elements 1 and 9: the largest of 2 estimates)', ...)
    >>> agreed({1: EstimateAnswer(100, "by a"), 9: EstimateAnswer(200, "by a")}) is None
    True
    """
    if len({answer.upper is None for answer in answers.values()}) != 1:
        return None
    largest = max(answers.values(), key=lambda answer: answer.upper or 0)
    least = min(answer.upper or 0 for answer in answers.values())
    if (largest.upper or 0) - least > _NEARLY * (largest.upper or 0):
        return None
    if any(answer.own_failure != largest.own_failure for answer in answers.values()):
        return None
    if len({_files(answer) for answer in answers.values()}) > 1:
        return None  # each has a configuration of its own, say, and another one may ask for more
    which = _listed(sorted(answers))
    of = "" if largest.upper is None else f": the largest of {len(answers)} estimates" if len(answers) > 1 else ""
    note = f"{largest.note} (as {which}{of})"
    return EstimateAnswer(
        largest.upper,
        note,
        own_failure=largest.own_failure,
        utilization=largest.utilization,
        breakdown=largest.breakdown,
        by_rank=largest.by_rank,
    )


def _files(answer: EstimateAnswer) -> frozenset[str]:
    """The files that it read."""
    files = {} if answer.reads is None else answer.reads.files
    return frozenset(path for path, signature in files.items() if signature.startswith(("sha256:", "large:")))


def _listed(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"element {indices[0]}"
    return f"elements {', '.join(map(str, indices[:-1]))} and {indices[-1]}"


class ArraySamples:
    """The elements of one array that wait for an estimate, by the numbers of their jobs."""

    def __init__(self, index_of: Mapping[int, int], count: int) -> None:
        self._index_of = dict(sorted(index_of.items(), key=lambda item: item[1]))
        self._count = count
        self._answers: dict[int, EstimateAnswer] = {}
        self.asked: set[int] = set()

    def ask(self) -> list[int]:
        """The jobs to estimate first."""
        chosen = choose(self._index_of, self._count)
        self.asked = set(chosen)
        return chosen

    def take(self, job: int, answer: EstimateAnswer | None) -> None:
        """The answer for one of them; `None` if it does not wait any more, or not among these."""
        self.asked.discard(job)
        index = self._index_of.pop(job)
        if answer is not None:
            self._answers[index] = answer

    @property
    def rest(self) -> list[int]:
        """The jobs that have no answer yet."""
        return list(self._index_of)

    @property
    def is_undecided(self) -> bool:
        """Whether none of those that were asked about has an answer, so that others have to be asked."""
        return not self._answers

    def agreed(self) -> EstimateAnswer | None:
        """The answer for the rest; `None` if each has to be estimated for itself."""
        return agreed(self._answers) if self._answers else None

    def standing(self) -> str:
        """What the rest waits for, in words that go on after "the job"."""
        waits = sorted(self._index_of[job] for job in self.asked)
        return f"waits for the estimate of {_listed(waits)} of its array"
