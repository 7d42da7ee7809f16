"""What would become of a submission now: decided by what places jobs, on the ledger as it is. Nothing is kept."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ullage.jobs.job_files import JobSpec
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.dependencies import Dependencies, waits_for
from ullage.manager.core.intake import Intake, what_runs
from ullage.manager.core.scheduler import Scheduler
from ullage.manager.identity import Caller
from ullage.manager.placement import Decision, Slot
from ullage.manager.storage.records import JobRecord, State
from ullage.units import format_moment

_TO_ESTIMATE = "its memory is estimated first; 'ullage estimate' shows how much it needs, and --memory says it"
_MOST_TRIED = 1000  # jobs of an array
Expected = tuple[int, dict[str, dict[str, Any]], str]  # bytes on a GPU, what a step does by GPU, and who says so


class Trials:
    """Tries submissions out."""

    def __init__(self, context: ManagerContext, intake: Intake, scheduler: Scheduler) -> None:
        self._context, self._intake, self._scheduler = context, intake, scheduler
        self._dependencies = Dependencies(context.store)

    def of(
        self, caller: Caller, spec: JobSpec, expected: Expected | None = None
    ) -> Generator[None, None, dict[str, Any]]:
        """Which jobs would start now and where, why the first of the others would wait and behind whom, and what it
        would do to the jobs of others."""
        if expected is not None:
            spec = spec.with_changes(memory=expected[0])
        count = len(spec.array or [0])
        tried = spec if spec.array is None else spec.with_changes(array=spec.array[:_MOST_TRIED])
        made = yield from self._intake.try_out(caller, tried, count)
        if expected is not None:
            _, predicted, note = expected
            work = self._context.works.expect(caller.uid, what_runs(made[0][0]), predicted)
            made = [(replace(job, work=work, estimate_note=note), needs) for job, needs in made]
        first, needs = made[0]
        answer: dict[str, Any] = {
            "jobs": count,
            "state": first.state.value,
            "starts": [],
            "reason": None,
            "ahead": [],
            "behind": [],
            "beside": [],
            "held_up": [],
            "references": {},
            "estimate": first.estimate_note,
            "promise": first.promise,
        }
        waits = [need for need in needs if not self._dependencies.is_over(need)]
        failed = [why for need in needs if need not in waits and (why := self._dependencies.failed(need))]
        if failed:
            answer["reason"] = f"would be cancelled: {failed[0]}"
        elif first.state is State.HELD:
            answer["reason"] = "it is held until 'ullage edit --release'"
        elif first.state is State.ESTIMATING:
            answer["reason"] = _TO_ESTIMATE
        elif waits:
            answer["reason"] = waits_for(waits, self._context.store.name_of)
        elif spec.begin is not None and spec.begin > self._context.clock():
            answer["reason"] = f"starts at {format_moment(spec.begin)} at the earliest"
        elif why := self._intake.limits.why_not(first, spec.gpus, self._intake.limits.gpus_held()):
            answer["reason"] = why
        else:
            yield from self._place([job for job, _ in made], spec.throttle, answer)
        return answer

    def _place(
        self, jobs: list[JobRecord], throttle: int | None, answer: dict[str, Any]
    ) -> Generator[None, None, None]:
        outcome = yield from self._scheduler.try_out(jobs, throttle)
        new = {job.id: job for job in jobs}
        starts = [decision for decision in outcome.placed if decision.job in new]
        speeds, answer["beside"] = self._side_by_side(starts, new)
        answer["starts"] = [self._start(decision, new[decision.job], speeds[decision.job]) for decision in starts]
        waiting = [waits.job for waits in outcome.waiting]
        first = next((waits for waits in outcome.waiting if waits.job in new), None)
        if first is not None:
            place = waiting.index(first.job)
            answer["reason"], answer["ahead"] = first.reason, waiting[:place]
            answer["behind"] = [number for number in waiting[place:] if number not in new]
        if starts:
            yield
            without = yield from self._scheduler.try_out([], None)
            placed = {decision.job for decision in outcome.placed}
            held_up: dict[int, int | None] = {each.job: None for each in without.placed if each.job not in placed}
            held_up |= self._scheduler.held_up(starts, jobs)
            answer["held_up"] = [{"job": number, "until": end} for number, end in held_up.items()]
        told = [*answer["ahead"], *(each["job"] for each in answer["beside"])]
        told += [number for each in answer["held_up"] for number in each.values() if number is not None]
        names = {number: self._context.store.name_of(number) for number in told}
        answer["references"] = {str(number): name for number, name in names.items() if name != str(number)}

    def _side_by_side(
        self, starts: Sequence[Decision], new: Mapping[int, JobRecord]
    ) -> tuple[dict[int, float | None], list[dict[str, Any]]]:
        """What new jobs would have of their speeds, and what those have, and would have, beside whom they would run."""
        own: dict[int, float | None] = {decision.job: 1.0 for decision in starts}
        beside = []
        for slot in self._context.slots:
            joining = [new[decision.job] for decision in starts if slot.id in decision.slots]
            if not joining:
                continue
            attempts = self._context.store.attempts.values()
            here = [self._context.store.job(each.job) for each in attempts if slot.id in each.slots]
            now, then = self._speeds(here, slot), self._speeds([*here, *joining], slot)
            for job, before, after in zip(here, now, then, strict=False):
                beside.append({"job": job.id, "gpu": slot.index, "speed": before, "then": after})
            for job, speed in zip(joining, then[len(here) :], strict=True):
                known = own[job.id]
                own[job.id] = None if speed is None or known is None else min(speed, known)
        return own, beside

    def _speeds(self, jobs: Sequence[JobRecord], slot: Slot) -> list[float | None]:
        """What jobs keep of their speeds on a slot; `None` where that is not known."""
        works = [job.work for job in jobs if job.work is not None]
        if len(jobs) < 2:
            return [1.0] * len(jobs)
        found = self._context.works.predict(works, slot) if len(works) == len(jobs) else None
        return [None] * len(jobs) if found is None else [*found.shares]

    def _start(self, decision: Decision, job: JobRecord, speed: float | None) -> dict[str, Any]:
        index = {slot.id: slot.index for slot in self._context.slots}
        return {
            "index": job.array_index,
            "gpus": [index[slot] for slot in decision.slots],
            "promise": decision.promise,
            "promises": list(decision.promises),
            "alone": decision.exclusive,
            "speed": speed,
        }
