"""What would become of a submission now: decided by what places jobs, on the ledger as it is. Nothing is kept."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ullage.manager.core.context import ManagerContext
from ullage.manager.core.dependencies import Dependencies, waits_for
from ullage.manager.core.intake import Intake
from ullage.manager.core.scheduler import Scheduler
from ullage.manager.identity import Caller
from ullage.manager.storage.records import JobRecord, State
from ullage.placement import Decision
from ullage.units import format_moment
from ullage.workloads.job_files import JobSpec

_TO_ESTIMATE = "its memory is estimated first; 'ullage estimate' shows how much it needs, and --memory says it"
_MOST_TRIED = 1000  # jobs of an array


class Trials:
    """Tries submissions out."""

    def __init__(self, context: ManagerContext, intake: Intake, scheduler: Scheduler) -> None:
        self._context, self._intake, self._scheduler = context, intake, scheduler
        self._dependencies = Dependencies(context.store)

    def of(self, caller: Caller, spec: JobSpec) -> Generator[None, None, dict[str, Any]]:
        """Which jobs would start now and where, and why the first of the others would wait, and behind whom."""
        count = len(spec.array or [0])
        tried = spec if spec.array is None else spec.with_changes(array=spec.array[:_MOST_TRIED])
        made = yield from self._intake.try_out(caller, tried, count)
        first, needs = made[0]
        answer: dict[str, Any] = {
            "jobs": count, "state": first.state.value, "starts": [], "reason": None, "ahead": [],
            "estimate": first.estimate_note, "promise": first.promise,
        }  # fmt: skip
        waits = [need for need in needs if not self._dependencies.is_over(need)]
        failed = [why for need in needs if need not in waits and (why := self._dependencies.failed(need))]
        if failed:
            answer["reason"] = f"would be cancelled: {failed[0]}"
        elif first.state is State.HELD:
            answer["reason"] = "it is held until 'ullage release'"
        elif first.state is State.ESTIMATING:
            answer["reason"] = _TO_ESTIMATE
        elif waits:
            answer["reason"] = waits_for(waits)
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
        new = {job.id: job.array_index for job in jobs}
        answer["starts"] = [self._start(decision, new) for decision in outcome.placed if decision.job in new]
        for waits in outcome.waiting:
            if waits.job in new:
                answer["reason"] = waits.reason
                break
            answer["ahead"].append(waits.job)
        if answer["reason"] is None:
            answer["ahead"] = []

    def _start(self, decision: Decision, new: dict[int, int | None]) -> dict[str, Any]:
        index = {slot.id: slot.index for slot in self._context.slots}
        return {
            "index": new[decision.job], "gpus": [index[slot] for slot in decision.slots], "promise": decision.promise,
            "alone": decision.exclusive,
        }  # fmt: skip
