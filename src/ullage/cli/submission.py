"""`ullage submit`: queue a command, a script or a job file."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import client, exit_code, memory, print_json, tell, wait_for
from ullage.cli.options import Json
from ullage.errors import InvalidValue
from ullage.units import parse_bytes, parse_duration

_JOB_FILES = (".toml", ".rad")
WHAT, WHEN, HOW = "What it needs", "When it runs", "How it runs"
Words = Annotated[
    list[str], typer.Argument(help="After --: the command. Or a job file (.toml, .rad), or a script (.py).",
                              show_default=False, metavar="JOB.toml | -- COMMAND...")
]  # fmt: skip


def submit(
    command: Words,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for it.")] = None,
    gpus: Annotated[int | None, typer.Option(help="How many GPUs.", rich_help_panel=WHAT)] = None,
    memory: Annotated[
        str | None, typer.Option(help="GPU memory on each, instead of an estimate: 6GiB.", metavar="SIZE",
                                 rich_help_panel=WHAT)
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="A limit of host memory: 32GiB.", metavar="SIZE", rich_help_panel=WHAT)
    ] = None,
    exclusive: Annotated[
        bool | None, typer.Option("--exclusive/--shared", help="GPUs for itself, or shared.", rich_help_panel=WHAT)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Estimate this model instead of the command.", rich_help_panel=WHAT,
                                 autocompletion=completion.sources)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", help="With --model.", rich_help_panel=WHAT)
    ] = None,
    estimator: Annotated[
        str | None, typer.Option("--estimator", "-e", help="Who estimates, or none.", rich_help_panel=WHAT,
                                 autocompletion=completion.estimators)
    ] = None,
    array: Annotated[
        str | None, typer.Option(help="Several at once: 1-20, 0-10:2 or 1,5,7; {index} in the command.",
                                 rich_help_panel=WHEN)
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(help="When this job is done (17), or over (any:17).", rich_help_panel=WHEN,
                                       autocompletion=completion.jobs)
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first; 0 otherwise.", rich_help_panel=WHEN)] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Wait for 'ullage release'.", rich_help_panel=WHEN)] = False,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", "-t", help="Stop it after so long: 90m, 12h.", metavar="TIME",
                                 rich_help_panel=WHEN)
    ] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-C", help="Run it in this folder.", rich_help_panel=HOW)] = None,
    venv: Annotated[
        str | None, typer.Option(help="Run it in this venv.", metavar="FOLDER", rich_help_panel=HOW)
    ] = None,
    conda: Annotated[
        str | None, typer.Option(help="Run it in this conda environment.", metavar="NAME", rich_help_panel=HOW)
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="A variable more: NAME=VALUE.", metavar="NAME=VALUE",
                                       rich_help_panel=HOW)
    ] = None,
    clean_env: Annotated[
        bool, typer.Option("--clean-env", help="Without this shell's variables.", rich_help_panel=HOW)
    ] = False,
    resumable: Annotated[
        bool | None, typer.Option("--resumable", help="It saves itself at SIGUSR1 and can go on later.",
                                  rich_help_panel=HOW)
    ] = None,
    mps_threads: Annotated[
        int | None, typer.Option(help="With --sharing mps: percent of the GPU's threads.", rich_help_panel=HOW)
    ] = None,
    mps_memory: Annotated[
        str | None, typer.Option(help="With --sharing mps: a limit of GPU memory.", metavar="SIZE", rich_help_panel=HOW)
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over; exit as it does.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Queue a job: a command after --, a job file, or a script.

    Its GPU memory is estimated on the way in, and it starts when a GPU has that much to promise.

    Examples:

      ullage submit -- python train.py --lr 1e-4

      ullage submit job.toml

      ullage submit --memory 6GiB --time-limit 2h -- ./run.sh

      ullage submit --array 1-20 -- python train.py --seed {index}

      ullage submit --after 17 --wait -- python evaluate.py
    """
    said: dict[str, Any] = {
        "name": name, "gpus": gpus, "memory": _bytes(memory), "host_memory": _bytes(host_memory),
        "exclusive": exclusive, "model": model, "batch_size": batch_size, "estimator": estimator,
        "priority": priority, "hold": hold or None, "resumable": resumable, "mps_threads": mps_threads,
        "time_limit": None if time_limit is None else parse_duration(time_limit), "mps_memory": _bytes(mps_memory),
        "venv": None if venv is None else os.path.abspath(venv), "conda": conda,
        "cwd": None if cwd is None else os.path.abspath(cwd),
    }  # fmt: skip
    job = _described(list(command), {key: value for key, value in said.items() if value is not None}, array, after)
    job["env"] = _environment({} if clean_env else dict(os.environ), job.get("env", {}), env or [])
    _send(job, wait, as_json)


def _described(words: list[str], said: dict[str, Any], array: str | None, after: list[str] | None) -> dict[str, Any]:
    """The submission: what a job file says, and what was said besides."""
    from ullage.workloads.job_files import JobFile, parse_array, read_job

    job: dict[str, Any] = {}
    if len(words) == 1 and words[0].endswith(_JOB_FILES):
        file = read_job(words[0])
        for note in file.notes:
            print(f"ullage: {words[0]}: {note}", file=sys.stderr)
        job = file.submission()
        if file.summary is not None:
            job.setdefault("model", os.path.join(os.path.dirname(os.path.abspath(words[0])), file.summary))
        job.setdefault("cwd", os.path.dirname(os.path.abspath(words[0])))
    else:
        job["command"] = (
            [sys.executable, *words] if words[0].endswith(".py") and not os.access(words[0], os.X_OK) else words
        )
    job = {"cwd": os.getcwd(), **job, **said, "umask": _umask()}
    if array is not None:
        job["array"] = parse_array(array)
    if after:
        job["after"] = JobFile.model_validate({"command": ["x"], "after": after}).submission()["after"]
    return job


def _send(job: dict[str, Any], wait: bool, as_json: bool) -> None:
    daemon = client()
    answer = daemon.submit(job)
    if not as_json:
        print(_sentence(answer))
        for note in answer["notes"]:
            print(f"ullage: {note}", file=sys.stderr)
    if not wait:
        if as_json:
            print_json(answer)
        return
    found = wait_for(daemon, [str(number) for number in answer["jobs"]])
    tell(found, as_json)
    raise typer.Exit(exit_code(found))


def _sentence(answer: dict[str, Any]) -> str:
    jobs = answer["jobs"]
    who = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {jobs[0]} to {jobs[-1]} (array {answer['array']})"
    if answer["estimate"] is None:
        return f"{who}: {answer['state']}, its memory is being estimated"
    return f"{who}: {answer['state']}, needs {memory(answer['need'])} ({answer['estimate']})"


def _environment(base: dict[str, str], of_file: dict[str, str], given: list[str]) -> dict[str, str]:
    more = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidValue(f"--env: needed NAME=VALUE; found {word!r}")
        more[name] = value
    return {**base, **of_file, **more}


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now
