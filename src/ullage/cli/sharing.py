"""`ullage share`: the speed of jobs that share a GPU."""

import json
import os
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from ullage.cli import completion
from ullage.cli.main import typed
from ullage.cli.options import (
    ALL,
    MODEL_OPTIONS,
    Gpu,
    Json,
    Pytorch,
    argument,
    default_gpu_hint,
    option,
    request_from,
    with_options,
)
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.asking import answer_request
from ullage.estimation.result import Estimate
from ullage.estimation.sharing import share as share_jobs
from ullage.hardware import GPU, default_gpu
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest
from ullage.jobs.kinds import SCRIPT, kind_of
from ullage.performance.sharing import HOWS, Sharing, profiles
from ullage.units import format_duration

_JOBS = "Two or more models, scripts, Python commands, or files from 'ullage estimate --json'."
_SHARING = "How jobs share the GPU: mps, time-slicing, mig or mig:PROFILE. Several (with commas) or 'all' to compare."
_CLASSES = "With gpuutilnet: print classes of activity, also from model summaries, and no speeds."
BUSY = 0.8  # SMACT up to which published policies add a job
_OF_A_JOB = {"args", "module", "steps", "timeout", "network", "python"}  # options in its quotes, with the model's


@with_options(MODEL_OPTIONS)
def share(
    jobs: Annotated[list[str], argument(_JOBS, "JOB JOB [JOB...]", completion.sources)],
    gpu: Gpu = None,
    pytorch: Pytorch = None,
    sharing: Annotated[str, option(_SHARING, "WAY", complete=completion.ways_to_share)] = "mps",
    estimator: Annotated[str, option(_CLASSES, "--estimator -e NAME", complete=completion.estimators)] = "ullage",
    as_json: Json = False,
    **model: Any,
) -> None:
    """Predict how fast jobs run when they share a GPU.

    Write each job as for 'ullage estimate', or as a Python command. Quote jobs with options; repeat a job for copies.
    Options outside quotes apply to all models.

    With MPS, kernels of all jobs run side by side. Time slicing gives the GPU to one process after the other. With
    MIG, each job has a part of the GPU; mig:PROFILE names it.

    Examples:

      ullage share torchvision:resnet50 torchvision:vit_b_16 --batch-size 16 --gpu H200
      ullage share "train.py -- --epochs 90" "python train.py --lr 0.1" --sharing time-slicing
    """
    if len(jobs) < 2:
        raise InvalidValue(f"share needs at least two jobs, got one; type: ullage share {jobs[0]} {jobs[0]}")
    ways = sharing.split(",")
    for way in ways:
        if way.partition(":")[0] not in (*HOWS, ALL):
            raise UnknownName("way of sharing", way, [*HOWS, ALL])
    targets = {text: _target(text, pytorch, estimator, model) for text in dict.fromkeys(jobs)}
    card = find_gpu(gpu or _gpu_of(targets.values()) or default_gpu())
    ways = [way for way in HOWS if way != "mig" or profiles(card)] if ways == [ALL] else ways
    answers: dict[str, Estimate] = {}
    with Console(stderr=True).status("") as status:
        for text, target in targets.items():
            status.update(f"running {text} on a virtual {card.name} ...")
            answers[text] = answer_request(target, card) if isinstance(target, JobRequest) else target
    if estimator != "ullage":
        _print_classes([answers[text] for text in jobs], jobs, card, as_json)
        return
    results = {way: _shared([answers[text] for text in jobs], jobs, card, way) for way in ways}
    if as_json:
        plain_values = {way: each.to_dict() for way, each in results.items()}
        print(json.dumps(plain_values if len(ways) > 1 else plain_values[ways[0]]))
        return
    print("\n\n".join(map(_report, results.values())))
    if len(ways) > 1:
        print(f"\n{_best(results.values())}")
    if hint := default_gpu_hint(gpu or _gpu_of(targets.values()), card.name):
        print(hint)


def _print_classes(answers: Sequence[Estimate], names: Sequence[str], card: GPU, as_json: bool) -> None:
    """Print the classes of activity of each job, and the sum of their SMACT next to the published limit."""
    if unknown := next((answer.estimator for answer in answers if "smact" not in answer.activity), None):
        raise InvalidValue(f"--estimator must be one that predicts activity, such as gpuutilnet, got {unknown!r}")
    least, most = (sum(answer.activity["smact"][edge] for answer in answers) for edge in ("least", "most"))
    if as_json:
        known = [{"name": name, "activity": each.activity} for name, each in zip(names, answers, strict=True)]
        print(json.dumps({"gpu": card.name, "jobs": known, "smact": [least, most]}))
        return
    metrics = list(dict.fromkeys(metric for answer in answers for metric in answer.activity))
    rows = [
        [name, *(_class_words(answer.activity[metric]) if metric in answer.activity else "-" for metric in metrics)]
        for name, answer in zip(names, answers, strict=True)
    ]
    print(fitted(["job", *(metric.upper() for metric in metrics)], rows, give_way=[]))
    words = "at most" if most <= BUSY else "more than" if least > BUSY else "perhaps more than"
    print(f"\nSMACT together: {least:.0%} to {most:.0%}, {words} the {BUSY:.0%} up to which RAD-RM adds a job")


def _class_words(known: dict[str, Any]) -> str:
    return f"{known['class']}, {known['least']:.0%} to {known['most']:.0%}"


def _target(text: str, pytorch: str | None, estimator: str, model: dict[str, Any]) -> JobRequest | Estimate:
    """Return the request that a job's text describes, or the estimate in the file that it names."""
    if text.endswith(".json"):
        return _read(Path(text))

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidValue(f"cannot read the job {text!r}: {error}") from None
    if not words:
        raise InvalidValue("a job must be a model, script or command, got an empty word")
    if (command := _command(words, pytorch)) is not None:
        return command
    own = typed("estimate", words)
    if others := own.keys() - {"source", *_OF_A_JOB, *model}:
        names = ", ".join(f"--{name.removeprefix('as_').replace('_', '-')}" for name in sorted(others))
        raise InvalidValue(f"{text!r}: {names} is not for one job of several; write it outside of the quotes")
    if kind_of(own["source"], own.get("module", False)) != SCRIPT:
        own = {**model, **own}
    return request_from(**own, pytorch=pytorch, estimator=estimator)


def _command(words: list[str], pytorch: str | None) -> JobRequest | None:
    """Return the request of a Python command, or `None` if the words are not one."""
    from ullage.estimation.jobs.command import python_of, script_of

    script = None if words[0].endswith(".py") else script_of(words)
    if script is None:
        return None
    usual = script.program in ("python", "python3") and not script.launcher
    python = None if usual else python_of(script, os.environ).path
    return request_from(script.source, script.args, module=script.module, python=python, pytorch=pytorch)


def _read(file: Path) -> Estimate:
    try:
        return Estimate.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidValue(f"cannot read {file}: {why}; it must be the output of 'ullage estimate --json'") from None


def _gpu_of(targets: Any) -> str | None:
    return next((each.gpu for each in targets if isinstance(each, Estimate)), None)


def _shared(answers: Sequence[Estimate], names: Sequence[str], card: GPU, how: str) -> Sharing:
    sharing = share_jobs(answers, gpu=card, how=how)
    return replace(sharing, jobs=[replace(job, name=name) for job, name in zip(sharing.jobs, names, strict=True)])


_WAYS = {"mps": "by MPS", "time-slicing": "time-sliced", "mig": "on MIG instances"}


def _report(result: Sharing) -> str:
    lines = [
        f"{result.gpu}, {_WAYS[result.how]}" + (f" {result.profile}" if result.profile else ""),
        result.verdict,
    ]
    lines += [f"  {words}" for words in _details(result)]
    rows = [
        [str(job.name), format_duration(job.step_alone_s), format_duration(job.step_s), f"{job.speed:.0%}"]
        for job in result.jobs
    ]
    table = fitted(["job", "step alone", "together", "speed"], rows, give_way=["step alone"])
    reasons = dict.fromkeys(f"{job.name}: {job.reason}" for job in result.jobs)
    width = shutil.get_terminal_size().columns
    reason_lines = [line for words in reasons for line in textwrap.wrap(words, width, subsequent_indent="  ")]
    return "\n".join([*lines, "", table, "", *reason_lines])


def _details(sharing: Sharing) -> list[str]:
    power = f"power: {sharing.power_w:.0f} W"
    energy = f"energy for a step of each: {sharing.energy_j:.3g} J, {sharing.energy:.0%} of one after the other"
    details = [sharing.reason, f"{power}; {energy}"]
    details += [f"memory: {sharing.memory_words}"] if sharing.memory_words else []
    if sharing.how == "mig":
        details.append("MIG was not measured: an instance is assumed to be as fast as its part of the GPU")
    elif not sharing.measured:
        details.append(f"jobs together were measured on an H200, not on {sharing.gpu}")
    return details


def _best(sharings: Iterable[Sharing]) -> str:
    fitting = [each for each in sharings if each.fits is not False]
    if not fitting:
        return "they do not fit on this GPU together, in none of these ways"
    best = max(fitting, key=lambda each: each.throughput)
    return f"most throughput: {_WAYS[best.how]}, {best.throughput:.2f} times that of one after the other"
