"""`ullage dataset`: what learned estimators are trained on, from drawing models to one file of measured runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli import completion
from ullage.cli.options import Json, Seed
from ullage.cli.progress import each
from ullage.errors import InvalidValue, UllageError
from ullage.units import format_bytes, parse_bytes, parse_duration

# `ullage dataset clean`: measured files to one Parquet file.

_CLEAN_EXAMPLES = """Clean measured runs and write them as one Parquet file.

FILES are what 'ullage dataset measure' wrote (also .gz), in any order: memory and utilisation of the same run are
joined. Tables of GPUMemNet's authors (.csv) are read too. The command prints what it dropped and why;
docs/reference/dataset.md has the columns.

Examples:

  ullage dataset clean cnn_measured.jsonl cnn_busy.jsonl --out cnn.parquet

  ullage dataset clean *.jsonl.gz --out h200.parquet --report dropped.json

  ullage dataset clean gpumemnet_mlp_a100.csv --out a100.parquet --json
"""


def clean(
    files: Annotated[
        list[Path], typer.Argument(help="Measured files: .jsonl, .jsonl.gz, or the authors' .csv.", metavar="FILE",
                                   show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(help="Write the cleaned runs to this file.", metavar="FILE.parquet", show_default=False)
    ],
    report: Annotated[
        Path | None, typer.Option(help="Write a report with every dropped line to this file.", metavar="FILE.json")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="How many processes build the models.", metavar="N", min=1,
                                 show_default="one per core")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Clean measured runs and write them as one Parquet file."""
    from ullage.research.datasets.cleaning import clean as clean_files
    from ullage.research.datasets.schema import frame, load_polars, write_dataset

    load_polars()
    rows, found = clean_files(files, workers, lambda runs, total: each(runs, "looking at models", total))
    table = frame(rows)
    if not len(table):
        raise UllageError(f"nothing is left to write: {found.read} lines read, {_counts(found.counts)}")
    write_dataset(table, out)
    told = {"file": str(out), **found.to_dict()}
    if report is not None:
        try:
            report.write_text(json.dumps(told, indent=1) + "\n")
        except OSError as error:
            raise InvalidValue(f"cannot write {report}: {error.strerror}") from None
    if as_json:
        print(json.dumps(told))
        return
    Console().print(_clean_table(told))


clean.__doc__ = _CLEAN_EXAMPLES


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _clean_table(told: dict[str, Any]) -> Table:
    from ullage.research.datasets.measured_files import COMPARED, REASONS

    table = Table(title=f"{told['kept']} runs: {told['file']}")
    table.add_column("")
    table.add_column("lines", justify="right")
    table.add_column("")
    table.add_row("read", str(told["read"]), f"from {len(told['files'])} files")
    table.add_row("kept", str(told["kept"]), "")
    table.add_row("joined", str(told["joined"]), "utilisation of a run whose memory was measured too")
    for reason, count in told["dropped"].items():
        table.add_row(f"dropped: {reason}", str(count), REASONS[reason])
    if told["lent"]:
        table.add_row("lent", str(told["lent"]), "shared a process: context of most runs of their family and precision")
    if told["renamed"]:
        table.add_row("renamed", str(told["renamed"]), "runs of different sets with the same id")
    for name, apart in told["noise"].items():
        share = name in COMPARED
        median, most = (f"{100 * apart[word]:.1f} %" if share else f"{apart[word]:.1f} points" for word in apart)
        table.add_row(
            f"repeated: {name}", str(told["repeated"]), f"readings differ by {median}, at most {most} in 90 %"
        )
    for name, count in told["blanked"].items():
        table.add_row(f"unknown: {name}", str(count), "not measured, or a figure that cannot be")
    return table


# `ullage dataset generate`: draws configurations of generated models.

_GENERATE_EXAMPLES = """Draw training runs of generated models (mlp, cnn or transformer) or of real ones (real).

Real models are those of torchvision, timm and transformers, with random weights, from about fifty families; their
packages must be installed. The same seed gives the same runs, and a larger count begins with the same ones. Each line
is a configuration that 'ullage dataset measure', 'ullage measure', 'ullage estimate' and 'ullage evaluate' take.

Examples:

  ullage dataset generate --family cnn --count 3000 --seed 1 --out cnn.jsonl

  ullage dataset generate --family real --count 400 --seed 3 --max-memory 16GiB --max-step 80ms --out real.jsonl

  ullage dataset generate --family real --count 200 --min-step 18ms --max-step 60ms --out busy.jsonl

  ullage dataset generate --family mlp --count 100 --seed 2 --ranges ranges.toml --max-memory 8GiB --out small.jsonl
"""


def generate(
    old_family: Annotated[str | None, typer.Argument(hidden=True)] = None,
    family: Annotated[
        str | None, typer.Option(help="The family of models: mlp, cnn, transformer or real.", metavar="NAME",
                                 show_default=False, autocompletion=completion.drawn_families)
    ] = None,
    count: Annotated[int, typer.Option(help="How many runs to draw.", metavar="N", min=1)] = 1000,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the runs to this file.", metavar="FILE.jsonl",
                                  show_default="FAMILY.jsonl")
    ] = None,
    ranges: Annotated[
        Path | None, typer.Option(help="A file with your own ranges, by family.", metavar="FILE.toml")
    ] = None,
    max_memory: Annotated[
        str, typer.Option(help="Draw no run that takes more memory, by a rough count.", metavar="SIZE")
    ] = "40GiB",
    max_step: Annotated[
        str, typer.Option(help="Draw no run whose step takes longer, by a rough count.", metavar="TIME")
    ] = "120ms",
    min_step: Annotated[
        str, typer.Option(help="Draw runs whose step takes as long at least, by a rough count; of real models that "
                               "are too small for it, the largest batch that is allowed.", metavar="TIME")
    ] = "0s",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Draw training runs of generated models."""
    from ullage.research.datasets.generate import DrawingLimits, draw, summary
    from ullage.research.datasets.generate import ranges as known_ranges
    from ullage.research.datasets.real_models import FAMILY, draw_real

    if old_family is not None and family is None:
        print(f"ullage: {old_family} is now typed as --family {old_family}", file=sys.stderr)
        family = old_family
    if family is None:
        raise typer.BadParameter("needed mlp, cnn, transformer or real", param_hint="--family")
    if family == FAMILY and ranges is not None:
        raise InvalidValue("--ranges is for generated models; leave it away for real ones")
    known = {} if family == FAMILY else known_ranges(family, ranges)
    file = out or Path(f"{family}.jsonl")
    if file.is_dir() or not file.parent.is_dir():  # before the drawing, which takes a minute for thousands
        raise InvalidValue(f"cannot write {file}: needed a file in a folder that exists")
    limits = DrawingLimits(parse_bytes(max_memory), parse_duration(max_step), parse_duration(min_step))
    rows = [
        draw_real(number, seed, limits) if family == FAMILY else draw(family, number, seed, known, limits)
        for number in each(range(count), "drawing", count)
    ]
    try:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise InvalidValue(f"cannot write {file}: {error.strerror}") from None
    found = {"family": family, "seed": seed, "file": str(file), **summary(rows)}
    if as_json:
        print(json.dumps(found))
        return
    Console().print(_generate_table(found))


generate.__doc__ = _GENERATE_EXAMPLES


def _generate_table(found: dict[str, Any]) -> Table:
    of = "real models" if found["family"] == "real" else f"generated {found['family']}s"
    table = Table(title=f"{found['rows']} runs of {of}, seed {found['seed']}: {found['file']}")
    table.add_column("")
    table.add_column("")
    sizes = (format_bytes(found[name]) for name in ("smallest", "median", "largest"))
    table.add_row("memory, by counting", "{} to {} (half of them) to {}".format(*sizes))
    unit = found["class_bytes"]
    classes = (f"{format_bytes(unit * number)} up: {count}" for number, count in found["classes"].items())
    table.add_row("classes of " + format_bytes(unit), ", ".join(classes))
    for name, title in (("arch", "forms"), ("opt", "optimizers"), ("precision", "precisions")):
        table.add_row(title, ", ".join(f"{word} {count}" for word, count in found[name].items()))
    return table


# `ullage dataset measure`: generated runs on a real GPU, thousands in minutes.

_MEASURE_EXAMPLES = """Measure configurations on this machine's GPU, each in a fresh process.

Memory is measured with many runs at once; --utilization reads each run alone, for --seconds. Rows are appended as they
come: after an interruption type the same line again. A run that runs out of memory is a row too.

Examples:

  ullage dataset measure cnn.jsonl --out cnn_measured.jsonl

  ullage dataset measure cnn.jsonl --out cnn_busy.jsonl --utilization --every 20 --seconds 1

  ullage dataset measure mlp.jsonl --out minute.jsonl --utilization --seconds 60 --raw logs/
"""


def measure(
    file: Annotated[
        Path, typer.Argument(help="Configurations written by 'ullage dataset generate'.", metavar="FILE",
                             show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(help="Append one line per run to this file; runs already in it are skipped.",
                           metavar="FILE.jsonl", show_default=False)
    ],
    workers: Annotated[int, typer.Option(help="How many processes run at once, at most.", metavar="N", min=1)] = 14,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", metavar="N", min=2)] = 3,
    utilization: Annotated[bool, typer.Option("--utilization", help="Measure utilisation, one run at a time.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Seconds to read utilisation for, after a warm-up.", metavar="SECONDS", min=0.2)
    ] = 1.0,
    readings: Annotated[
        int, typer.Option(help="Read utilisation so many times, in rounds over runs; the middle reading counts.",
                          metavar="N", min=1)
    ] = 1,
    every: Annotated[int, typer.Option(help="Take only every Nth configuration.", metavar="N", min=1)] = 1,
    timeout: Annotated[
        str, typer.Option(help="Give up on a run after this long, such as 90s or 10m.", metavar="TIME")
    ] = "1m",
    stop_after: Annotated[
        str | None, typer.Option(help="Stop after this long; run it again to continue.", metavar="TIME")
    ] = None,
    together: Annotated[
        int, typer.Option(help="Memory runs that share a process, one after the other: many times quicker, the same "
                          "figures of PyTorch, none of NVML.", metavar="N", min=1)
    ] = 1,
    raw: Annotated[
        Path | None, typer.Option(help="Keep logs in this folder, in one folder per configuration.", metavar="FOLDER")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure configurations on this machine's GPU, each in a fresh process."""
    if together > 1 and (utilization or raw):
        raise InvalidValue("--together is for memory alone: leave --utilization and --raw away")
    if readings > 1 and not utilization:
        raise InvalidValue("--readings says how often utilisation is read: add --utilization")
    from ullage.jobs.configuration import read_rows
    from ullage.research.datasets.measuring import MeasurementSettings, measure_rows

    rows = list(read_rows(file))[::every]
    if not rows:
        raise InvalidValue(f"{file} has no configurations")
    plan = MeasurementSettings(
        out=out, at_once=workers, iterations=steps, utilization=utilization, seconds=seconds,
        readings=readings, timeout=parse_duration(timeout), raw=raw, together=together,
    )  # fmt: skip
    left, measured = measure_rows(rows, plan)
    console = Console(stderr=True)
    if left < len(rows):
        console.print(f"{len(rows) - left} runs are in {out} already; {left} are left")
    tally = _follow(measured, left, console, None if stop_after is None else parse_duration(stop_after))
    if as_json:
        print(json.dumps({"file": str(out), **tally}))
        return
    print(
        f"{tally['measured']} measured, {tally['out_of_memory']} out of memory, {tally['failed']} failed "
        f"in {tally['seconds']} s: {out}"
    )


measure.__doc__ = _MEASURE_EXAMPLES


def _follow(
    measured: Iterator[dict[str, Any]], left: int, console: Console, stop_after: float | None
) -> dict[str, Any]:
    """Count the rows as they come. No thread draws the bar: the process that measures forks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tally: dict[str, Any] = {"measured": 0, "out_of_memory": 0, "failed": 0}
    begin = said = time.monotonic()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=left, rate="")
        for row in measured:
            outcome = "failed" if "failed" in row else "out_of_memory" if "oom" in row else "measured"
            tally[outcome] += 1
            if outcome != "measured":
                progress.console.print(f"{row['id']}: {row.get('failed') or row.get('oom')}", markup=False)
            now, done = time.monotonic(), sum(tally.values())
            rate = f"{done / max(now - begin, 1e-3):.1f} a second"
            progress.update(task, advance=1, rate=rate, refresh=console.is_terminal)
            if not console.is_terminal and now - said > 10:
                said = now
                print(f"{done} of {left} done, {rate}", flush=True, file=console.file)
            if stop_after is not None and now - begin > stop_after:
                progress.console.print(f"stopped after {stop_after:g} s; type the same line again for the rest")
                break
    getattr(measured, "close", lambda: None)()
    return {**tally, "seconds": round(time.monotonic() - begin, 1)}


# `ullage dataset show`: what a data set holds.

_SHOW_EXAMPLES = """Show what a data set holds: runs, memory by classes, optimizers, precisions.

Examples:

  ullage dataset show h200.parquet

  ullage dataset show h200.parquet --family cnn

  ullage dataset show h200.parquet --json
"""
_BAR = 30  # characters of the longest bar
_MOST_CLASSES = 48


def show(
    file: Annotated[
        Path, typer.Argument(help="A Parquet file written by 'ullage dataset clean'.", metavar="FILE",
                             show_default=False)
    ],
    family: Annotated[
        str | None, typer.Option(help="Show only this family of models.", metavar="NAME",
                                 autocompletion=completion.families)
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what a data set holds."""
    from ullage.errors import UnknownName
    from ullage.research.datasets.schema import read_dataset, summarize

    table = read_dataset(file)
    if family is not None:
        families = table["family"].drop_nulls().unique().to_list()
        if family not in families:
            raise UnknownName(f"family in {file}", family, families)
        table = table.filter(table["family"] == family)
    found = {"file": str(file), **summarize(table)}
    if as_json:
        print(json.dumps(found))
        return
    console = Console()
    console.print(_overview(found))
    if found["readings"]:
        console.print(_readings(found["readings"]))
    for name, part in found["families"].items():
        console.print(_classes(name, part))


show.__doc__ = _SHOW_EXAMPLES


def _overview(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['rows']} runs: {found['file']}")
    table.add_column("")
    for name in found["families"]:
        table.add_column(name, justify="right")
    parts = list(found["families"].values())
    for key, title in (("rows", "runs"), ("with_memory", "memory measured"), ("with_utilization", "utilisation read")):
        table.add_row(title, *(str(part[key]) for part in parts))
    for key, title in (
        ("memory", "memory of the process"), ("parameters", "parameters"), ("batch_size", "batch size"),
        ("layers", "layers"),
    ):  # fmt: skip
        table.add_row(title, *(_spread(part[key], key == "memory") for part in parts), end_section=key == "layers")
    for key, title in (("arch", "forms"), ("optimizer", "optimizers"), ("precision", "precisions")):
        table.add_row(title, *("\n".join(_shares(part[key], part["rows"])) for part in parts), end_section=True)
    environment = [f"{name}: {', '.join(found[name])}" for name in ("gpu", "torch", "cuda", "cudnn", "driver")]
    table.caption = "; ".join(environment)
    return table


_FIGURES = {
    "step_seconds": ("step, ms", 1000, 1), "host_seconds": ("host's part of it, ms", 1000, 1),
    "gract": ("GRACT, %", 100, 1), "smact": ("SMACT, %", 100, 1), "smocc": ("SMOCC, %", 100, 1),
    "drama": ("DRAMA, %", 100, 1), "tensor": ("tensor cores, %", 100, 1), "power_w": ("power, W", 1, 0),
    "energy_step": ("energy of a step, J", 1, 2),
}  # fmt: skip


def _readings(kinds: dict[str, Any]) -> Table:
    """Step time and activity of runs that were read alone, by kind of model."""
    table = Table(title="read alone: half of the runs lie below the middle figure, a tenth beyond each other one")
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_row("runs", *(str(part["rows"]) for part in kinds.values()))
    table.add_row("families", *(str(part["families"]) for part in kinds.values()))
    table.add_row("for testing", *(f"{part['test_rows']}\nof {len(part['test_families'])}" for part in kinds.values()))
    for name, (title, factor, digits) in _FIGURES.items():
        spreads = (part[name] for part in kinds.values())
        texts = ("unknown" if one is None else " ".join(f"{value * factor:.{digits}f}" for value in one)
                 for one in spreads)  # fmt: skip
        table.add_row(title, *texts)
    return table


def _spread(spread: dict[str, int] | None, is_memory: bool) -> str:
    if spread is None:
        return "unknown"
    texts = [format_bytes(spread[name]) if is_memory else f"{spread[name]:,}" for name in ("smallest", "largest")]
    middle = format_bytes(spread["median"]) if is_memory else f"{spread['median']:,}"
    return f"{texts[0]} to {texts[1]}\nmedian {middle}"


def _shares(counts: dict[str, int], rows: int) -> list[str]:
    return [f"{name} {100 * count / rows:.1f} %" for name, count in counts.items()]


def _classes(name: str, part: dict[str, Any]) -> Table:
    """Bars for classes of 1 GiB, and the share of each class of 8 GiB beside its first."""
    table = Table(title=f"{name}: memory of the process, by classes of 1 and 8 GiB")
    table.add_column("GiB", justify="right")
    table.add_column("runs", justify="right")
    table.add_column("")
    table.add_column("8 GiB", justify="right")
    small, large = part["classes_1gib"], part["classes_8gib"]
    shown = dict(list(small.items())[:_MOST_CLASSES])
    most, before = max(shown.values(), default=1), None
    for place, count in shown.items():
        beside = ""
        if place // 8 != before:
            before = place // 8
            share = 100 * large[before] / part["with_memory"]
            beside = f"{8 * before} to {8 * before + 8}: {large[before]} ({share:.1f} %)"
        table.add_row(f"{place} to {place + 1}", str(count), "█" * max(1, round(_BAR * count / most)), beside)
    if len(small) > len(shown):
        table.caption = f"{len(small) - len(shown)} larger classes are left out: --json has them"
    return table


dataset = typer.Typer(
    name="dataset",
    help="Data sets for learned estimators: generate models, measure them on a GPU, clean, show.",
    no_args_is_help=True,
)
dataset.command()(generate)
dataset.command()(measure)
dataset.command()(clean)
dataset.command()(show)
