"""`ullage slurm watch`, `history`, `monitor`, `top` and `epilog`: what happens to jobs of Slurm's after submission."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ullage.cli.options import Json
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue
from ullage.text import plain
from ullage.units import GIB, format_bytes, format_moment, parse_bytes, parse_duration

STATE = "slurm/runs.db"  # in ULLAGE_HOME

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The folder that all nodes share, in which monitors and the epilog write.",
                 metavar="FOLDER", envvar="ULLAGE_SLURM_FOLDER"),
]  # fmt: skip
Interval = Annotated[str, typer.Option(help="Time between two looks, such as 5s.", metavar="TIME")]
Once = Annotated[bool, typer.Option("--once", help="Look once and exit.")]


def watch(
    once: Once = False,
    interval: Interval = "5s",
    me: Annotated[bool, typer.Option("--me", help="Watch your own jobs only.")] = False,
    every_job: Annotated[
        bool, typer.Option("--every-job", help="Watch also jobs that asked for shards without Ullage.")
    ] = False,
    folder: Folder = None,
    attempts: Annotated[int, typer.Option(help="Start a job at most this often.", metavar="N", min=1)] = 5,
    step: Annotated[
        str, typer.Option(help="How much more a job gets than is known to be too little.", metavar="SIZE")
    ] = "5GiB",
    exclusive_after: Annotated[
        int, typer.Option(help="From so many failures for memory on, the job gets a GPU to itself.", metavar="N", min=1)
    ] = 3,
) -> None:  # fmt: skip
    """Start jobs of Slurm again that ran out of GPU memory, with more shards.

    A job that failed because GPU memory ran out is put back into Slurm's queue, held, given more shards, and released;
    at last it gets all shards of a GPU. A job that failed by a bug, was cancelled or ran into its time limit is left
    alone, and so is one that was submitted with --no-requeue.

    What was decided is on disk (ULLAGE_HOME/slurm) before it is done: end the watcher at any moment and start it again.
    Any user can run one for their own jobs, with --me.

    Examples:

      ullage slurm watch
      ullage slurm watch --me --once
      ullage slurm watch --folder /shared/ullage --attempts 3
    """
    from ullage.home import home
    from ullage.manager.placement.recovery import RecoveryRules
    from ullage.manager.slurm.runs import RunStore
    from ullage.manager.slurm.watcher import Watcher, WatchTerms

    rules = RecoveryRules(attempts=attempts, step=parse_bytes(step), exclusive_after=exclusive_after)
    terms = WatchTerms(rules, everybody=not me, every_job=every_job, spool=folder)
    store = RunStore(home() / STATE, writes=True)
    try:
        watcher = Watcher(store, terms, _say)
        if once:
            watcher.look()
        else:
            watcher.run(_seconds(interval), _ending())
    finally:
        store.close()


def history(
    job: Annotated[
        int | None, typer.Argument(help="The job, by Slurm's number.", metavar="JOB", show_default="the newest runs")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show at most this many.", metavar="N", min=1)] = 50,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Show how the runs of a job of Slurm's ended, why, and what was decided then.

    It shows what the 'ullage slurm watch' with the same ULLAGE_HOME has seen. With --folder it shows what root's
    watcher with that folder has seen of your jobs.

    Examples:

      ullage slurm history 4711
      ullage slurm history --folder /shared/ullage
      ullage slurm history --json
    """
    from ullage.home import home
    from ullage.manager.slurm.runs import RunStore
    from ullage.manager.slurm.shared_history import told

    found = None if folder is None else told(folder)
    if found is not None:
        found = [run for run in found if job in (None, run.job)][:limit]
        found = found if job is None else found[::-1]
    else:
        store = RunStore(home() / STATE)
        try:
            found = store.newest(limit) if job is None else store.of(job)
        finally:
            store.close()
    if job is not None and not found:
        raise InvalidValue(f"no run of job {job} was seen to end; 'squeue --jobs={job}' says what Slurm knows of it")
    if as_json:
        print(json.dumps([{name: value for name, value in asdict(run).items() if name != "streams"} for run in found]))
        return
    rows = [
        [
            str(run.job), str(run.restarts + 1), format_moment(run.ended), run.gres or "-",
            "-" if run.used is None else format_bytes(run.used), run.cause, plain(run.next_text),
        ]
        for run in found
    ]  # fmt: skip
    heads = ["job", "run", "ended", "asked for", "used", "cause", "what then"]
    print(fitted(heads, rows, give_way=["used", "ended"], left=["ended", "asked for", "cause", "what then"]))


def monitor(
    folder: Annotated[
        Path, typer.Option("--folder", help="The folder that all nodes share.", metavar="FOLDER",
                           envvar="ULLAGE_SLURM_FOLDER", show_default=False)
    ],
    once: Once = False,
    interval: Interval = "5s",
    node: Annotated[
        str | None, typer.Option(help="What Slurm calls this node.", metavar="NAME", show_default="its host name")
    ] = None,
    cards: Annotated[Path | None, typer.Option(help="Watch the virtual GPUs in this folder.", metavar="FOLDER")] = None,
) -> None:  # fmt: skip
    """On a node: write down what jobs really take of its GPUs, for 'ullage slurm top' and 'ullage slurm watch'.

    Examples:

      ullage slurm monitor --folder /shared/ullage
    """
    from ullage.manager.monitor import best_source
    from ullage.manager.slurm.node_reports import NodeMonitor, check_node

    name = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    source = best_source(cards)
    try:
        found = NodeMonitor(source, check_node(name), folder)
        if once:
            found.write()
        else:
            found.run(_seconds(interval), _ending(), _say)
    finally:
        source.close()


def top(
    folder: Folder = None,
    as_json: Json = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print metrics for Prometheus.")] = False,
) -> None:
    """Show the cluster's GPUs: shards that jobs were given, memory that is really taken, job by job.

    Without --folder, or where no 'ullage slurm monitor' writes, what is really taken is not known ('-').

    Examples:

      ullage slurm top --folder /shared/ullage
      ullage slurm top --json
      ullage slurm top --prometheus > /var/lib/node_exporter/ullage_slurm.prom
    """
    from ullage.manager.slurm import overview as view

    if as_json and prometheus:
        raise InvalidValue("needed --json or --prometheus; found both")
    found = view.overview(folder)
    if as_json:
        print(json.dumps(found | {"over_promised": view.over_promised(found)}))
    elif prometheus:
        print(view.prometheus(found), end="")
    else:
        print(_table(found))
        for sentence in view.over_promised(found):
            print(plain(sentence))
        silent = view.unreported(found)
        if silent:
            more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
            names = plain(", ".join(silent[:5])) + more
            print(f"no report of {names}: 'ullage slurm monitor --folder FOLDER' there says what jobs take")


def epilog(folder: Annotated[Path, typer.Argument(help="The folder that all nodes share.", metavar="FOLDER")]) -> None:
    """Print an Epilog for Slurm that keeps what a failed job printed where 'ullage slurm watch' finds it.

    It is needed only where jobs print into files that the watcher cannot read, such as /tmp of a node.

    Example:

      ullage slurm epilog /shared/ullage > /etc/slurm/ullage-epilog.sh
    """
    from importlib.resources import files

    if not folder.is_absolute() or "'" in str(folder):
        raise InvalidValue(f"needed an absolute path without quotes; found {str(folder)!r}")
    print(
        (files("ullage.manager.slurm") / "files" / "watch_epilog.sh").read_text().replace("@SPOOL@", str(folder)),
        end="",
    )


def _table(found: dict[str, Any]) -> str:
    rows = []
    for node in found["nodes"]:
        for gpu in node["gpus"]:
            full = f"{gpu['promised']}/{gpu['shards']}" if gpu["shards"] else "-"
            rows.append([node["name"], str(gpu["index"]), full, _size(gpu["used"]), _size(gpu["total"]), "", "", ""])
            for job in gpu["jobs"]:
                mark = " !" if job["over_promise"] else ""
                what = plain(f"{job['job']} {job['user']} {job['name']}")
                taken = f"{_size(job['used'])}{mark}"
                rows.append(["", "", str(job["shards"]), taken, "", _size(job["promise"]), _size(job["peak"]), what])
    heads = ["node", "GPU", "shards", "taken", "of", "promised", "peak", "job"]
    return fitted(heads, rows, give_way=["peak", "of"], left=["job"])


def _size(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.1f} GiB"


def _seconds(interval: str) -> float:
    found = parse_duration(interval)
    if not 0.1 <= found <= 3600:
        raise InvalidValue(f"needed an interval from 0.1s to 1h; found {interval!r}")
    return found


def _ending() -> threading.Event:
    """Is set by SIGTERM and by Ctrl-C."""
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    return ending


def _say(text: str) -> None:
    print(plain(text), flush=True, file=sys.stderr)
