"""Dependencies between jobs: resolves references to jobs, refuses cycles, and settles dependencies on finished jobs."""

import re
from collections.abc import Callable, Iterable, Sequence

from ullage.errors import InvalidValue, JobNotFound
from ullage.jobs.schedules import INDEX, MOST_DEPENDENCIES, Dependency
from ullage.manager.identity import Caller
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import Need, State

_ARRAY = re.compile(r"(\d{1,18})_(\d{1,10}|all|\{index\})")
_AT_A_TIME = 500  # jobs settled in one transaction
_SHOWN = 5  # most dependencies named in a sentence


class Dependencies:
    """The dependencies between the jobs of a store."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.unsettled = False  # whether `settle` has more to do in another transaction

    def finder(
        self, caller: Caller, after: Sequence[Dependency], array: bool
    ) -> Callable[[int | None], tuple[Need, ...]]:
        common = [need for each in after if INDEX not in str(each.job) for need in self._needs(caller, each)]
        alike = [(each, self._elements(each, array)) for each in after if INDEX in str(each.job)]
        if len(common) + len(alike) > MOST_DEPENDENCIES:
            raise InvalidValue(f"a job can wait for at most {MOST_DEPENDENCIES} jobs, got {len(common) + len(alike)}")

        def of(index: int | None) -> tuple[Need, ...]:
            needs = list(common)
            for each, elements in alike:
                if index is None or index not in elements:
                    raise JobNotFound(str(each.job).replace(INDEX, str(index)))
                needs.append(Need(elements[index], False, each.kind))
            kinds: dict[tuple[int, bool], Need] = {}
            for need in needs:
                kinds[need.job, need.whole] = (
                    need if kinds.get((need.job, need.whole), need).kind == "any" else (need._replace(kind="ok"))
                )
            return tuple(kinds.values())

        return of

    def _elements(self, each: Dependency, array: bool) -> dict[int, int]:
        """Return the jobs of the array that `12_{index}` names, by index."""
        match = _ARRAY.fullmatch(str(each.job))
        if match is None or match[2] != INDEX:
            raise InvalidValue(f"{INDEX} must follow an array, such as 12_{INDEX}, got {str(each.job)[:80]!r}")
        if not array:
            raise InvalidValue(f"only a job of an array has an index: {each.job} needs --array too")
        indices = self._store.history.indices(int(match[1]))
        if not indices:
            raise JobNotFound(str(each.job))
        return indices

    def _needs(self, caller: Caller, each: Dependency) -> list[Need]:
        if isinstance(each.job, int):
            return [Need(self._store.job(each.job).id, False, each.kind)]
        match = _ARRAY.fullmatch(each.job)
        if match is None:
            return [Need(number, whole, each.kind) for number, whole in self._named(caller, each.job)]
        index = None if match[2] == "all" else int(match[2])
        jobs = self._store.history.of_array(int(match[1]), *([] if index is None else [index]))
        if not jobs:
            raise JobNotFound(each.job)
        return [Need(int(match[1]), True, each.kind) if index is None else Need(jobs[0], False, each.kind)]

    def _named(self, caller: Caller, name: str) -> Iterable[tuple[int, bool]]:
        """Return the caller's unfinished jobs of a name, or else the newest; an array counts as a whole."""
        numbers = self._store.history.named(name, caller.uid)
        if not numbers:
            raise JobNotFound(repr(name[:80]))
        waiting = [number for number in numbers if number in self._store.jobs] or numbers[-1:]
        jobs = self._store.several(waiting)
        return dict.fromkeys((job.id, False) if job.array_id is None else (job.array_id, True) for job in jobs)

    def reached(self, needs: Iterable[Need]) -> set[int]:
        """Return all jobs that these dependencies lead to, directly or indirectly."""
        seen: set[int] = set()
        ahead = set(needs)
        while ahead:
            new = {number for need in ahead for number in self._numbers(need)} - seen
            seen |= new
            ahead = {need for needs_of_job in self._store.needs(new).values() for need in needs_of_job}
        return seen

    def settle(self) -> None:
        """Settle some dependencies on finished jobs in one transaction; `unsettled` tells if more are left."""
        store, settled, self.unsettled = self._store, dict[int, list[Need]](), False
        if not store.dependencies:
            return
        damaged = store.history.damaged.keys()  # the end of an unreadable job is unknown
        live, arrays = store.jobs.keys() | damaged, {job.array_id for job in store.jobs.values()}
        for number, needs in store.dependencies.items():
            over = [need for need in needs if need.job not in (arrays if need.whole else live)]
            if damaged:
                over = [need for need in over if damaged.isdisjoint(self._numbers(need))]
            if over and len(settled) == _AT_A_TIME:
                self.unsettled = True
                break
            if over:
                settled[number] = over
        if settled:
            self._settle(settled)

    def _settle(self, settled: dict[int, list[Need]]) -> None:
        store, ended = self._store, {need for over in settled.values() for need in over}
        states = store.history.states(need.job for need in ended if not need.whole)
        bad = {need: self._why(need, states.get(need.job)) for need in ended}
        for number, over in settled.items():
            failed = next((bad[need] for need in over if bad[need]), None)
            if failed is not None:
                store.move(store.job(number), "withdraw", State.CANCELLED, failed, detail=failed)
            else:
                store.wait_for(number, tuple(need for need in store.dependencies[number] if need not in over))

    def names(self, needs: Iterable[Need]) -> str:
        return ", ".join(need.text(self._store.name_of) for need in needs)

    def is_over(self, need: Need) -> bool:
        return not any(number in self._store.jobs for number in self._numbers(need))

    def failed(self, need: Need) -> str | None:
        return self._why(need, None if need.whole else self._store.job(need.job).state)

    def _why(self, need: Need, state: str | None) -> str | None:
        text = f"{need.text(self._store.name_of)}, which it needs, did not end well"
        if need.kind == "any":
            return None
        if not need.whole:
            return None if state == State.DONE else text
        ended = self._store.history.not_done(need.job)
        return None if ended is None else f"{text} ({need.job}_{ended[0]} {ended[1]})"

    def _numbers(self, need: Need) -> list[int]:
        return self._store.history.of_array(need.job) if need.whole else [need.job]


def waits_for(needs: Iterable[Need], name: Callable[[int], str]) -> str:
    """Describe the dependencies of a job in words; `name` names a job by its number.

    >>> waits_for([Need(3, False, "ok"), Need(12, True, "any")], str)
    'waits for job 3, array 12'
    """
    words = [need.text(name) for need in sorted(needs)]
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return f"waits for {', '.join(words[:_SHOWN])}{more}"
