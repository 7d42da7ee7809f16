"""Watches running jobs against their promises and their time slots."""

from __future__ import annotations

from ullage.manager.attempts import Attempts
from ullage.manager.records import AttemptRecord, JobRecord
from ullage.manager.site import Site
from ullage.manager.states import State
from ullage.units import format_bytes


class Guarding:
    """Looks at running jobs; what they may not do is reported and, by the site's choice, ended."""

    def __init__(self, site: Site, attempts: Attempts) -> None:
        self._site, self._attempts = site, attempts

    def look(self) -> None:
        """Once over all that run."""
        for number, attempt in list(self._site.book.attempts.items()):
            job = self._site.book.job(number)
            if job.state is State.RUNNING:
                self._memory(job, attempt)
                self._slot(job, attempt)

    def _memory(self, job: JobRecord, attempt: AttemptRecord) -> None:
        site = self._site
        held = site.taken.get(attempt.token, {})
        promised, rules = attempt.promised, site.settings.running
        too_much = {slot: taken for slot, taken in held.items() if taken > (promised or 0) + rules.tolerance}
        if promised is None or attempt.exclusive or not too_much:
            return
        slot, taken = max(too_much.items(), key=lambda item: item[1])
        text = f"took {format_bytes(taken)} on {slot}; {format_bytes(promised)} were promised"
        if attempt.token not in site.warned:
            site.warned.add(attempt.token)
            site.book.event("over promise", job, text, attempt.number)
            site.say(f"job {job.label} {text}")
        if rules.over_promise == "stop" and self._others_in_danger(attempt, slot):
            self._attempts.stop(job, "over-promise", text)

    def _others_in_danger(self, attempt: AttemptRecord, slot: str) -> bool:
        """Whether what others were promised there and have not taken yet is more than what is left."""
        site = self._site
        found = next((each for each in site.slots if each.id == slot), None)
        if found is None or found.used is None:
            return False
        missing = 0
        for other in site.book.attempts.values():
            if slot in other.slots and other.token != attempt.token:
                missing += max(0, (other.promised or 0) - site.taken.get(other.token, {}).get(slot, 0))
        return missing > found.total - found.used

    def _slot(self, job: JobRecord, attempt: AttemptRecord) -> None:
        """A time slot ends for a job that can resume, and only if somebody waits who could have its place."""
        rules = self._site.settings.fairness
        if rules.slot is None or not job.spec["asked"]["resumable"]:
            return
        own = job.spec["asked"]["checkpoint_lead"]
        lead = rules.checkpoint_lead if own is None else own
        ran = self._site.launcher.running_for(self._site.attempt_folder(attempt))
        if ran is not None and ran >= max(0.0, rules.slot - lead) and self._somebody_waits():
            self._attempts.stop(job, "slot-end", f"its time slot ends; it has {lead:g} s to save itself")

    def _somebody_waits(self) -> bool:
        site = self._site
        return any(job.state is State.QUEUED and job.id in site.reasons for job in site.book.jobs.values())
