"""`ullage trace`: look at a trace of jobs, generate one, convert one to Ullage's own format, or run one."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

from ullage.cli.completion import promising_estimators as _NAMES
from ullage.cli.options import Json, Seed, argument, option, with_options
from ullage.cli.progress import following
from ullage.cli.scenarios import DrawnOptions, TraceOptions, drawn_source
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue
from ullage.manager.simulation.trace import JobTrace
from ullage.text import plain
from ullage.units import format_bytes, format_duration

_MOST_KINDS = 20
RUN = "Running the trace"
_PROMISES = "Estimator that sets promises, as in 'ullage simulate'; without it the daemon estimates the job files."


@with_options(TraceOptions, DrawnOptions)
def trace(
    file: Annotated[
        Path | None, argument("Trace in any known format: a file, or a public trace's folder.", "TRACE")
    ] = None,
    out: Annotated[
        Path | None, option("Write the trace to a new .csv or .json file, or .gz of one.", "FILE.csv")
    ] = None,
    for_gpus: Annotated[int, option("With --generate: number of GPUs that --load refers to.", "N", min=1)] = 4,
    run: Annotated[bool, option("Run the jobs on the daemon, as stand-ins.", "--run", panel=RUN)] = False,
    speed: Annotated[str | None, option("Speed of arrivals and work.", "60x", default="1x", panel=RUN)] = None,
    estimator: Annotated[str | None, option(_PROMISES, "--estimator -e NAME", panel=RUN, complete=_NAMES)] = None,
    save: Annotated[Path | None, option("Write the run to this .json or .json.gz file.", "FILE", panel=RUN)] = None,
    seed: Seed = 0,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Show the jobs of a trace: count, arrivals, memory and duration, or run them.

    --generate creates a trace of known workloads instead. Every assumption is printed.

    --run submits the jobs to the daemon at their times. Stand-ins take their memory, also of virtual GPUs, and can run
    out of it. Ctrl-C cancels them. Figures are in the trace's time. 'simulate --compare-with' reads the --save file.

    Examples:

      ullage trace philly/cluster_job_log --limit 10000
      ullage trace --generate 500 --for-gpus 8 --load 1.2 --out jobs.csv
      ullage trace philly_heavy-60-tasks.sh --run --speed 60x
    """
    from ullage.manager.simulation.reading import read_trace, write_trace

    if (file is None) == (options["generate"] is None):
        raise InvalidValue("trace needs either a file or --generate N; type for example: ullage trace jobs.csv")
    for name, value in {"--speed": speed, "--estimator": estimator, "--save": save}.items():
        if value is not None and not run:
            raise InvalidValue(f"{name} works only with --run; add it")
    if file is None:
        read = drawn_source(for_gpus, options).read(seed)
    else:
        with following("reading the trace"):
            chosen = {name: options[name] for name in ("limit", "mix")}
            read = read_trace(file, format=options["trace_format"], seed=seed, **chosen)
    if out is not None:
        write_trace(read, out)
    if run:
        _run(read, speed or "1x", estimator, save, as_json)
    else:
        _print(read, as_json, *([] if out is None else [f"written: {out}"]))


def _run(read: JobTrace, speed: str, estimator: str | None, save: Path | None, as_json: bool) -> None:
    from ullage.cli.simulation import runs_remarks, runs_table
    from ullage.cli.trace_runs import execute
    from ullage.manager.client import Client
    from ullage.manager.simulation.result import DONE, OUT_OF_MEMORY, check_results_file, write_results

    try:
        factor = float(speed.removesuffix("x"))
    except ValueError:
        raise InvalidValue(f"--speed must be a factor such as 60x, got {speed!r}") from None
    if save is not None:
        check_results_file(save)
    with Client() as client, following(f"running {plain(read.name)}", len(read.jobs), stoppable=True) as going:
        result = execute(read, client, factor, estimator, lambda sent, over: going.doing(f"{sent:,} submitted", over))
    going.end()
    if save is not None:
        write_results(save, [result])
    ooms = Counter(job for job in result.jobs for each in job.attempts if each.cause == OUT_OF_MEMORY)
    recoveries: list[dict[str, Any]] = [
        {"job": job.id, "kind": job.kind, "ooms": count, "state": job.state} for job, count in ooms.items()
    ]
    notes = [*read.notes, f"the measured times were {factor:g} times shorter; activity and energy are predicted"]
    if as_json:
        print(json.dumps({"runs": [result.summary()], "recoveries": recoveries, "notes": notes}))
        return
    print(runs_table([result]))
    for line in [*runs_remarks([result]), *map(plain, notes)]:
        print(line)
    print(f"{len(ooms)} jobs ran out of memory, {sum(job.state == DONE for job in ooms)} of them recovered")
    for row in recoveries[:_MOST_KINDS]:
        print(f"  job {row['job']}, {plain(row['kind'])}: out of memory {row['ooms']}x, then {row['state']}")
    if save is not None:
        print(f"written: {save}")


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
    rows = [
        [plain(row["kind"]), f"{row['jobs']:,}", format_bytes(row["memory"]), format_duration(row["work_s"])]
        for row in kinds[:_MOST_KINDS]
    ]
    print(fitted(["kind", "jobs", "memory", "mean work"], rows))
    if len(kinds) > _MOST_KINDS:
        print(f"and {len(kinds) - _MOST_KINDS:,} more kinds; --json has all")
    for note in (*read.notes, *more):
        print(plain(note))
