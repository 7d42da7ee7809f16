"""`ullage lab measure`: measurements on a GPU, in files that estimators learn from."""

import itertools
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from ullage.cli import completion
from ullage.cli.measured_files import appended, existing, measured_before, say_left
from ullage.cli.options import Json, Seed, argument, command_group, option
from ullage.cli.progress import each, following
from ullage.errors import InvalidValue, UllageError
from ullage.units import parse_duration

_DRAWN_RUNS = 60  # drawn runs whose calls are timed

measure = command_group("Measure on this machine's GPU: data sets, operator calls, steps, jobs that share the card.")
Out = Annotated[Path, option("Append a line per measurement. Those already in the file are skipped.", "FILE")]
Random = Annotated[int, option("Draw this many runs.", "--random N", min=1)]
StopAfter = Annotated[str | None, option("Stop after this long, such as 8m.", "TIME")]
DryRun = Annotated[bool, option("Print the runs; measure nothing.", "--dry-run")]
Workers = Annotated[int, option("Maximum number of processes.", "N", min=1)]


@measure.command()
def together(
    jobs: Annotated[Path, argument("A list of jobs (.jsonl).", "FILE")],
    out: Out = Path("together.jsonl"),
    sharing: Annotated[
        str, option("Ways of sharing: time-slicing, mps or both.", "WAY", complete=completion.ways_of_sharing)
    ] = "time-slicing,mps",
    sets: Annotated[int, option("Draw this many sets of the list's jobs.", "N", min=0)] = 0,
    seed: Seed = 0,
    seconds: Annotated[float, option("Measuring time for each set.", "SECONDS", min=0.2)] = 1.0,
    rounds: Annotated[
        int,
        option(
            "Number of rounds, each with the jobs alone and together. More rounds reduce noise from the host.",
            "N",
            min=0,
        ),
    ] = 0,
    timeout: Annotated[str, option("Give up on a set after this long, such as 90s or 10m.", "TIME")] = "5m",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure jobs that share the GPU, by time slicing and by MPS, and each job alone.

    A list names its sets ({"set": "pair", "jobs": ["a", "b"]}), or --sets draws random ones. Run the same
    command again to continue. --rounds takes longer and measures slowdowns more precisely.

    Examples:

      ullage lab measure together jobs.jsonl --sets 200 --seed 1 --out together.jsonl
      ullage lab measure together pairs.jsonl --sharing mps --seconds 3 --rounds 3
    """
    from ullage.jobs import read_rows
    from ullage_lab.measure.job_sets import draw_sets, sets_in
    from ullage_lab.measure.together import TogetherSettings, measure_together

    ways = tuple(filter(None, sharing.split(",")))
    plan = TogetherSettings(out=out, how=ways, seconds=seconds, rounds=rounds, timeout=parse_duration(timeout))
    rows = [{"id": f"r{number:05d}", **row} for number, row in enumerate(read_rows(jobs))]
    wanted = draw_sets(rows, sets, seed) if sets else sets_in(rows)
    if not wanted:
        raise InvalidValue(
            f'{jobs} names no sets: add --sets COUNT, or lines such as {{"set": "pair", "jobs": ["a", "b"]}}'
        )
    if dry_run:
        for one in wanted:
            print(json.dumps({"set": one.id, "jobs": one.jobs}))
        return
    left, readings = measure_together(rows, wanted, plan)
    say_left(len(wanted) * len(ways) - left, left, "sets", out)
    tally = {"measured": 0, "failed": 0, "alone": 0}
    with following("measuring", left, forks=True) as progress:
        for row in readings:
            tally["failed" if "failed" in row else "alone" if "alone" in row else "measured"] += 1
            if "failed" in row:
                _complain(f"{row['how']} {row.get('set') or row['alone']}: {row['failed']}")
            if "set" in row:
                progress.step(f"{row['how']} {row['set']}")
    if as_json:
        print(json.dumps({"file": str(out), **tally}))
        return
    print(f"{tally['measured']} sets measured, {tally['failed']} failed, {tally['alone']} jobs read alone: {out}")


def _complain(text: str) -> None:
    Console(stderr=True).print(text, markup=False)


@measure.command()
def calls(
    source: Annotated[
        list[str] | None, argument("A script with its arguments, or a list that --dry-run printed.", "[FILE]")
    ] = None,
    out: Out = Path("rates.jsonl"),
    random: Random = _DRAWN_RUNS,
    seed: Seed = 0,
    stop_after: StopAfter = None,
    activity: Annotated[
        bool,
        option(
            "Read the GPU's counters during every fourth call, for 0.25 s each.",
            "--activity/--no-activity",
        ),
    ] = True,
    workers: Workers = 8,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Time operator calls one by one: GPU time, GPU activity and host time.

    The calls are those of drawn runs, of a script, or of a list. Run the same command again to continue.

    Examples:

      ullage lab measure calls --out rates.jsonl --stop-after 8m
      ullage lab measure calls --random 5 --dry-run
    """
    from ullage.jobs.model import rows_so_far
    from ullage_lab.calls import identity, packed
    from ullage_lab.draw import calls as listing
    from ullage_lab.measure import rounds, timing

    listed = existing(source[0] if source else None)
    if not dry_run:
        _check_gpu()
    if listed is None:
        operator_calls = listing.drawn_calls(random, seed, each=lambda rows, count: each(rows, "following", count))
    elif listed.suffix == ".py":
        operator_calls = listing.calls_of_script(listed, (source or [])[1:])
    else:
        operator_calls = listing.listed_calls(listed)
    if dry_run:
        for call in operator_calls:
            print(json.dumps(packed(call)))
        return
    from ullage_lab.measure.memory import describe_gpu

    rows = rows_so_far(out)
    done = {str(row["id"]) for row in rows if "id" in row}
    started = out.with_name(out.name + ".started")
    died = timing.died_in(started)
    first = [] if rows else [{"machine": describe_gpu()}]
    if died is not None and died["id"] not in done:
        first.append(died)
        done.add(str(died["id"]))
    left = [call for call in operator_calls if identity(call) not in done]
    say_left(len(done), len(left), "calls", out)
    limit = parse_duration(stop_after) if stop_after else None
    timed = timing.measured(left, timing.EVERY, limit, started) if activity else rounds.measured(left, workers, limit)
    made = appended(itertools.chain(first, timed), "measuring", len(left) + len(first), out)
    _say_rows([row for row in made if "id" in row], "calls", out, as_json)


@measure.command()
def steps(
    source: Annotated[
        Path | None, argument("A list of configurations (.jsonl); drawn ones without it.", "[FILE]")
    ] = None,
    out: Out = Path("profiles.jsonl"),
    random: Random = _DRAWN_RUNS,
    seed: Seed = 0,
    stop_after: StopAfter = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Profile whole training steps.

    Examples:

      ullage lab measure steps --random 200 --out profiles.jsonl
    """
    from ullage.jobs import read_rows
    from ullage_lab.draw import calls as listing

    rows = listing.drawn_runs(random, seed) if source is None else list(read_rows(source))
    if dry_run:
        for row in rows:
            print(json.dumps(row))
        return
    _check_gpu()
    from ullage_lab.measure import profiles

    done = measured_before(out)
    left = [row for row in rows if str(row["id"]) not in done]
    say_left(len(done), len(left), "runs", out)
    limit = parse_duration(stop_after) if stop_after else None
    made = list(appended(profiles.profiles(left, limit), "profiling", len(left), out))
    _say_rows(made, "steps", out, as_json)


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UllageError("cannot measure: PyTorch finds no GPU. --dry-run prints the runs")


def _say_rows(rows: list[dict[str, Any]], what: str, out: Path, as_json: bool) -> None:
    failed = sum("failed" in row for row in rows)
    if as_json:
        print(json.dumps({"file": str(out), "measured": len(rows) - failed, "failed": failed}))
    else:
        print(f"measured {len(rows) - failed} {what}, {failed} failed: {out}")


@measure.command()
def dataset(
    file: Annotated[Path, argument("Configurations written by 'ullage lab draw dataset'.", "FILE")],
    out: Annotated[Path, option("Append one line per run to this file; runs already in it are skipped.", "FILE.jsonl")],
    workers: Annotated[int, option("Maximum number of processes.", "N", min=1)] = 14,
    steps: Annotated[int, option("Optimizer steps of each run.", "N", min=2)] = 3,
    utilization: Annotated[bool, option("Measure utilisation, one run at a time.", "--utilization")] = False,
    seconds: Annotated[float, option("Seconds to read utilisation for, after a warm-up.", "SECONDS", min=0.2)] = 1.0,
    readings: Annotated[int, option("Number of utilisation readings per run; the median counts.", "N", min=1)] = 1,
    every: Annotated[int, option("Take only every Nth configuration.", "N", min=1)] = 1,
    timeout: Annotated[str, option("Give up on a run after this long, such as 90s or 10m.", "TIME")] = "1m",
    stop_after: Annotated[str | None, option("Stop after this long; run it again to continue.", "TIME")] = None,
    together: Annotated[
        int,
        option(
            "Number of memory runs per process. Many are much faster, but without NVML's figures.",
            "N",
            min=1,
        ),
    ] = 1,
    raw: Annotated[Path | None, option("Write logs to this folder, one folder per configuration.", "FOLDER")] = None,
    as_json: Json = False,
) -> None:
    """Measure configurations on this machine's GPU, each in a fresh process.

    Memory is measured with many runs at once; --utilization reads each run alone, for --seconds. Rows are appended as
    they come: after an interruption type the same line again. A run that runs out of memory is a row too.

    Examples:

      ullage lab measure dataset cnn.jsonl --out cnn_measured.jsonl
      ullage lab measure dataset cnn.jsonl --out cnn_busy.jsonl --utilization --every 20 --seconds 1
      ullage lab measure dataset mlp.jsonl --out minute.jsonl --utilization --seconds 60 --raw logs/
    """
    if together > 1 and (utilization or raw):
        raise InvalidValue("--together is for memory alone: leave --utilization and --raw away")
    if readings > 1 and not utilization:
        raise InvalidValue("--readings says how often utilisation is read: add --utilization")
    from ullage.jobs.model import read_rows
    from ullage_lab.measure.dataset import MeasurementSettings, measure_rows

    rows = list(read_rows(file))[::every]
    if not rows:
        raise InvalidValue(f"{file} has no configurations")
    plan = MeasurementSettings(
        out=out,
        at_once=workers,
        iterations=steps,
        utilization=utilization,
        seconds=seconds,
        readings=readings,
        timeout=parse_duration(timeout),
        raw=raw,
        together=together,
    )
    left, measured = measure_rows(rows, plan)
    say_left(len(rows) - left, left, "runs", out)
    limit = None if stop_after is None else parse_duration(stop_after)
    tally: dict[str, Any] = {"measured": 0, "out_of_memory": 0, "failed": 0}
    begin = time.monotonic()
    with following("measuring", left, forks=True) as progress, closing(measured):
        for row in measured:
            tally["failed" if "failed" in row else "out_of_memory" if "oom" in row else "measured"] += 1
            if wrong := row.get("failed") or row.get("oom"):
                _complain(f"{row['id']}: {wrong}")
            progress.step(f"{sum(tally.values()) / max(time.monotonic() - begin, 1e-3):.1f} a second")
            if limit is not None and time.monotonic() - begin > limit:
                _complain(f"stopped after {limit:g} s; type the same line again for the rest")
                break
    tally["seconds"] = round(time.monotonic() - begin, 1)
    if as_json:
        print(json.dumps({"file": str(out), **tally}))
        return
    print(
        f"{tally['measured']} measured, {tally['out_of_memory']} out of memory, {tally['failed']} failed "
        f"in {tally['seconds']} s: {out}"
    )
