"""`ullage measure`: runs on a real GPU, each in a fresh process."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ullage.cli import completion
from ullage.cli.options import Json, MeasuredGpu, ScriptArguments, Seed
from ullage.cli.progress import each, following
from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.research.measure.runs import RunRequest
    from ullage.research.measure.together import TogetherSettings
    from ullage.virtual.kernels.cudnn.formulas import ConvolutionProblem


_DRAWN_RUNS = 60  # whose calls are timed

_EXAMPLES = """Run training on this machine's GPU and write down what it took.

WHAT is a file of runs (.jsonl, one a line: a configuration, or a script), a training script (.py), or nothing with
--random. 'cudnn' asks cuDNN instead which plans it has for convolutions, and how much workspace each would take: those
of a list ('ullage convolutions list'), of a script, or random ones. No tensor is needed, and nothing is run.

'together' reads jobs that share the GPU, time-sliced and under MPS, each also alone: the sets that a list names beside
its configurations ({"set": "pair", "jobs": ["a", "b"]}), or --sets random ones. Type the same line again to go on.
--rounds takes longer, and tells slowdowns more exactly.

'rates' times operator calls one by one: how long the GPU takes and how busy it is, how long the host takes. The calls
are those of drawn runs (--random, 60 unless told), of a script, or of a list that --dry-run printed. --profile profiles
whole training steps of drawn runs instead. Both go on where they were stopped.

'context' tells what a process takes outside PyTorch's allocator on this GPU, bare and with the libraries in use, and
prints the lines for a file of your own card.

Examples:

  ullage measure runs.jsonl --out measured.jsonl

  ullage measure --random 200 --seed 7 --out fresh.jsonl --cap

  ullage measure train.py --out measured.jsonl -- --batch-size 64

  ullage measure context

  ullage measure cudnn --random 1000 --out plans.jsonl

  ullage measure cudnn tasks.json.gz --out plans.jsonl --workers 16

  ullage measure cudnn tasks.json.gz --architecture all --out plans.jsonl

  ullage measure cudnn train.py --out plans.jsonl -- --batch-size 64

  ullage measure rates --out rates.jsonl --stop-after 8m

  ullage measure rates --profile --random 200 --out profiles.jsonl

  ullage measure together jobs.jsonl --sets 200 --seed 1 --out together.jsonl

  ullage measure together pairs.jsonl --how mps --seconds 3 --out together.jsonl

  ullage measure together pairs.jsonl --rounds 3 --seconds 0.7 --out together.jsonl
"""


def measure(
    what: Annotated[
        Path | None, typer.Argument(help="Configurations (.jsonl), a training script (.py), 'context', "
                                    "'cudnn', 'rates' or 'together'.",
                                    metavar="WHAT", autocompletion=completion.measurable)
    ] = None,
    args: ScriptArguments = None,
    out: Annotated[
        Path, typer.Option(help="Append one line per run to this file; runs already in it are skipped.", metavar="FILE")
    ] = Path("measured.jsonl"),
    random: Annotated[int, typer.Option("--random", help="Measure this many random runs.", metavar="N", min=0)] = 0,
    seed: Seed = 0,
    avoid: Annotated[Path | None, typer.Option(help="Draw no model that is in this file.", metavar="FILE")] = None,
    histories: Annotated[
        Path | None, typer.Option(help="Keep the allocator's history of every run in this folder.", metavar="FOLDER")
    ] = None,
    cap: Annotated[
        bool, typer.Option("--cap", help="Limit each run to the bound of its estimate, and say whether it survives.")
    ] = False,
    workers: Annotated[int, typer.Option(help="How many runs at once, at most.", metavar="N", min=1)] = 8,
    estimated: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Estimate each run first, to know which fit side by side.")
    ] = True,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", metavar="N", min=1)] = 5,
    timeout: Annotated[
        str, typer.Option(help="Give up on a run after this long, such as 90s or 10m.", metavar="TIME")
    ] = "5m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the runs, and measure nothing.")] = False,
    description: Annotated[
        Path | None, typer.Option(help="With 'cudnn': ask about the GPU that this file describes (JSON, as cuDNN gives "
                                  "it of this machine's).", metavar="FILE")
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="With 'cudnn': ask about these architectures, 'all' or names such as "
                                 "sm_80,sm_89; each has a file of its own.", metavar="NAME",
                                 autocompletion=completion.gpu_architectures)
    ] = None,
    how: Annotated[
        str, typer.Option(help="With 'together': ways of sharing, timeslice or mps or both.", metavar="WAYS",
                          autocompletion=completion.ways_of_sharing)
    ] = "timeslice,mps",
    sets: Annotated[
        int, typer.Option(help="With 'together': draw this many sets of the list's jobs.", metavar="N", min=0)
    ] = 0,
    seconds: Annotated[
        float, typer.Option(help="With 'together': how long to read each set.", metavar="SECONDS", min=0.2)
    ] = 1.0,
    rounds: Annotated[
        int, typer.Option(help="With 'together': read jobs alone and together in turns, this many times: a host whose "
                          "speed changes then matters less.", metavar="N", min=0)
    ] = 0,
    stop_after: Annotated[
        str | None, typer.Option(help="With 'rates': stop after this long, such as 8m.", metavar="TIME")
    ] = None,
    activity: Annotated[
        bool, typer.Option("--activity/--no-activity", help="With 'rates': read the GPU's counters during every fourth "
                           "call, a quarter of a second each; without them, and without the host's time, --workers "
                           "processes make calls ready at once.")
    ] = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="With 'rates': profile training steps instead of timing single calls.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run training on this machine's GPU and write down what it took."""
    from ullage.research.measure import runs

    if what == Path("context"):
        _measure_context(as_json)
        return
    if what == Path("cudnn"):
        _ask_cudnn(list(args or []), out, random, seed, workers, description, architecture, dry_run, as_json)
        return
    if what == Path("rates"):
        limit = parse_duration(stop_after) if stop_after else None
        given, runs_drawn = list(args or []), random or _DRAWN_RUNS
        if profile:
            _measure_profiles(given, out, runs_drawn, seed, limit, dry_run, as_json)
        else:
            _measure_rates(given, out, runs_drawn, seed, limit, 0 if activity else workers, dry_run, as_json)
        return
    if what == Path("together"):
        from ullage.research.measure.together import TogetherSettings

        ways = tuple(filter(None, how.split(",")))
        plan = TogetherSettings(out=out, how=ways, seconds=seconds, rounds=rounds, timeout=parse_duration(timeout))
        _measure_together(list(args or []), plan, sets, seed, dry_run, as_json)
        return
    orders = _orders(what, list(args or []), random, seed, avoid, histories, steps)
    if dry_run:
        for order in orders:
            print(json.dumps(order.row))
        return
    card = runs.local_gpu()
    done = _measured_before(out)
    orders = [order for order in orders if order.row["id"] not in done]
    _say_left(len(done), len(orders), "runs", out)
    found = runs.measure(
        orders, card.name, total=card.usable, at_once=workers, cap=cap, estimated=estimated,
        timeout=parse_duration(timeout),
    )  # fmt: skip
    _follow(found, len(orders), out, as_json)


measure.__doc__ = _EXAMPLES


def _measure_context(as_json: bool) -> None:
    """Measure the CUDA context, and print the lines of a file that describes this card."""
    from ullage.research.measure.machine import as_own_card, measure_context
    from ullage.research.measure.runs import local_gpu

    found = measure_context()
    if as_json:
        print(json.dumps(found))
        return
    for name, size in found.items():
        print(f"{name}: {size / 2**20:.0f} MiB", file=sys.stderr)
    print("to let estimates use it, write these lines to $ULLAGE_HOME/gpus/NAME.toml:", file=sys.stderr)
    print(as_own_card(found, local_gpu().name))


def _ask_cudnn(
    args: list[str], out: Path, random: int, seed: int, workers: int, description: Path | None,
    architecture: str | None, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Ask cuDNN about convolutions, and write each answer as it comes."""
    from ullage.research.cudnn_tables import asking
    from ullage.virtual.kernels.cudnn.candidates import CudnnError

    if bool(args) == bool(random):
        raise InvalidValue("needed either a list of calls, a script, or --random COUNT after 'cudnn'")
    source = _existing(args[0] if args else None)
    if description is not None and architecture is not None:
        raise InvalidValue("needed --description or --architecture; found both")
    names = asking.architectures(architecture) if architecture else []
    file = _existing(description)
    told = file.read_text() if file else None
    own = None
    if not dry_run:
        asking.check(told)
        own = asking.own_description() if names else None
    if source is None:
        problems = asking.random_problems(random, seed)
    elif source.suffix == ".py":
        problems = asking.problems_of_script(source, args[1:])
    else:
        problems = asking.listed_problems(source)
    if dry_run:
        for problem in problems:
            print(json.dumps(problem))
        return
    if own is None:
        rows = [_ask_about(problems, out, workers, told)]
    else:
        places = {name: out.with_name(f"{out.stem}-{name}{out.suffix}") for name in names}
        rows = []
        for name, place in places.items():
            try:
                rows.append(_ask_about(problems, place, workers, asking.described(own, name)))
            except CudnnError as error:  # the others may be known to it
                rows.append({"file": str(place), "failed": str(error)})
    for row in rows:
        if as_json:
            print(json.dumps(row))
        elif "failed" in row:
            print(f"{row['failed']}: {row['file']} is not whole")
        else:
            print(f"cuDNN answered for {row['answered']} convolutions and declined {row['declined']}: {row['file']}")


def _ask_about(
    problems: Sequence[ConvolutionProblem], out: Path, workers: int, told: str | None
) -> dict[str, Any]:  # fmt: skip
    """Ask about what the file does not have yet, by one description of a GPU."""
    from ullage.research.cudnn_tables import asking

    done = asking.asked_before(out)
    left = [problem for problem in problems if problem not in done]
    _say_left(len(done), len(left), "convolutions", out)
    answers = asking.ask(left, workers, told)
    declined = sum("declined" in row for row in _appended(answers, "asking cuDNN", len(left), out))
    return {"file": str(out), "answered": len(left) - declined, "declined": declined}


def _measure_together(
    args: list[str], plan: TogetherSettings, count: int, seed: int, dry_run: bool, as_json: bool
) -> None:
    """Measure sets of jobs, and say in the end how they went."""
    from ullage.jobs import read_rows
    from ullage.research.measure.job_sets import draw_sets, sets_in
    from ullage.research.measure.together import measure_together

    if len(args) != 1:
        raise InvalidValue("needed one list of jobs after 'together': ullage measure together jobs.jsonl --sets 100")
    rows = [{"id": f"r{number:05d}", **row} for number, row in enumerate(read_rows(Path(args[0])))]
    wanted = draw_sets(rows, count, seed) if count else sets_in(rows)
    if not wanted:
        raise InvalidValue(f"{args[0]} names no sets: add --sets COUNT, or lines such as "
                           '{"set": "pair", "jobs": ["a", "b"]}')  # fmt: skip
    if dry_run:
        for one in wanted:
            print(json.dumps({"set": one.id, "jobs": one.jobs}))
        return
    left, found = measure_together(rows, wanted, plan)
    _say_left(len(wanted) * len(plan.how) - left, left, "sets", plan.out)
    console = Console(stderr=True)
    tally = {"measured": 0, "failed": 0, "alone": 0}
    with following("measuring", left, forks=True) as progress:
        for row in found:
            outcome = "failed" if "failed" in row else "alone" if "alone" in row else "measured"
            tally[outcome] += 1
            if outcome == "failed":
                console.print(f"{row['how']} {row.get('set') or row['alone']}: {row['failed']}", markup=False)
            if "set" in row:
                progress.step(f"{row['how']} {row['set']}")
    if as_json:
        print(json.dumps({"file": str(plan.out), **tally}))
        return
    print(f"{tally['measured']} sets measured, {tally['failed']} failed, {tally['alone']} jobs read alone: {plan.out}")


def _measure_rates(
    args: list[str],
    out: Path,
    runs: int,
    seed: int,
    limit: float | None,
    workers: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Time operator calls, and write each row as it comes; with `workers`, without counters and the host's time."""
    from ullage.jobs.configuration import rows_so_far
    from ullage.research.rates import listing, rounds, timing
    from ullage.research.rates.tensors import identity, packed

    source = _existing(args[0] if args else None)
    if not dry_run:
        _check_gpu()
    if source is None:
        calls = listing.drawn_calls(runs, seed, each=lambda found, count: each(found, "following", count))
    elif source.suffix == ".py":
        calls = listing.calls_of_script(source, args[1:])
    else:
        calls = listing.listed_calls(source)
    if dry_run:
        for call in calls:
            print(json.dumps(packed(call)))
        return
    rows = rows_so_far(out)
    done = {str(row["id"]) for row in rows if "id" in row}
    started = out.with_name(out.name + ".started")
    died = timing.died_in(started)
    first = [] if rows else [_machine()]
    if died is not None and died["id"] not in done:
        first.append(died)
        done.add(str(died["id"]))
    left = [call for call in calls if identity(call) not in done]
    _say_left(len(done), len(left), "calls", out)
    several = rounds.measured(left, workers, limit) if workers else timing.measured(left, timing.EVERY, limit, started)
    found = itertools.chain(first, several)
    timed = [row for row in _appended(found, "measuring", len(left) + len(first), out) if "id" in row]
    _say_rows(timed, "calls", out, as_json)


def _measure_profiles(
    args: list[str], out: Path, runs: int, seed: int, limit: float | None, dry_run: bool, as_json: bool
) -> None:
    """Profile training steps, and write each row as it comes."""
    from ullage.jobs import read_rows
    from ullage.research.rates import listing

    source = _existing(args[0] if args else None)
    rows = listing.drawn_runs(runs, seed) if source is None else list(read_rows(source))
    if dry_run:
        for row in rows:
            print(json.dumps(row))
        return
    _check_gpu()
    from ullage.research.rates import profiles

    done = _measured_before(out)
    left = [row for row in rows if str(row["id"]) not in done]
    _say_left(len(done), len(left), "runs", out)
    made = list(_appended(profiles.profiles(left, limit), "profiling", len(left), out))
    _say_rows(made, "steps", out, as_json)


def _existing(path: str | Path | None) -> Path | None:
    """A file that the command line names; `InvalidValue` if it is not there."""
    if path is not None and not Path(path).is_file():
        raise InvalidValue(f"cannot read {path}: no such file")
    return None if path is None else Path(path)


def _say_left(done: int, left: int, what: str, out: Path) -> None:
    if done:
        Console(stderr=True).print(f"{done} {what} are in {out} already; {left} are left")


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UllageError("needed a GPU to measure on; PyTorch finds none. --dry-run prints what would be measured")


def _machine() -> dict[str, Any]:
    from ullage.research.datasets.memory_run import describe_gpu

    return {"machine": describe_gpu()}


def _say_rows(rows: list[dict[str, Any]], what: str, out: Path, as_json: bool) -> None:
    failed = sum("failed" in row for row in rows)
    if as_json:
        print(json.dumps({"file": str(out), "measured": len(rows) - failed, "failed": failed}))
    else:
        print(f"measured {len(rows) - failed} {what}, {failed} failed: {out}")


def _appended(rows: Iterable[dict[str, Any]], doing: str, count: int, out: Path) -> Iterator[dict[str, Any]]:
    """The rows, each written to a file as it comes."""
    try:
        file = out.open("a")
    except OSError as error:
        raise InvalidValue(f"cannot write {out}: {error.strerror}") from None
    with file:
        for row in each(rows, doing, count):
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row


def _orders(
    what: Path | None, args: list[str], random: int, seed: int, avoid: Path | None, histories: Path | None,
    steps: int,
) -> list[RunRequest]:  # fmt: skip
    from ullage.jobs import read_rows
    from ullage.research.measure.drawing import draw
    from ullage.research.measure.runs import RunRequest, read_runs

    if (what is None) == (random == 0):
        raise InvalidValue("needed either a file (configurations or a script) or --random COUNT")
    if what is None:
        known = {str(row.get("model")) for row in read_rows(avoid)} if avoid else set()
        return read_runs(draw(random, seed, known), steps, histories)
    if not what.is_file():
        raise InvalidValue(f"cannot read {what}: no such file")
    if what.suffix == ".py":
        row: dict[str, Any] = {"id": what.stem, "script": str(what), "args": args}
        history = str(histories / f"{what.stem}.npz") if histories else None
        return [RunRequest(row=row, script=str(what), args=args, history=history)]
    return read_runs(list(read_rows(what)), steps, histories)


def _measured_before(out: Path) -> set[str]:
    from ullage.jobs.configuration import rows_so_far

    return {str(row.get("id")) for row in rows_so_far(out)}


def _follow(found: Any, count: int, out: Path, as_json: bool) -> None:
    """Write each row as it comes, and say in the end how the runs went."""
    console = Console(stderr=True)
    tally = {"measured": 0, "ran out of memory": 0, "failed": 0, "survived": 0, "capped": 0}
    for row in _appended(found, "measuring", count, out):
        outcome = "failed" if "failed" in row else "ran out of memory" if "oom" in row else "measured"
        tally[outcome] += 1
        if "capped" in row:
            tally["capped"] += 1
            tally["survived"] += row["capped"]["survived"]
        if outcome != "measured":
            console.print(f"{row['id']} {row.get('model', '')}: {row.get('failed') or row.get('oom')}")
    if as_json:
        print(json.dumps({"file": str(out), **{name.replace(" ", "_"): number for name, number in tally.items()}}))
        return
    print(f"{tally['measured']} measured, {tally['ran out of memory']} out of memory, {tally['failed']} failed: {out}")
    if tally["capped"]:
        print(f"under the bound of the estimate {tally['survived']} of {tally['capped']} survived")


# `ullage diff`: the first request in which a virtual run differs from a recorded one.


def diff(
    row: Annotated[str, typer.Argument(help="The id of a measured run.", metavar="RUN", show_default=False)],
    truth: Annotated[
        Path, typer.Option(help="Measured runs (JSONL), with their histories beside the file.", metavar="FILE",
                           show_default=False)
    ],
    gpu: MeasuredGpu = None,
    around: Annotated[
        int, typer.Option(help="How many requests to show before and after.", metavar="N", min=1)
    ] = 6,
) -> None:  # fmt: skip
    """Show the first request in which the virtual run differs from the recorded one, and who asked.

    Example:

      ullage diff d0149 --truth h200_train_steps.jsonl
    """
    from ullage.jobs import Configuration, read_rows, train
    from ullage.research.measure.differences import first_difference, recorded_requests, virtual_requests

    rows = {str(line.get("id")): line for line in read_rows(truth)}
    if row not in rows:
        raise UnknownName("measured run", row, rows)
    history = rows[row].get("events")
    if not history:
        with_history = [name for name, line in rows.items() if line.get("events")]
        raise UllageError(
            f"run {row} has no recorded history; {len(with_history)} runs have: {', '.join(with_history[:8])} ..."
        )
    configuration = Configuration.from_row(rows[row])
    recorded = recorded_requests(truth.parent / history)
    with Console(stderr=True).status(f"running {configuration.name} on a virtual GPU ..."):
        virtual = virtual_requests(lambda: train(configuration), gpu or "H200")
    found = first_difference(recorded, virtual, around)
    print(f"{rows[row]['model']}: {len(recorded):,} requests and frees recorded, {len(virtual):,} on the virtual GPU")
    print(found if found is not None else "no difference")
