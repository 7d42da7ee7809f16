"""`ullage slurm`: jobs of a Slurm cluster that ask for as much of a GPU as they need."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ullage.cli import completion, slurm_watch
from ullage.cli.exit_codes import DONE, FAILED
from ullage.cli.options import Json, Network, Timeout
from ullage.errors import InvalidValue, UllageError
from ullage.text import plain
from ullage.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from ullage.estimation.jobs.slurm_words import SbatchWords
    from ullage.manager.slurm.submission import Choices, SubmissionPlan

slurm = typer.Typer(
    help="Jobs of a Slurm cluster that ask for as much of a GPU as they need.", no_args_is_help=True,
    rich_markup_mode="rich",
)  # fmt: skip

_GOOD = {True: "ok", False: "missing", None: "note"}
_ANYTHING = {"ignore_unknown_options": True, "allow_interspersed_args": False}
Words = Annotated[
    list[str], typer.Argument(help="Options of sbatch, the batch script, and its arguments.", show_default=False,
                              metavar="[SBATCH OPTIONS] JOB.sh [ARGS]")
]  # fmt: skip


@slurm.command(context_settings=_ANYTHING)
def submit(
    words: Words,
    gpu: Annotated[
        str | None, typer.Option("--gpu", "-g", help="The GPU to estimate for, if the cluster does not say which ones "
                                 "it has.", metavar="NAME", show_default="those of the partition",
                                 autocompletion=completion.gpus)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="GPU memory that the job takes at most, such as 12GiB.", metavar="SIZE",
                                 show_default="estimated")
    ] = None,
    exclusive: Annotated[bool, typer.Option("--whole", help="Ask for whole GPUs: the job shares them with nobody.")]
    = False,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Estimate the job, or submit it as it is.")
    ] = True,
    network: Network = False,
    timeout: Timeout = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the sbatch line that would be typed.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Submit a batch script to Slurm with as many shards of a GPU as it needs.

    The training command in the script is run on a virtual GPU, here and without a GPU. What it takes at most becomes
    '--gres=shard:N'. The script itself is not changed. Lines in it such as '#ULLAGE memory=12GiB', '#ULLAGE exclusive',
    '#ULLAGE gpu=A100-40GB' and '#ULLAGE no-estimate' say what Ullage cannot find out.

    Ullage's own options come first; any option of sbatch may follow.

    Examples:

      ullage slurm submit job.sh
      ullage slurm submit --dry-run job.sh
      ullage slurm submit --partition gpu --time 2:00:00 job.sh --epochs 90
      ullage slurm submit --memory 12GiB job.sh
    """
    from ullage.manager.slurm import commands
    from ullage.manager.slurm.sbatch_options import with_options

    _sbatch_words(words)
    choices = _choices(gpu, memory, exclusive, estimate, network, timeout)
    plan = _planned(words, choices, None)
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
    """Do what sbatch does, with as many shards of a GPU as the job needs.

    Takes whatever sbatch takes, prints what it prints, and exits as it does. What Ullage adds is told on standard
    error. A job that cannot be estimated asks for whole GPUs.

    Examples:

      ullage slurm sbatch job.sh
      ullage slurm sbatch --parsable --array 1-8 job.sh
      ullage slurm sbatch --wrap "python train.py"
    """
    from ullage.manager.slurm.sbatch_options import with_options

    given = _sbatch_words(words)
    text = None if given.rest or "wrap" in given.values else sys.stdin.read()
    plan = _planned(words, None, text)
    _tell(plan, sys.stderr)
    line = ["sbatch", *with_options(words, plan.words)]
    raise typer.Exit(subprocess.run(line, input=text, text=True).returncode)


@slurm.command()
def configure(
    nodes: Annotated[
        list[str] | None, typer.Argument(help="Nodes and their GPUs, such as 'n[1-3]=4xA100-40GB'.",
                                         metavar="NODES=GPUS", show_default="this machine, as NVML sees it")
    ] = None,
    sharing: Annotated[
        str, typer.Option(help="How jobs share a GPU: timeslice, or mps for NVIDIA's Multi-Process Service.",
                          metavar="WAY", autocompletion=lambda: ["mps", "timeslice"])
    ] = "timeslice",
    systemd: Annotated[
        str | None, typer.Option(help="Add units of systemd for the watcher and the monitors. FOLDER is one that all "
                                 "nodes share.", metavar="FOLDER")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the files into this folder. Nothing there is overwritten.",
                                  metavar="FOLDER")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Only say what is missing in this slurm.conf and beside it. Exits with 1 if "
                                  "something is.", metavar="slurm.conf")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print what to add to Slurm so that jobs share GPUs by memory, or check what is there.

    One shard stands for one GiB. Prints lines for slurm.conf and gres.conf, the two lua files, ullage.toml, which says
    which GPUs the cluster has, and with '--sharing mps' prolog and epilog for MPS.

    Examples:

      ullage slurm configure 'n[1-3]=4xA100-40GB'
      ullage slurm configure 'n[1-3]=4xA100-40GB' 'h[1-2]=8xH200' --sharing mps --write slurm-files
      ullage slurm configure 'n[1-3]=4xA100-40GB' --systemd /shared/ullage --write slurm-files
      ullage slurm configure --check /etc/slurm/slurm.conf
    """
    from ullage.manager.slurm import checking, configuration

    if check is not None:
        found = checking.check(check)
        if as_json:
            print(json.dumps([vars(finding) for finding in found]))
        for finding in () if as_json else found:
            print(f"{_GOOD[finding.good]:7}  {plain(finding.text)}")
        raise typer.Exit(FAILED if any(finding.good is False for finding in found) else DONE)
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
def filter(options: Annotated[str, typer.Argument(help="What sbatch was told, as JSON.", metavar="JSON")]) -> None:
    """Answer cli_filter.lua: a line for each option to set, 'say' or 'refuse'.

    Examples:

      ullage slurm filter '{"gpus": "1", "argv": ["job.sh"]}'
    """
    from ullage.manager.slurm.filtering import answers

    is_file = stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)  # sbatch has read a pipe to its end
    try:
        for name, value in answers(json.loads(options), sys.stdin.read() if is_file else ""):
            print(f"{name}={' '.join(value.splitlines())}")
    except InvalidValue as error:
        print(f"refuse={' '.join(str(error).splitlines())}")
    except (UllageError, ValueError) as error:
        print(f"say=the job was not sized: {' '.join(str(error).splitlines())}")


for _command in (slurm_watch.watch, slurm_watch.history, slurm_watch.top, slurm_watch.monitor, slurm_watch.epilog):
    slurm.command()(_command)


def _sbatch_words(words: Sequence[str]) -> SbatchWords:
    """What sbatch is given; a line that ends too early is a mistake in typing."""
    from ullage.estimation.jobs.slurm_words import read_words

    try:
        return read_words(words)
    except InvalidValue as error:
        raise typer.BadParameter(str(error)) from None


def _choices(
    gpu: str | None, memory: str | None, exclusive: bool, estimate: bool, network: bool, timeout: str | None
) -> Choices:
    from ullage.manager.slurm.estimating import TIMEOUT
    from ullage.manager.slurm.submission import Choices

    return Choices(
        gpu=gpu,
        memory=None if memory is None else parse_bytes(memory),
        exclusive=exclusive,
        estimate=estimate,
        network=network,
        timeout=TIMEOUT if timeout is None else parse_duration(timeout),
    )


def _planned(words: list[str], choices: Choices | None, text: str | None) -> SubmissionPlan:
    from rich.console import Console

    from ullage.manager.slurm.submission import plan_words

    with Console(stderr=True).status("reading the batch script ...") as status:
        return plan_words(words, choices, text, lambda doing: status.update(f"{doing} ..."))


def _tell(plan: SubmissionPlan, where: TextIO | None = None) -> None:
    from ullage.manager.slurm.submission import plan_in_words

    for line in plan_in_words(plan):
        print(plain(line), file=where)
