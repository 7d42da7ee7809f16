"""`ullage slurm`: lets jobs of a Slurm cluster request only as much of a GPU as they need."""

import contextlib
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ullage.cli import completion
from ullage.cli.options import Json, Network, Timeout, argument, command_group, option, parse_interval
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue, UllageError
from ullage.home import home
from ullage.text import plain
from ullage.units import format_moment, parse_bytes, parse_duration

if TYPE_CHECKING:
    from ullage.estimation.jobs.slurm_words import SbatchWords
    from ullage.manager.slurm.submission import SubmissionPlan

slurm = command_group("Request as much of a GPU as a job needs in a Slurm cluster.")

STATE = "slurm/runs.db"  # the watcher's record, in ULLAGE_HOME
_ANYTHING = {"ignore_unknown_options": True, "allow_interspersed_args": False}
Words = Annotated[
    list[str], argument("sbatch options, the batch script and its arguments.", "[SBATCH OPTIONS] JOB.sh [ARGS]")
]


@slurm.command(context_settings=_ANYTHING)
def submit(
    words: Words,
    gpu: Annotated[
        str | None,
        option("GPU to estimate for.", "--gpu -g NAME", default="those of the partition", complete=completion.gpus),
    ] = None,
    memory: Annotated[
        str | None, option("Upper bound of the job's GPU memory, such as 12GiB.", "SIZE", default="estimated")
    ] = None,
    exclusive: Annotated[bool, option("Request whole GPUs.", "--whole")] = False,
    estimate: Annotated[bool, option("Estimate the job, or submit it unchanged.", "--estimate/--no-estimate")] = True,
    network: Network = False,
    timeout: Timeout = None,
    dry_run: Annotated[bool, option("Print the sbatch line; submit nothing.", "--dry-run")] = False,
    as_json: Json = False,
) -> None:
    """Submit a batch script to Slurm with as many shards of a GPU as it needs.

    Ullage runs the script's training command on a virtual GPU. Its upper bound becomes '--gres=shard:N'; the script
    does not change. Lines such as '#ULLAGE memory=12GiB', '#ULLAGE exclusive', '#ULLAGE gpu=A100-40GB' and '#ULLAGE
    no-estimate' set options in the script. Put Ullage's options before those of sbatch.

    Examples:

      ullage slurm submit --dry-run job.sh
      ullage slurm submit --memory 12GiB --partition gpu --time 2:00:00 job.sh --epochs 90
    """
    from ullage.manager.slurm import commands
    from ullage.manager.slurm.sbatch_options import with_options

    _sbatch_words(words)
    overrides: dict[str, Any] = {"gpu": gpu, "memory": memory and parse_bytes(memory), "exclusive": exclusive or None}
    overrides |= {"estimate": None if estimate else False, "network": network or None}
    overrides |= {"timeout": None if timeout is None else parse_duration(timeout)}
    plan = _planned(words, **{name: value for name, value in overrides.items() if value is not None})
    line = ["sbatch", *with_options(words, plan.words)]
    if as_json and dry_run:
        print(json.dumps({**plan.to_dict(), "command": line, "job": None}))
        return
    if not as_json:
        _tell(plan)
    if dry_run:
        print(plain(shlex.join(line)))
        return
    job = commands.submit(line[1:])
    print(json.dumps({**plan.to_dict(), "command": line, "job": job}) if as_json else f"job {job} was submitted")


@slurm.command(context_settings=_ANYTHING)
def sbatch(words: Words) -> None:
    """Run sbatch with as many shards of a GPU as the job needs.

    Takes sbatch's options and has its output and exit code; Ullage reports the estimate on standard error. A job that
    cannot be estimated requests whole GPUs.

    Examples:

      ullage slurm sbatch --parsable --array 1-8 job.sh
      ullage slurm sbatch --wrap "python train.py"
    """
    from ullage.manager.slurm.sbatch_options import with_options

    given = _sbatch_words(words)
    text = None if given.rest or "wrap" in given.values else sys.stdin.read()
    plan = _planned(words, text=text)
    _tell(plan, sys.stderr)
    line = ["sbatch", *with_options(words, plan.words)]
    raise typer.Exit(subprocess.run(line, input=text, text=True).returncode)


@slurm.command()
def configure(
    nodes: Annotated[
        list[str] | None,
        argument("Nodes and their GPUs, such as 'n[1-3]=4xA100-40GB'.", "NODES=GPUS", default="this machine"),
    ] = None,
    sharing: Annotated[
        str, option("How jobs share a GPU: time-slicing or mps.", "WAY", complete=["mps", "time-slicing"])
    ] = "time-slicing",
    systemd: Annotated[
        str | None, option("Add a systemd unit for the watcher; all nodes share FOLDER.", "FOLDER")
    ] = None,
    write: Annotated[Path | None, option("Write the files into this folder; overwrite nothing.", "FOLDER")] = None,
    as_json: Json = False,
) -> None:
    """Print Slurm configuration for sharing GPUs by memory.

    One shard is one GiB. Prints lines for slurm.conf and gres.conf, two Lua files and ullage.toml with the cluster's
    GPUs; with '--sharing mps' also prolog and epilog for MPS.

    Examples:

      ullage slurm configure 'n[1-3]=4xA100-40GB'
      ullage slurm configure 'n[1-3]=4xA100-40GB' 'h[1-2]=8xH200' --sharing mps --write slurm-files
    """
    from ullage.manager.slurm import configuration

    groups = [configuration.node_group(text) for text in nodes or ()] or [configuration.this_node()]
    files = configuration.files(groups, sharing, systemd=systemd)
    written = [] if write is None else configuration.write_files(files, write)
    if as_json:
        print(json.dumps({"files": files, "written": [str(path) for path in written]}))
    elif write is not None:
        for path in written:
            print(path)
    else:
        print("\n".join(f"# ---- {name}\n{text}" for name, text in files.items()))


@slurm.command(hidden=True)
def filter(options: Annotated[str, argument("What sbatch was told, as JSON.", "JSON")]) -> None:
    """Answer cli_filter.lua: a line for each option to set, 'say' or 'refuse'.

    Examples:

      ullage slurm filter '{"gpus": "1", "argv": ["job.sh"]}'
    """
    from ullage.manager.slurm.submission import filter_answers

    is_file = stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)  # sbatch has already read a pipe
    try:
        for name, value in filter_answers(json.loads(options), sys.stdin.read() if is_file else ""):
            print(f"{name}={' '.join(value.splitlines())}")
    except InvalidValue as error:
        print(f"refuse={' '.join(str(error).splitlines())}")
    except (UllageError, ValueError) as error:
        print(f"say=the job was not sized: {' '.join(str(error).splitlines())}")


@slurm.command()
def watch(
    once: Annotated[bool, option("Check once and exit.", "--once")] = False,
    interval: Annotated[str, option("Time between two checks, from 0.1s to 1h.", "TIME")] = "5s",
    me: Annotated[bool, option("Watch only your own jobs.", "--me")] = False,
    every_job: Annotated[bool, option("Also watch jobs that requested shards without Ullage.", "--every-job")] = False,
    folder: Annotated[
        Path | None, option("Folder of the epilog's files.", "FOLDER", envvar="ULLAGE_SLURM_FOLDER")
    ] = None,
    attempts: Annotated[int, option("Maximum number of starts of a job.", "N", min=1)] = 5,
    step: Annotated[str, option("Memory to add after each out-of-memory failure.", "SIZE")] = "5GiB",
    exclusive_after: Annotated[int, option("Out-of-memory failures before a job gets a whole GPU.", "N", min=1)] = 3,
) -> None:
    """Restart Slurm jobs that ran out of GPU memory, with more shards.

    Requeues such a job, adds shards and releases it; in the end the job gets all shards of a GPU. Ignores jobs that
    failed because of a bug, were cancelled, reached their time limit, or were submitted with --no-requeue.

    The watcher saves each decision in ULLAGE_HOME/slurm before it acts, so you can restart it at any time.

    Examples:

      ullage slurm watch --me --once
      ullage slurm watch --folder /shared/ullage --attempts 3
    """
    from ullage.manager.placement.recovery import RecoveryRules
    from ullage.manager.slurm.runs import RunStore
    from ullage.manager.slurm.watcher import Watcher, WatchTerms

    rules = RecoveryRules(attempts=attempts, step=parse_bytes(step), exclusive_after=exclusive_after)
    terms = WatchTerms(rules, everybody=not me, every_job=every_job, spool=folder)
    with contextlib.closing(RunStore(home() / STATE, writes=True)) as store:
        watcher = Watcher(store, terms, lambda text: print(plain(text), flush=True, file=sys.stderr))
        if once:
            watcher.look()
        else:
            watcher.run(parse_interval(interval), _ending())


@slurm.command()
def history(
    job: Annotated[int | None, argument("Slurm's job number.", "JOB", default="the newest runs")] = None,
    limit: Annotated[int, option("Maximum number of rows.", "--limit -n N", min=1)] = 50,
    as_json: Json = False,
) -> None:
    """Show how runs of Slurm jobs ended, why, and the watcher's decision.

    Reads the record of 'ullage slurm watch' with the same ULLAGE_HOME. Root's watcher also writes into the jobs'
    comments: 'scontrol show job JOB' prints them.

    Example:

      ullage slurm history 4711
    """
    from ullage.manager.slurm.runs import RunStore

    with contextlib.closing(RunStore(home() / STATE)) as store:
        runs = store.newest(limit) if job is None else store.of(job)
    if job is not None and not runs:
        raise InvalidValue(
            f"no finished run of job {job} is recorded; to see its state in Slurm, type: squeue --jobs={job}"
        )
    if as_json:
        print(json.dumps([{name: value for name, value in asdict(run).items() if name != "streams"} for run in runs]))
        return
    heads = ["job", "run", "ended", "asked for", "cause", "what then"]
    rows = []
    for run in runs:
        ended, gres = format_moment(run.ended), run.gres or "-"
        rows.append([str(run.job), str(run.restarts + 1), ended, gres, run.cause, plain(run.next_text)])
    print(fitted(heads, rows, give_way=["ended"], left=heads[2:]))


@slurm.command()
def epilog(folder: Annotated[Path, argument("Folder that all nodes share.", "FOLDER")]) -> None:
    """Print a Slurm epilog that saves the output of failed jobs for 'ullage slurm watch'.

    Needed only if jobs write to files that the watcher cannot read, such as in a node's /tmp.

    Example:

      ullage slurm epilog /shared/ullage > /etc/slurm/ullage-epilog.sh
    """
    from importlib.resources import files

    if not folder.is_absolute() or "'" in str(folder):
        raise InvalidValue(f"FOLDER must be an absolute path without quotes, got {str(folder)!r}")
    print(
        (files("ullage.manager.slurm") / "files" / "watch_epilog.sh").read_text().replace("@SPOOL@", str(folder)),
        end="",
    )


def _sbatch_words(words: Sequence[str]) -> "SbatchWords":
    from ullage.estimation.jobs.slurm_words import read_words

    try:
        return read_words(words)
    except InvalidValue as error:
        raise typer.BadParameter(str(error)) from None


def _planned(words: list[str], **more: Any) -> "SubmissionPlan":
    from rich.console import Console

    from ullage.manager.slurm.submission import plan_words

    with Console(stderr=True).status("reading the batch script ...") as status:
        return plan_words(words, progress=lambda doing: status.update(f"{doing} ..."), **more)


def _tell(plan: "SubmissionPlan", where: TextIO | None = None) -> None:
    from ullage.manager.slurm.submission import plan_in_words

    for line in plan_in_words(plan):
        print(plain(line), file=where)


def _ending() -> threading.Event:
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    return ending
