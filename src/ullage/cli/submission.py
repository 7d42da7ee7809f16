"""`ullage submit` and `ullage edit`, whose options set fields of `JobSpec`."""

import os
import sys
from collections.abc import Container
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.exit_codes import FAILED, INTERRUPTED
from ullage.cli.jobs import JOBS_HELP, exit_code, print_each, print_json, tell, wait_for
from ullage.cli.options import Json, Options, argument, option, with_options
from ullage.cli.terminal import connect_terminal, umask_now
from ullage.errors import InvalidValue, NoDaemon
from ullage.jobs.job_files import EDITABLE, JobSpec, Option, make_job, read_job
from ullage.manager.client import Client
from ullage.manager.job_words import memory, trial_words
from ullage.text import plain
from ullage.units import parse_bytes, parse_duration

NONE = "none"  # resets an option
RUN = "How it runs"
_PANELS = {"gpus": "Resources", "array": "When it runs", "retries": RUN}  # panels of the help, by their first field
_COMPLETERS = {"model": completion.sources, "estimator": completion.estimators, "after": completion.jobs}


def job_options(editable: Container[str] | None = None) -> Options:
    """Return the options of a job, from the fields of `JobSpec`; or those for editable fields, without defaults and
    groups."""
    made, panel, editing = {}, None, editable is not None
    for name, spec in JobSpec.model_fields.items():
        panel = _PANELS.get(name, panel)
        shown = next((each for each in spec.metadata if isinstance(each, Option)), None)
        if shown is None or (editable is not None and name not in editable):
            continue
        long = name.replace("_", "-")
        words = [f"--{long}/--{shown.no}" if shown.no else f"--{long}", f"-{shown.letter}" if shown.letter else ""]
        default = (long if spec.default else shown.no) if shown.no else shown.default
        if default is None and isinstance(spec.default, int) and shown.metavar:
            default = str(spec.default)
        taken = option(
            shown.help,
            *words,
            shown.metavar,
            panel=None if editing else panel,
            complete=_COMPLETERS.get(name),
            show_default=False if editing or default is None else default,
        )
        kind: Any = list[str] if name == "after" else str if shown.metavar else bool
        made[name] = Annotated[kind | None, taken], None
    return made


def given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != []}


_JOB_FILES = (".toml", ".rad")
_LOOK = 10.0  # seconds to wait for the estimate in a terminal
_WORDS = "Command after --, job file (.toml or .rad), or Python script."


@with_options(job_options())
def submit(
    command: Annotated[list[str] | None, argument(_WORDS, "JOB.toml | SCRIPT.py | -- COMMAND...")] = None,
    wait: Annotated[bool, option("Wait until the job ends; exit with its exit code.", "--wait")] = False,
    estimate_wait: Annotated[
        str | None, option("Maximum wait for the estimate, to print it.", "TIME", default="10s in a terminal")
    ] = None,
    dry_run: Annotated[
        bool, option("Report where the job would start, or why not; submit nothing.", "--dry-run")
    ] = False,
    env: Annotated[
        list[str] | None, option("Set an environment variable; can be repeated.", "--env NAME=VALUE", panel=RUN)
    ] = None,
    clean_env: Annotated[bool, option("Do not pass on this shell's variables.", "--clean-env", panel=RUN)] = False,
    as_json: Json = False,
    **fields: Any,
) -> None:
    """Submit a command, job file or script.

    Ullage estimates the job's memory and starts the job when a GPU has that much left to promise. Before the estimate
    is there, the job may get an idle GPU alone. If the script of a waiting job fails during estimation, Ullage holds
    the job and prints the error. With --dry-run, --estimate-wait estimates the job first.

    With --interactive (-i), the command gets this terminal when it runs. Ctrl-C removes it from the queue, Ctrl-]
    detaches, and 'ullage attach' reconnects. Without a command, the job is your shell, alone on a GPU unless you give
    --memory.

    Examples:

      ullage submit --time-limit 2h -- python train.py --lr 1e-4
      ullage submit --array 1-20 -- python train.py --seed {index}
      ullage submit -i --memory 8GiB
    """
    spec = _described(command or [], given(fields))
    variables = _environment({} if clean_env else dict(os.environ), spec.env, env or [])
    complete = spec.with_changes(cwd=spec.cwd or os.getcwd(), env=variables, umask=umask_now())
    if dry_run:
        manager = Client()
        expected = None if estimate_wait is None else _expected(manager, complete, parse_duration(estimate_wait))
        answer = manager.dry_run_spec(complete, expected)
        print_json(answer) if as_json else print("\n".join(plain(line) for line in trial_words(answer)))
        return
    patience = _LOOK if sys.stdout.isatty() and not as_json else 0.0
    patience = patience if estimate_wait is None else parse_duration(estimate_wait)
    _send(complete, wait, patience, as_json)


def _expected(manager: Client, spec: JobSpec, patience: float) -> str | None:
    """Return the id of an estimate for a job without a memory request; `None` if there is none in time."""
    if spec.memory is not None or spec.gpus == 0:
        return None
    from ullage.manager.core.questions import question_of

    try:
        answer = manager.estimate(timeout=patience, **question_of(spec))
    except TimeoutError as error:
        print(f"ullage: {plain(str(error))}", file=sys.stderr)
        return None
    if answer["state"] != "done":
        print(f"ullage: there is no estimate: {plain(str(answer['reason']))}", file=sys.stderr)
        return None
    return str(answer["id"])


def _described(words: list[str], fields: dict[str, Any]) -> JobSpec:
    """Return the job of a job file, a script, a command or a shell, with the given options."""
    if not words and not fields.get("interactive"):
        raise InvalidValue(
            "submit needs a command, job file or script, got none; type: ullage submit -- python train.py"
        )
    if not words:
        words = [os.environ.get("SHELL") or "/bin/sh"]
        fields = {"name": "shell", **({} if "memory" in fields else {"estimator": "none"}), **fields}
    if len(words) == 1 and words[0].endswith(_JOB_FILES):
        file = read_job(words[0])
        for note in file.notes:
            print(f"ullage: {words[0]}: {note}", file=sys.stderr)
        folder = os.path.dirname(os.path.abspath(words[0]))
        return file.spec.with_changes(**{"cwd": file.spec.cwd or folder, **fields})
    is_script = words[0].endswith(".py") and not os.access(words[0], os.X_OK)
    return make_job({"command": [sys.executable, *words] if is_script else words, **fields}, "the job")


def _send(spec: JobSpec, wait: bool, patience: float, as_json: bool) -> None:
    manager = Client()
    answer = manager.submit_spec(spec)
    if not as_json:
        print(plain(_sentence(answer)))
        for note in answer["notes"]:
            print(f"ullage: {plain(note)}", file=sys.stderr)
    if spec.interactive and not as_json:
        raise typer.Exit(connect_terminal(manager, str(answer["jobs"][0]), cancel=True))
    fails = _follow_estimate(manager, answer, None if wait else patience, as_json)
    if fails and wait:
        raise typer.Exit(FAILED)  # the wait would never end
    if not wait:
        if as_json:
            print_json(answer)
        return
    ended = wait_for(manager, [str(number) for number in answer["jobs"]])
    tell(ended, as_json)
    raise typer.Exit(exit_code(ended))


def _follow_estimate(manager: Client, answer: dict[str, Any], patience: float | None, as_json: bool) -> bool:
    """Wait a while for the estimate and print it; return whether the job is held because its script fails."""
    if answer["estimating"] is None or patience == 0:
        return False
    number = answer["jobs"][0]
    from rich.console import Console

    try:
        with Console(stderr=True).status("estimating; Ctrl-C leaves it in the queue"):
            record = manager.wait_for_estimate(number, patience)
    except (TimeoutError, NoDaemon):
        return False
    except KeyboardInterrupt:
        print(f"ullage: job {number} stays in the queue; type: ullage status {number}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    answer |= {name: record[name] for name in ("state", "estimate", "estimating", "promise")}
    fails = record["state"] == "held" and record["detail"] is not None
    if not as_json:
        print(
            plain(f"ullage: job {number} {record['reason']}" if fails else _sentence(answer)),
            file=sys.stderr if fails else None,
        )
    return fails


def _sentence(answer: dict[str, Any]) -> str:
    jobs = answer["jobs"]
    who = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {jobs[0]} to {jobs[-1]} (array {answer['array']})"
    estimating = "; its memory is being estimated" if answer["estimating"] else ""
    if answer["estimate"] is None:
        return f"{who}: {answer['state']}{estimating}"
    promise = "" if answer["promise"] == 0 else f", promise {memory(answer['promise'])}"  # 0 without a GPU
    return f"{who}: {answer['state']}{promise} ({answer['estimate']}){estimating}"


def _environment(base: dict[str, str], of_file: dict[str, str], given: list[str]) -> dict[str, str]:
    more = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidValue(f"--env must be NAME=VALUE, got {word!r}")
        more[name] = value
    return {**base, **of_file, **more}


@with_options(job_options(set(EDITABLE) - {"requeue", "estimator"}))
def edit(
    jobs: Annotated[list[str], argument(JOBS_HELP, "JOB", completion.jobs_to_requeue)],
    hold: Annotated[bool, option("Do not start the jobs, also after --requeue.", "--hold")] = False,
    release: Annotated[bool, option("Let held jobs start.", "--release")] = False,
    requeue: Annotated[bool, option("Run finished or running jobs again.", "--requeue")] = False,
    never_again: Annotated[bool, option("Never start the job a second time.", "--no-requeue")] = False,
    as_json: Json = False,
    **fields: Any,
) -> None:
    """Change, hold, release or requeue jobs.

    Changes only waiting jobs, and only the options you give. 'none' resets an option. --requeue stops a running job,
    then runs it again under its number; it combines only with --hold and --memory.

    Examples:

      ullage edit 17 --time-limit 4h --memory none
      ullage edit 12_all --hold
      ullage edit 17 --requeue --memory 12GiB
    """
    changes = given(fields) | ({"requeue": False} if never_again else {})
    verb = "requeue" if requeue else "hold" if hold else "release" if release else "edit"
    arguments: dict[str, Any] = {}
    if requeue:
        size = changes.pop("memory", None)
        arguments = {"hold": hold, "env": dict(os.environ), "memory": None if size is None else parse_bytes(size)}
    if verb == "edit":
        if not changes:
            raise InvalidValue("edit needs an option to change, got none; type: ullage edit 17 --time-limit 4h")
        reset = [name for name, value in changes.items() if value in (NONE, [NONE]) and name != "name"]
        arguments = {"changes": changes | {name: [] if name == "after" else None for name in reset}}
    elif changes or (release and verb != "release"):
        others = "--release" if release and verb != "release" else "other changes"
        raise InvalidValue(f"--{verb} must stand alone, got {others} too")
    print_each(Client().call(verb, jobs=jobs, **arguments), as_json)
