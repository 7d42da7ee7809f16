"""`ullage submit`: submit a command, a script or a job file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.exit_codes import FAILED, INTERRUPTED
from ullage.cli.jobs import client, exit_code, print_json, tell, wait_for
from ullage.cli.options import Json
from ullage.cli.terminal import sit_down, umask_now
from ullage.errors import InvalidValue, NoDaemon
from ullage.manager.job_words import memory, trial_words
from ullage.text import plain
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.jobs.job_files import JobSpec
    from ullage.manager.client import Client

_JOB_FILES = (".toml", ".rad")
_LOOK = 10.0  # seconds for which a person waits to see the estimate
RESOURCES, SCHEDULE, RUN, TELL = "Resources", "When it runs", "How it runs", "When it ends"
Words = Annotated[
    list[str], typer.Argument(help="A command after --, a job file (.toml or .rad), or a Python script.",
                              show_default=False, metavar="JOB.toml | SCRIPT.py | -- COMMAND...")
]  # fmt: skip


def submit(
    command: Words,
    name: Annotated[str | None, typer.Option("--name", "-N", help="Name the job.", metavar="NAME")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job is over and exit with its exit code.")
    ] = False,
    estimate_wait: Annotated[
        str | None, typer.Option(help="Wait so long for the estimate, such as 30s, and print it.", metavar="TIME",
                                 show_default="10s in a terminal")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Run the command at a terminal, and connect to it when it runs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would become of the job now: where it would start, or why "
                           "it would wait, and what it would do to others. With --estimate-wait it is estimated first.")
    ] = False,
    as_json: Json = False,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs; 0 for a job that uses none.", metavar="N", show_default="1",
                                 rich_help_panel=RESOURCES)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="GPU memory to promise the job on each GPU, such as 6GiB.", metavar="SIZE",
                                 show_default="estimated", rich_help_panel=RESOURCES)
    ] = None,
    cores: Annotated[
        int | None, typer.Option(help="Processor cores to promise the job.", metavar="N",
                                 show_default="as the server's settings have it", rich_help_panel=RESOURCES)
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory to promise the job, which is also its limit, such as 32GiB.",
                                 metavar="SIZE", show_default="as the server's settings have it",
                                 rich_help_panel=RESOURCES)
    ] = None,
    exclusive: Annotated[
        bool | None, typer.Option("--exclusive/--shared", help="Give the job GPUs of its own, or let it share them.",
                                  show_default="shared", rich_help_panel=RESOURCES)
    ] = None,
    min_speed: Annotated[
        float | None, typer.Option(help="Share a GPU only where the job keeps at least this much of its speed, such as "
                                   "0.8.", metavar="SHARE", show_default="as the server's settings have it",
                                   rich_help_panel=RESOURCES)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Estimate this model instead of the command's script, such as "
                                 "torchvision:resnet50.", metavar="SOURCE", rich_help_panel=RESOURCES,
                                 autocompletion=completion.sources)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", help="With --model: samples in a batch.", metavar="N",
                                 rich_help_panel=RESOURCES)
    ] = None,
    estimator: Annotated[
        str | None, typer.Option("--estimator", "-e", help="Which estimator to use, or none.", metavar="NAME",
                                 show_default="the daemon's", rich_help_panel=RESOURCES,
                                 autocompletion=completion.estimators)
    ] = None,
    array: Annotated[
        str | None, typer.Option(help="Submit one job for each index: 1-20, 0-10:2 or 1,5,7; 1-1000%8 runs at most 8 "
                                 "at once. {index} in the command becomes the index.", metavar="INDICES",
                                 rich_help_panel=SCHEDULE)
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(help="Start after job 17 is done (17), or after it is over in any way (any:17); "
                                       "also 12_3, 12_all, a name, or in an array 12_{index}. Can be given more than "
                                       "once.", metavar="JOB", rich_help_panel=SCHEDULE,
                                       autocompletion=completion.jobs)
    ] = None,
    begin: Annotated[
        str | None, typer.Option(help="Do not start before this time: 2026-11-20T08:00, 22:00 or now+2h.",
                                 metavar="TIME", rich_help_panel=SCHEDULE)
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Jobs with a higher priority start first.", metavar="N", show_default="0",
                                 rich_help_panel=SCHEDULE)
    ] = None,
    hold: Annotated[
        bool, typer.Option("--hold", help="Do not start before 'ullage release'.", rich_help_panel=SCHEDULE)
    ] = False,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", "-t", help="Stop the job after this long, such as 90m or 12h.",
                                 metavar="TIME", rich_help_panel=SCHEDULE)
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="If the job fails by itself, try it again up to this many times.", metavar="N",
                                 show_default="0", rich_help_panel=RUN)
    ] = None,
    requeue: Annotated[
        bool | None, typer.Option("--requeue/--no-requeue", help="Whether the job may be started again, after whatever "
                                  "failure; with --no-requeue it is started once.", show_default="requeue",
                                  rich_help_panel=RUN)
    ] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "-C", help="Run in this folder.", metavar="FOLDER",
                                 show_default="this folder, or the job file's", rich_help_panel=RUN)
    ] = None,
    venv: Annotated[
        str | None, typer.Option(help="Run in this virtual environment.", metavar="FOLDER", rich_help_panel=RUN)
    ] = None,
    conda: Annotated[
        str | None, typer.Option(help="Run in this conda environment.", metavar="NAME", rich_help_panel=RUN)
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Set an environment variable. Can be given more than once.",
                                       metavar="NAME=VALUE", rich_help_panel=RUN)
    ] = None,
    clean_env: Annotated[
        bool, typer.Option("--clean-env", help="Do not pass on the variables of this shell.", rich_help_panel=RUN)
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write what the job prints to this file, such as "
                                 "logs/%j.out: %j is the job, %A its array, %a its index, %t the attempt, %n its name, "
                                 "%u its user.", metavar="FILE", rich_help_panel=RUN)
    ] = None,
    error: Annotated[
        str | None, typer.Option("--error", help="Write its standard error to this file.", metavar="FILE",
                                 show_default="the file of --output", rich_help_panel=RUN)
    ] = None,
    resumable: Annotated[
        bool | None, typer.Option("--resumable", help="The job saves a checkpoint on SIGUSR1 and can be resumed.",
                                  rich_help_panel=RUN)
    ] = None,
    on_end: Annotated[
        str | None, typer.Option(help="Run this command at the job's end, with what became of it as JSON on its "
                                 "standard input.", metavar="COMMAND", rich_help_panel=TELL)
    ] = None,
    mps_threads: Annotated[
        int | None, typer.Option(help="With 'ullage serve --sharing mps': the job's percentage of the GPU's threads.",
                                 metavar="PERCENT", rich_help_panel=RUN)
    ] = None,
    mps_memory: Annotated[
        str | None, typer.Option(help="With 'ullage serve --sharing mps': limit the job's GPU memory.", metavar="SIZE",
                                 rich_help_panel=RUN)
    ] = None,
) -> None:  # fmt: skip
    """Submit a job: a command after --, a job file, or a script.

    Its GPU memory is estimated first. It starts when that much can be promised to it on a GPU. A script that fails when
    it is estimated is held, and the failure is printed.

    Examples:

      ullage submit -- python train.py --lr 1e-4
      ullage submit job.toml
      ullage submit --memory 6GiB --time-limit 2h -- ./run.sh
      ullage submit --min-speed 0.9 -- python train.py
      ullage submit --cores 8 --host-memory 32GiB -- python train.py
      ullage submit --gpus 0 --cores 4 -- python prepare_data.py
      ullage submit --array 1-20 -- python train.py --seed {index}
      ullage submit --after 17 --wait -- python evaluate.py
      ullage submit --after 12_all --dry-run -- python evaluate.py
      ullage submit --dry-run --estimate-wait 2m -- python train.py
      ullage submit --begin 22:00 --retries 3 -- python train.py
      ullage submit --estimate-wait 1m -- python train.py
    """
    given: dict[str, Any] = {
        "name": name, "gpus": gpus, "memory": memory, "cores": cores, "host_memory": host_memory,
        "exclusive": exclusive, "min_speed": min_speed,
        "model": model, "batch_size": batch_size, "estimator": estimator,
        "array": array, "after": after or None,
        "priority": priority, "hold": hold or None, "time_limit": time_limit, "venv": venv, "conda": conda, "cwd": cwd,
        "output": output, "error": error, "interactive": interactive or None, "resumable": resumable,
        "begin": begin, "retries": retries, "requeue": requeue,
        "on_end": on_end,
        "mps_threads": mps_threads, "mps_memory": mps_memory,
    }  # fmt: skip
    spec = _described(list(command), {name: value for name, value in given.items() if value is not None})
    variables = _environment({} if clean_env else dict(os.environ), spec.env, env or [])
    complete = spec.with_changes(cwd=spec.cwd or os.getcwd(), env=variables, umask=umask_now())
    if dry_run:
        manager = client()
        expected = None if estimate_wait is None else _expected(manager, complete, parse_duration(estimate_wait))
        answer = manager.dry_run_spec(complete, expected)
        print_json(answer) if as_json else print("\n".join(plain(line) for line in trial_words(answer)))
        return
    patience = _LOOK if sys.stdout.isatty() and not as_json else 0.0
    patience = patience if estimate_wait is None else parse_duration(estimate_wait)
    _send(complete, wait, patience, as_json)


def _expected(manager: Client, spec: JobSpec, patience: float) -> str | None:
    """The id of an estimate for a job that does not say how much memory it needs; `None` if there is none in time."""
    if spec.memory is not None or spec.gpus == 0:
        return None
    from ullage.estimation.jobs.command import script_of

    script = script_of(spec.command)
    question: dict[str, Any] = {"command": spec.command, "options": script.ranks(spec.gpus) if script else {}}
    if spec.model is not None:
        options = {**spec.estimate} | ({"batch_size": spec.batch_size} if spec.batch_size else {})
        question = {"model": spec.model, "options": options}
    where = {"cwd": spec.cwd, "env": spec.env, "venv": spec.venv, "conda": spec.conda, "estimator": spec.estimator}
    question |= {name: value for name, value in where.items() if value} | {"details": False}
    try:
        found = manager.estimate(timeout=patience, **question)
    except TimeoutError as error:
        print(f"ullage: {plain(str(error))}", file=sys.stderr)
        return None
    if found["state"] != "done":
        print(f"ullage: there is no estimate: {plain(str(found['reason']))}", file=sys.stderr)
        return None
    return str(found["id"])


def _described(words: list[str], given: dict[str, Any]) -> JobSpec:
    """The job of a job file, a script or a command, with the options that were given."""
    from ullage.jobs.job_files import make_job, read_job

    if len(words) == 1 and words[0].endswith(_JOB_FILES):
        file = read_job(words[0])
        for note in file.notes:
            print(f"ullage: {words[0]}: {note}", file=sys.stderr)
        folder = os.path.dirname(os.path.abspath(words[0]))
        return file.spec.with_changes(**{"cwd": file.spec.cwd or folder, **given})
    is_script = words[0].endswith(".py") and not os.access(words[0], os.X_OK)
    return make_job({"command": [sys.executable, *words] if is_script else words, **given}, "the job")


def _send(spec: JobSpec, wait: bool, patience: float, as_json: bool) -> None:
    manager = client()
    answer = manager.submit_spec(spec)
    if not as_json:
        print(plain(_sentence(answer)))
        for note in answer["notes"]:
            print(f"ullage: {plain(note)}", file=sys.stderr)
    if spec.interactive and not as_json:
        raise typer.Exit(sit_down(manager, str(answer["jobs"][0]), cancel=True))
    fails = _follow_estimate(manager, answer, None if wait else patience, as_json)
    if fails and wait:
        raise typer.Exit(FAILED)  # it would wait for ever
    if not wait:
        if as_json:
            print_json(answer)
        return
    found = wait_for(manager, [str(number) for number in answer["jobs"]])
    tell(found, as_json)
    raise typer.Exit(exit_code(found))


def _follow_estimate(manager: Client, answer: dict[str, Any], patience: float | None, as_json: bool) -> bool:
    """Wait a while for the estimate and say what it is; whether the job is held because its script fails."""
    if answer["estimate"] is not None or patience == 0:
        return False
    number = answer["jobs"][0]
    from rich.console import Console

    try:
        with Console(stderr=True).status("estimating; Ctrl-C leaves it in the queue"):
            found = manager.wait_for_estimate(number, patience)
    except (TimeoutError, NoDaemon):
        return False
    except KeyboardInterrupt:
        print(f"ullage: job {number} stays in the queue; type: ullage status {number}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    answer |= {name: found[name] for name in ("state", "estimate", "promise")}
    fails = found["state"] == "held" and found["detail"] is not None
    if not as_json:
        print(
            plain(f"ullage: job {number} {found['reason']}" if fails else _sentence(answer)),
            file=sys.stderr if fails else None,
        )
    return fails


def _sentence(answer: dict[str, Any]) -> str:
    jobs = answer["jobs"]
    who = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {jobs[0]} to {jobs[-1]} (array {answer['array']})"
    if answer["estimate"] is None:
        return f"{who}: {answer['state']}, the promise is being estimated"
    promise = "" if answer["promise"] == 0 else f", promise {memory(answer['promise'])}"  # without a GPU there is none
    return f"{who}: {answer['state']}{promise} ({answer['estimate']})"


def _environment(base: dict[str, str], of_file: dict[str, str], given: list[str]) -> dict[str, str]:
    more = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidValue(f"--env: needed NAME=VALUE; found {word!r}")
        more[name] = value
    return {**base, **of_file, **more}
