"""`ullage trace`: traces of jobs for the simulator: drawn, looked at, and written in Ullage's own form."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli.options import Json, Seed, with_options
from ullage.cli.progress import following
from ullage.cli.scenarios import DrawnOptions, TraceOptions, drawn_source
from ullage.cli.tables import fitted
from ullage.text import plain
from ullage.units import format_bytes, format_duration

if TYPE_CHECKING:
    from ullage.manager.simulation.trace import JobTrace

trace = typer.Typer(
    help="Traces of jobs for 'ullage simulate' and 'ullage sweep': draw, look at and convert them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_MOST_KINDS = 20
Out = Annotated[
    Path, typer.Option(help="Write the trace to this file: .csv or .json, also with .gz. A file that is there is not "
                       "written over.", metavar="FILE.csv", show_default=False)
]  # fmt: skip
File = Annotated[
    Path, typer.Argument(help="A trace in any form that is known: a file, or the folder of a public trace.",
                         metavar="TRACE", show_default=False)
]  # fmt: skip


def generate(
    jobs: Annotated[int, typer.Argument(help="How many jobs.", metavar="JOBS", min=1, show_default=False)],
    out: Out,
    gpus: Annotated[
        int, typer.Option(help="How many GPUs the load is meant for.", metavar="N", min=1)
    ] = 4,
    mix: Annotated[
        str, typer.Option(help="The mix of known workloads: mixed (65 % light, 27 % medium, 8 % large) or heavy "
                          "(83 % medium, 17 % large).", metavar="NAME")
    ] = "mixed",
    seed: Seed = 0,
    as_json: Json = False,
    **drawn: Any,
) -> None:  # fmt: skip
    """Draw a trace of known workloads, as jobs of a shared cluster come.

    Examples:

      ullage trace generate 500 --gpus 8 --load 1.2 --out jobs.csv
      ullage trace generate 20000 --gpus 200 --burst 5 --daily 0.8 --tail pareto --spread 1.5 --out month.csv.gz
    """
    from ullage.manager.simulation.reading import write_trace

    made = drawn_source(jobs, gpus, drawn | {"mix": mix}).read(seed)
    write_trace(made, out)
    _print(made, as_json, f"written: {out}")


def show(file: File, as_json: Json = False, seed: Seed = 0, **options: Any) -> None:
    """Tell what jobs a trace has: how many, when they come, what they need and how long they work.

    Examples:

      ullage trace show jobs.csv
      ullage trace show philly/cluster_job_log --limit 10000 --json
    """
    _print(_read(file, seed, options), as_json)


def convert(file: File, out: Out, as_json: Json = False, seed: Seed = 0, **options: Any) -> None:
    """Write a trace in Ullage's own form, as CSV or JSON. What was assumed about it is told.

    Examples:

      ullage trace convert helios/cluster_log.csv --out helios.csv.gz
      ullage trace convert pai/ --limit 5000 --mix heavy --seed 1 --out pai.json
    """
    from ullage.manager.simulation.reading import write_trace

    read = _read(file, seed, options)
    write_trace(read, out)
    _print(read, as_json, f"written: {out}")


for command, shared in ((generate, DrawnOptions), (show, TraceOptions), (convert, TraceOptions)):
    trace.command()(with_options(shared)(command))


def _read(file: Path, seed: int, options: dict[str, Any]) -> JobTrace:
    from ullage.manager.simulation.reading import read_trace

    with following("reading the trace"):
        return read_trace(file, format=options["trace_format"], limit=options["limit"], mix=options["mix"], seed=seed)


def _facts(read: JobTrace) -> dict[str, Any]:
    jobs = read.jobs
    counts: Counter[str] = Counter()
    works: dict[str, float] = defaultdict(float)
    for job in jobs:
        counts[job.kind.name] += 1
        works[job.kind.name] += job.work_s
    memory = {kind.name: kind.memory for kind in read.kinds}
    return {
        "name": read.name,
        "jobs": len(jobs),
        "users": len({job.user for job in jobs}),
        "span_s": jobs[-1].arrival - jobs[0].arrival,
        "gpu_s": sum(job.work_s * job.gpus for job in jobs),
        "most_gpus": max(job.gpus for job in jobs),
        "notes": list(read.notes),
        "kinds": [
            {"kind": name, "jobs": count, "memory": memory[name], "work_s": works[name] / count}
            for name, count in counts.most_common()
        ],
    }


def _print(read: JobTrace, as_json: bool, *more: str) -> None:
    facts = _facts(read)
    if as_json:
        print(json.dumps(facts))
        return
    span, most, kinds = facts["span_s"], facts["most_gpus"], facts["kinds"]
    jobs, users = (f"{facts[what]:,} {what[: None if facts[what] > 1 else -1]}" for what in ("jobs", "users"))
    print(f"{plain(read.name)}: {jobs} of {users} in {format_duration(span)}")
    at_once = f", {facts['gpu_s'] / span:.1f} GPUs on average" if span else ""
    print(f"they need {facts['gpu_s'] / 3600:,.1f} GPU hours{at_once}; one needs up to {most} GPU{'s' * (most > 1)}\n")
    rows = [[plain(row["kind"]), f"{row['jobs']:,}", format_bytes(row["memory"]), format_duration(row["work_s"])]
            for row in kinds[:_MOST_KINDS]]  # fmt: skip
    print(fitted(["kind", "jobs", "memory", "mean work"], rows))
    if len(kinds) > _MOST_KINDS:
        print(f"and {len(kinds) - _MOST_KINDS:,} more kinds; --json has all")
    for note in (*read.notes, *more):
        print(plain(note))
