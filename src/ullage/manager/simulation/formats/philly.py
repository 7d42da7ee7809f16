"""Microsoft's Philly trace (github.com/msr-fiddle/philly-traces): the file cluster_job_log, a JSON list of jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Assignment, PublicJob
from ullage.manager.simulation.formats.files import left_out, opened, seconds_of
from ullage.manager.simulation.trace import JobTrace

NAME, TITLE = "philly", "Microsoft Philly, cluster_job_log (JSON: jobid, submitted_time, attempts)"
FILES: tuple[str, ...] = ("cluster_job_log", "cluster_job_log.json")
_NOTE = "a job's work is the sum of its attempts' run times, on the most GPUs that one of them had"


def recognises(text: str) -> bool:
    return text.lstrip()[:1] == "[" and '"submitted_time"' in text and '"attempts"' in text


def read(path: Path, assignment: Assignment) -> JobTrace:
    with opened(path) as file:
        try:
            found = json.load(file)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(found, list):
        raise InvalidValue(f"{path}: needed a list of jobs; found {type(found).__name__}")
    jobs = [_job(f"{path}, job {number}", values) for number, values in enumerate(found, 1)]
    kept = [job for job in jobs if job.gpus > 0 and job.run_s > 0]
    return assignment.trace(path.name, kept, [_NOTE, *left_out(len(jobs) - len(kept))])


def _job(where: str, values: Any) -> PublicJob:
    """A job; attempts whose begin or end was not recorded do not count."""
    try:
        attempts = [
            attempt for attempt in values["attempts"] if _known(attempt, "start_time") and _known(attempt, "end_time")
        ]
        run_s = sum(seconds_of(attempt["end_time"]) - seconds_of(attempt["start_time"]) for attempt in attempts)
        gpus = max((sum(len(server["gpus"]) for server in attempt["detail"]) for attempt in attempts), default=0)
        return PublicJob(seconds_of(values["submitted_time"]), run_s, gpus, str(values.get("user") or "user"))
    except KeyError as error:
        raise InvalidValue(f"{where}: needed {error.args[0]}; it is not there") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidValue(f"{where}: needed a job as Philly's cluster_job_log has them; {error}") from None


def _known(attempt: Mapping[str, Any], key: str) -> bool:
    return attempt.get(key) not in (None, "None", "")
