"""Dry runs: the outcome of a submission, decided by the placement code with the current ledger. No job is stored."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ullage.jobs.job_files import JobSpec
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.dependencies import Dependencies, waits_for
from ullage.manager.core.intake import Intake, what_runs
from ullage.manager.core.scheduler import Scheduler
from ullage.manager.identity import Caller
from ullage.manager.placement import Decision
from ullage.manager.storage.records import JobRecord, Need, State
from ullage.units import format_moment

_TO_ESTIMATE = "its memory is estimated first; 'ullage estimate' shows how much it needs, and --memory says it"
_MOST_TRIED = 1000  # jobs of an array
Expected = tuple[int, dict[str, dict[str, Any]], str]  # bytes on a GPU, activity by GPU, and the source


class DryRuns:
    def __init__(self, context: ManagerContext, intake: Intake, scheduler: Scheduler) -> None:
        self._context, self._intake, self._scheduler = context, intake, scheduler
        self._dependencies = Dependencies(context.store)

    def of(
        self, caller: Caller, spec: JobSpec, expected: Expected | None = None
    ) -> Generator[None, None, dict[str, Any]]:
        """Return which jobs would start now and where, and for the others why and behind which jobs they would wait."""
        if expected is not None:
            spec = spec.with_changes(memory=expected[0])
        count = len(spec.array or [0])
        tried = spec if spec.array is None else spec.with_changes(array=spec.array[:_MOST_TRIED])
        made = yield from self._intake.try_out(caller, tried, count)
        if expected is not None:
            _, predicted, note = expected
            work = self._context.works.keep(caller.uid, what_runs(made[0][0]), predicted)
            made = [(replace(job, work=work, estimate_note=note), needs) for job, needs in made]
        first, needs = made[0]
        reason = self._obstacle(first, needs, spec)
        answer: dict[str, Any] = {"starts": [], "ahead": [], "behind": [], "references": {}}
        if reason is None:
            reason, answer = yield from self._place({job.id: job for job, _ in made}, spec.throttle)
        return {
            "jobs": count,
            "state": first.state.value,
            "estimate": first.estimate_note,
            "promise": first.promise,
            "reason": reason,
            **answer,
        }

    def _obstacle(self, job: JobRecord, needs: Sequence[Need], spec: JobSpec) -> str | None:
        """Return why the job would not reach placement, or `None`."""
        waits = [need for need in needs if not self._dependencies.is_over(need)]
        for need in needs:
            if need not in waits and (failed := self._dependencies.failed(need)):
                return f"would be cancelled: {failed}"
        if job.state is State.HELD:
            return "it is held until 'ullage edit --release'"
        if job.estimate_key and (self._context.settings.estimating.wait or self._intake.reads_summary(job)):
            return _TO_ESTIMATE
        if waits:
            return waits_for(waits, self._context.store.name_of)
        if spec.begin is not None and spec.begin > self._context.clock():
            return f"starts at {format_moment(spec.begin)} at the earliest"
        return self._intake.limits.why_not(job, spec.gpus, self._intake.limits.gpus_held())

    def _place(
        self, new: Mapping[int, JobRecord], throttle: int | None
    ) -> Generator[None, None, tuple[str | None, dict[str, Any]]]:
        outcome = yield from self._scheduler.try_out(list(new.values()), throttle)
        starts = [decision for decision in outcome.placed if decision.job in new]
        waiting = [waits.job for waits in outcome.waiting]
        first = next((waits for waits in outcome.waiting if waits.job in new), None)
        place = len(waiting) if first is None else waiting.index(first.job)
        ahead = waiting[:place] if first is not None else []
        names = {number: self._context.store.name_of(number) for number in ahead}
        return None if first is None else first.reason, {
            "starts": [self._start(decision, starts, new) for decision in starts],
            "ahead": ahead,
            "behind": [number for number in waiting[place:] if number not in new],
            "references": {str(number): name for number, name in names.items() if name != str(number)},
        }

    def _start(self, decision: Decision, starts: Sequence[Decision], new: Mapping[int, JobRecord]) -> dict[str, Any]:
        slots, store = {slot.id: slot for slot in self._context.slots}, self._context.store
        speeds = []
        for place in decision.slots:
            there = [store.job(each.job) for each in store.attempts.values() if place in each.slots]
            there += [new[each.job] for each in starts if place in each.slots and each.job != decision.job]
            works = [job.work for job in there]
            speeds.append(self._context.works.speed_beside(new[decision.job].work, works, slots[place]))
        return {
            "index": new[decision.job].array_index,
            "gpus": [slots[place].index for place in decision.slots],
            "promise": decision.promise,
            "promises": list(decision.promises),
            "alone": decision.exclusive,
            "speed": None if None in speeds else min([1.0, *(speed for speed in speeds if speed is not None)]),
        }
