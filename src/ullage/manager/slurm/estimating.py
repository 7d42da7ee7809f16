"""Estimates of batch scripts where they are submitted: made as the daemon makes those of jobs, with the user's rights.
An answer is kept in the user's folder until one of its inputs changes."""

import asyncio
import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

from ullage.home import home
from ullage.jobs.job_files import make_job
from ullage.manager.core.estimates import EstimateAnswer, EstimateQuestion, EstimateRequest, Estimates, key_of
from ullage.manager.running.launcher import write_whole
from ullage.manager.settings import EstimateSettings
from ullage.manager.slurm.batch_script import BatchTraining

TIMEOUT = 300.0  # seconds for one script
_GRACE = 40.0  # seconds more until its process is ended: a script that was stopped has an estimate too


def estimate_training(
    training: BatchTraining, gpu: str, network: bool = False, timeout: float = TIMEOUT
) -> EstimateAnswer:
    """How much memory a script of a batch script takes on a GPU."""
    rules = EstimateSettings(timeout=timeout + _GRACE, network=network)
    questions = [EstimateQuestion.of_script(training.command, {**training.ranks, "timeout": timeout})]
    where = {"cwd": training.folder, "env": training.environment}
    job = make_job({"command": [training.command.source], **where}, "the script")
    request = EstimateRequest(
        key=key_of(job, os.getuid(), rules.estimator, [gpu], questions),
        uid=os.getuid(),
        estimator=rules.estimator,
        questions=questions,
        gpus=[gpu],
        env=training.environment,
        cwd=training.folder,
        conda=None,
        rights={},
    )
    file = home() / "slurm" / "answers" / f"{request.key}.json"
    answer = asyncio.run(_answer_to(replace(request, cached=_kept(file, request)), rules))
    if answer.reads is not None and not answer.cached:
        _keep(file, answer)
    return answer


async def _answer_to(request: EstimateRequest, rules: EstimateSettings) -> EstimateAnswer:
    answered = asyncio.get_running_loop().create_future()
    estimates = Estimates(rules, lambda ids, request, answer: answered.set_result(answer))
    try:
        estimates.want(request.key, request)
        answer: EstimateAnswer = await answered
        return answer
    finally:
        await estimates.close()


def _kept(file: Path, request: EstimateRequest) -> list[EstimateAnswer]:
    """Return the answer in a file if it is for the same variables; the service compares the files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = EstimateAnswer.from_dict(json.loads(file.read_bytes()))
        if answer.reads is not None and answer.reads.same_variables(request.variables):
            return [answer]
    return []


def _keep(file: Path, answer: EstimateAnswer) -> None:
    """Keep an answer for the next time. Where that is not possible it is asked again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, answer.to_dict(), mode=0o600)
