"""Plans the submission of a job to Slurm: reads its script, sizes its request, and returns the words for sbatch."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimation.jobs.slurm_words import read_words
from ullage.home import home
from ullage.jobs.job_files import make_job
from ullage.manager.core.estimates import (
    EstimateAnswer,
    EstimateQuestion,
    EstimateRequest,
    Estimates,
    key_of,
    reason_of,
)
from ullage.manager.running.launcher import write_whole
from ullage.manager.settings import EstimateSettings
from ullage.manager.slurm.batch_script import BatchScript, BatchTraining, Hints, read_batch, read_file
from ullage.manager.slurm.commands import parse_gres, read_comment, write_comment
from ullage.manager.slurm.sbatch_options import GpuRequest, gpu_request
from ullage.manager.slurm.site import GpuKind, Site, read_site
from ullage.manager.slurm.sizing import GpuNeed, Sizing, size
from ullage.performance.result import Utilization
from ullage.units import format_bytes

TIMEOUT = 300.0  # time limit for one script, in seconds
_GRACE = 40.0  # more seconds until its process is killed, since a stopped script also has an estimate
_NO_GPU = "never used the GPU"  # in the note of a script that finished without using the GPU
_MOST_SCRIPTS = 8  # most scripts of a batch script to estimate
_GIVEN_TWICE = (
    "this Slurm may give it GPUs of which other jobs have shards; name a partition whose nodes have no shards "
    "(Slurm 23.11.5 and later count GPUs rightly)"
)


@dataclass(frozen=True)
class SubmissionPlan:
    """The plan for a job. `options` for sbatch, by their long names, override those that it has."""

    options: Mapping[str, str] = field(default_factory=dict)
    sizing: Sizing | None = None
    trainings: tuple[str, ...] = ()
    estimate: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    left_alone: str | None = None

    @property
    def words(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self.options.items()]

    def to_dict(self) -> dict[str, Any]:
        return {
            "gres": self.sizing.gres if self.sizing else None,
            "why": self.sizing.why if self.sizing else self.left_alone,
            "options": dict(self.options),
            "scripts": list(self.trainings),
            "estimate": dict(self.estimate) if self.estimate else None,
            "notes": list(self.notes),
        }


def plan_words(words: Sequence[str], text: str | None = None, **more: Any) -> SubmissionPlan:
    """Plan `sbatch WORDS`. `text` is a script from standard input; `more` are arguments of `plan_job`."""
    given = read_words(words)
    arguments: Sequence[str] = given.rest[1:]
    if "wrap" in given.values:
        text, arguments = f"#!/bin/sh\n{given.values['wrap']}\n", ()
    elif given.rest:
        text = read_file(given.rest[0])
    elif text is None:
        raise InvalidValue("a batch script such as job.sh, or --wrap COMMAND, must be given, got neither")
    return plan_job(text, given.values, arguments, **more)


def plan_job(
    text: str,
    options: Mapping[str, str],
    arguments: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
    timeout: float = TIMEOUT,
    **changed_hints: Any,
) -> SubmissionPlan:
    """Plan a batch script with sbatch's other options. `changed_hints` override the script's hints."""
    batch = read_batch(text, os.getcwd(), os.environ, options, arguments)
    hints = replace(batch.hints, **changed_hints)
    request = gpu_request(batch.options)
    if read_comment(batch.options.get("comment", "")) is not None:
        return SubmissionPlan(left_alone="it was sized before")
    if request.shards is not None:
        others = dict.fromkeys(request.options, "0")  # Slurm allocates shards or GPUs, not both
        return SubmissionPlan(others, left_alone=f"it asks for {request.shards} shards itself")
    site = read_site(batch.options.get("partition"), request.type, hints.gpu)
    ranks = max((each.ranks_per_node for each in batch.trainings), default=1)
    gpus = request.per_node or ranks
    if gpus > max(kind.per_node for kind in site.kinds):
        most = max(kind.per_node for kind in site.kinds)
        raise InvalidValue(
            f"the job can never run: it asks for {gpus} GPUs on a node, and a node has at most {most}. "
            "Ask for fewer, or for more nodes with --nodes"
        )
    if request.per_node is not None and not hints.estimate and hints.memory is None:
        notes = (_GIVEN_TWICE,) if site.gives_gpus_twice else ()
        return SubmissionPlan(left_alone="no estimate is wanted", notes=notes)
    needs, answers = _needs(batch, hints, site, timeout, progress)
    sizing = size(needs, request, site, ranks, hints)
    return _plan(batch, request, sizing, answers, _GIVEN_TWICE if site.gives_gpus_twice else None)


def _needs(
    batch: BatchScript, hints: Hints, site: Site, timeout: float, progress: Callable[[str], None] | None
) -> tuple[list[GpuNeed], list[EstimateAnswer]]:
    if hints.memory is not None:
        return [GpuNeed(kind, hints.memory) for kind in site.kinds], []
    why = "" if hints.estimate else "no estimate is wanted"
    why = why or (f"it cannot be estimated: {batch.refusal}" if batch.refusal else "")
    if len(batch.trainings) > _MOST_SCRIPTS:
        why = f"it cannot be estimated: it runs {len(batch.trainings)} different scripts"
    if why:
        return [GpuNeed(site.kinds[-1], None, why=why)], []
    all_answers, needs = [], []
    for kind in site.kinds:
        answers = []
        for training in batch.trainings:
            if progress is not None:
                progress(f"running {training.command.source} on a virtual {kind.gpu.name}")
            answers.append(estimate_training(training, kind.gpu.name, hints.network, timeout))
        all_answers += answers
        needs.append(_need(kind, batch.trainings, answers))
        if needs[-1].upper is None:
            break
    return needs, all_answers


def estimate_training(training: BatchTraining, gpu: str, network: bool, timeout: float) -> EstimateAnswer:
    """Estimate the memory of a script on a GPU as the daemon does for jobs, with the user's rights. The answer is
    cached in the user's folder until one of its inputs changes."""
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
    answer = asyncio.run(_answer_to(replace(request, cached=_cached_answers(file, request)), rules))
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


def _cached_answers(file: Path, request: EstimateRequest) -> list[EstimateAnswer]:
    """Return the answer in a file if it is for the same variables; the service compares the files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = EstimateAnswer.from_dict(json.loads(file.read_bytes()))
        if answer.reads is not None and answer.reads.same_variables(request.variables):
            return [answer]
    return []


def _keep(file: Path, answer: EstimateAnswer) -> None:
    """Cache an answer; ignore a failure to write it."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, answer.to_dict(), mode=0o600)


def _need(kind: GpuKind, trainings: Sequence[BatchTraining], answers: Sequence[EstimateAnswer]) -> GpuNeed:
    """Return the job's need: the largest of successive scripts plus the sum of those in the background."""
    pairs = [pair for pair in zip(trainings, answers, strict=True) if _NO_GPU not in pair[1].note]
    failed = [answer for answer in answers if _NO_GPU not in answer.note and answer.upper is None]
    if failed or not pairs:
        return GpuNeed(kind, None, why=f"it cannot be estimated: {reason_of((failed or answers)[0])}")
    taken = [(training.at_once, (answer.upper or 0) * training.on_each_gpu) for training, answer in pairs]
    at_once = sum(upper for together, upper in taken if together)
    alone = max((upper for together, upper in taken if not together), default=0)
    training, answer = pairs[0]
    known = answer.utilization.get(kind.gpu.name) if len(pairs) == training.on_each_gpu == 1 else None
    return GpuNeed(kind, at_once + alone, Utilization.from_dict(known) if known else None)


def _plan(
    batch: BatchScript, request: GpuRequest, sizing: Sizing, answers: Sequence[EstimateAnswer], of_gpus: str | None
) -> SubmissionPlan:
    """Return the plan; `of_gpus` is a note for a job that requests GPUs."""
    options: dict[str, str] = {}
    notes = [*batch.notes, *([of_gpus] if of_gpus and sizing.name == "gpu" else [])]
    if sizing.name == "shard" or request.per_node is None or sizing.type != request.type:
        words = filter(None, batch.options.get("gres", "").split(","))
        others = [word for word in words if not {gres.name for gres in parse_gres(word)} & {"gpu", "shard"}]
        options["gres"] = ",".join([sizing.gres, *others])
        options |= dict.fromkeys(request.options, "0")
    need = sizing.need
    estimate = None
    if need is not None and need.upper is not None:
        estimate = {
            "upper": need.upper,
            "gpu": need.kind.gpu.name,
            "seconds": round(sum(each.seconds for each in answers if not each.cached), 1),
            "kept": bool(answers) and all(each.cached for each in answers),
            "world_size": max((each.ranks.get("world_size", 1) for each in batch.trainings), default=1),
        }
        comment: dict[str, Any] = {"upper": need.upper, "gpu": need.kind.gpu.name, f"{sizing.name}s": sizing.count}
        options["comment"] = write_comment(comment, batch.options.get("comment", ""))
    if request.nodes > 1 and sizing.name == "shard":
        notes.append(f"each of its {request.nodes} nodes is asked for {sizing.gres}")
    return SubmissionPlan(options, sizing, tuple(each.shown for each in batch.trainings), estimate, tuple(notes))


def plan_in_words(plan: SubmissionPlan) -> list[str]:
    """Return the estimate and the request in words, a line each."""
    if plan.sizing is None:
        return [f"left as it is: {plan.left_alone}", *(f"note: {note}" for note in plan.notes)]
    lines = []
    if plan.estimate is not None:
        what = "; ".join(plan.trainings) or "the job"
        spent = "kept from before" if plan.estimate["kept"] else f"{plan.estimate['seconds']:g} s, without a GPU"
        ranks = plan.estimate["world_size"]
        rank = f", as one of {ranks} ranks" if ranks > 1 else ""
        memory = f"at most {format_bytes(plan.estimate['upper'])} on {plan.estimate['gpu']}{rank}"
        lines.append(f"{what}: {memory}" + (f" ({spent})" if plan.trainings else ""))
    own = f"{plan.sizing.gres}, as the job asks for itself"
    request = f"--gres={plan.options['gres']}" if "gres" in plan.options else own
    lines.append(f"{request}: {plan.sizing.why}")
    return lines + [f"note: {note}" for note in plan.notes]


def filter_answers(request: Mapping[str, Any], text: str = "") -> Iterator[tuple[str, str]]:
    """Yield the answers for `cli_filter.lua`: options to set, by name, and texts to `say`. Jobs without GPUs and
    `#ULLAGE` lines stay unchanged.

    `request` has sbatch's options, with the script and its arguments as `argv`; `text` is a script from standard input.
    """
    options = {name: str(value) for name, value in request.items() if name != "argv"}
    words = [str(word) for word in request.get("argv", [])]
    if "wrap" in options:
        text = f"#!/bin/sh\n{options['wrap']}\n"
    elif words:
        text = read_file(words[0])
    elif not text.startswith("#!"):
        return  # for example, sbatch has already read it from a pipe
    if gpu_request(options).per_node is None and "#ULLAGE" not in text:
        return
    plan = plan_job(text, options, words[1:])
    yield from plan.options.items()
    if plan.sizing is not None or plan.notes:
        for line in plan_in_words(plan):
            yield "say", line
