"""`ullage submit`: queue a command, a script or a job file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import client, exit_code, memory, print_json, tell, wait_for
from ullage.cli.options import Json
from ullage.errors import InvalidValue

if TYPE_CHECKING:
    from ullage.workloads.job_files import JobSpec

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
    given: dict[str, Any] = {
        "name": name, "gpus": gpus, "memory": memory, "host_memory": host_memory, "exclusive": exclusive,
        "model": model, "batch_size": batch_size, "estimator": estimator, "array": array, "after": after or None,
        "priority": priority, "hold": hold or None, "time_limit": time_limit, "venv": venv, "conda": conda, "cwd": cwd,
        "resumable": resumable, "mps_threads": mps_threads, "mps_memory": mps_memory,
    }  # fmt: skip
    spec = _described(list(command), {name: value for name, value in given.items() if value is not None})
    variables = _environment({} if clean_env else dict(os.environ), spec.env, env or [])
    _send(spec.with_changes(cwd=spec.cwd or os.getcwd(), env=variables, umask=_umask()), wait, as_json)


def _described(words: list[str], given: dict[str, Any]) -> JobSpec:
    """The job of a job file, a script or a command, with the options that were given."""
    from ullage.workloads.job_files import make_job, read_job

    if len(words) == 1 and words[0].endswith(_JOB_FILES):
        file = read_job(words[0])
        for note in file.notes:
            print(f"ullage: {words[0]}: {note}", file=sys.stderr)
        folder = os.path.dirname(os.path.abspath(words[0]))
        return file.spec.with_changes(**{"cwd": file.spec.cwd or folder, **given})
    is_script = words[0].endswith(".py") and not os.access(words[0], os.X_OK)
    return make_job({"command": [sys.executable, *words] if is_script else words, **given}, "the job")


def _send(spec: JobSpec, wait: bool, as_json: bool) -> None:
    manager = client()
    answer = manager.submit_spec(spec)
    if not as_json:
        print(_sentence(answer))
        for note in answer["notes"]:
            print(f"ullage: {note}", file=sys.stderr)
    if not wait:
        if as_json:
            print_json(answer)
        return
    found = wait_for(manager, [str(number) for number in answer["jobs"]])
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


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now
