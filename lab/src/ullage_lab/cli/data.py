"""`ullage lab data`: makes one data set from measured files, and shows its contents."""

import json
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from ullage.cli import completion
from ullage.cli.options import Json, argument, command_group, option
from ullage.cli.progress import each
from ullage.errors import InvalidValue, UllageError
from ullage.units import format_bytes

data = command_group("Data sets for learned estimators: clean measured files, show.")
_BAR = 30  # characters of the longest bar
_MOST_CLASSES = 48
_FIGURES = {
    "step_seconds": ("step, ms", 1000, 1),
    "host_seconds": ("host's part of it, ms", 1000, 1),
    "gract": ("GRACT, %", 100, 1),
    "smact": ("SMACT, %", 100, 1),
    "smocc": ("SMOCC, %", 100, 1),
    "drama": ("DRAMA, %", 100, 1),
    "tensor": ("tensor cores, %", 100, 1),
    "power_w": ("power, W", 1, 0),
    "energy_step": ("energy of a step, J", 1, 2),
}


@data.command()
def clean(
    files: Annotated[list[Path], argument("Measured files: .jsonl, .jsonl.gz, or the authors' .csv.", "FILE")],
    out: Annotated[Path, option("Write the cleaned runs to this file.", "FILE.parquet")],
    report: Annotated[Path | None, option("Write a report with every dropped line to this file.", "FILE.json")] = None,
    workers: Annotated[
        int | None, option("Number of processes that build the models.", "N", min=1, default="one per core")
    ] = None,
    as_json: Json = False,
) -> None:
    """Clean measured runs and write them as one Parquet file.

    FILES are what 'ullage lab measure dataset' wrote (also .gz), in any order: memory and utilisation of the same run
    are joined. Tables of GPUMemNet's authors (.csv) are read too. The command prints what it dropped and why;
    lab/docs/data.md has the columns.

    Examples:

      ullage lab data clean cnn_measured.jsonl cnn_busy.jsonl --out cnn.parquet
      ullage lab data clean *.jsonl.gz --out h200.parquet --report dropped.json
      ullage lab data clean gpumemnet_mlp_a100.csv --out a100.parquet --json
    """
    from ullage_lab.clean.rows import clean as clean_files
    from ullage_lab.clean.schema import frame, load_polars, write_dataset

    load_polars()
    rows, cleaning = clean_files(files, workers, lambda runs, total: each(runs, "looking at models", total))
    table = frame(rows)
    if not len(table):
        raise UllageError(f"nothing is left to write: {cleaning.read} lines read, {_counts(cleaning.counts)}")
    write_dataset(table, out)
    summary = {"file": str(out), **cleaning.to_dict()}
    if report is not None:
        try:
            report.write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise InvalidValue(f"cannot write {report}: {error.strerror}") from None
    if as_json:
        print(json.dumps(summary))
        return
    Console().print(_clean_table(summary))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _clean_table(summary: dict[str, Any]) -> Table:
    from ullage_lab.clean.measured_files import COMPARED, REASONS

    rows = [
        ("read", summary["read"], f"from {len(summary['files'])} files"),
        ("kept", summary["kept"], ""),
        ("joined", summary["joined"], "utilisation of a run whose memory was measured too"),
        *((f"dropped: {reason}", count, REASONS[reason]) for reason, count in summary["dropped"].items()),
    ]
    if summary["lent"]:
        rows.append(("lent", summary["lent"], "shared a process: context of most runs of their family and precision"))
    if summary["renamed"]:
        rows.append(("renamed", summary["renamed"], "runs of different sets with the same id"))
    for name, apart in summary["noise"].items():
        share = name in COMPARED
        median, most = (f"{100 * apart[word]:.1f}%" if share else f"{apart[word]:.1f} points" for word in apart)
        rows.append((f"repeated: {name}", summary["repeated"], f"readings differ by {median}, at most {most} in 90%"))
    unknown = "not measured, or a figure that cannot be"
    rows += [(f"unknown: {name}", count, unknown) for name, count in summary["blanked"].items()]
    table = _table(f"{summary['kept']} runs: {summary['file']}", "", "lines>", "")
    for what, count, text in rows:
        table.add_row(what, str(count), text)
    return table


def _table(title: str, *columns: str) -> Table:
    """Make a table; a column whose name ends with > is right-aligned."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left")
    return table


@data.command()
def show(
    file: Annotated[Path, argument("A Parquet file written by 'ullage lab data clean'.", "FILE")],
    family: Annotated[
        str | None, option("Show only this family of models.", "NAME", complete=completion.families)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a data set holds: runs, memory by classes, optimizers, precisions.

    Examples:

      ullage lab data show h200.parquet
      ullage lab data show h200.parquet --family cnn
      ullage lab data show h200.parquet --json
    """
    from ullage.errors import UnknownName
    from ullage_lab.clean.schema import read_dataset, summarize

    table = read_dataset(file)
    if family is not None:
        families = table["family"].drop_nulls().unique().to_list()
        if family not in families:
            raise UnknownName(f"family in {file}", family, families)
        table = table.filter(table["family"] == family)
    summary = {"file": str(file), **summarize(table)}
    if as_json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(_overview(summary))
    if summary["readings"]:
        console.print(_readings(summary["readings"]))
    for name, part in summary["families"].items():
        console.print(_classes(name, part))


def _overview(summary: dict[str, Any]) -> Table:
    table = _table(f"{summary['rows']} runs: {summary['file']}", "", *(f"{name}>" for name in summary["families"]))
    parts = list(summary["families"].values())
    for key, title in (("rows", "runs"), ("with_memory", "memory measured"), ("with_utilization", "utilisation read")):
        table.add_row(title, *(str(part[key]) for part in parts))
    for key, title in (
        ("memory", "memory of the process"),
        ("parameters", "parameters"),
        ("batch_size", "batch size"),
        ("layers", "layers"),
    ):
        table.add_row(title, *(_spread(part[key], key == "memory") for part in parts), end_section=key == "layers")
    for key, title in (("arch", "forms"), ("optimizer", "optimizers"), ("precision", "precisions")):
        table.add_row(title, *("\n".join(_shares(part[key], part["rows"])) for part in parts), end_section=True)
    environment = [f"{name}: {', '.join(summary[name])}" for name in ("gpu", "torch", "cuda", "cudnn", "driver")]
    table.caption = "; ".join(environment)
    return table


def _readings(kinds: dict[str, Any]) -> Table:
    """Return a table of step times and activity of runs that were read alone, by kind of model."""
    title = "read alone: half of the runs lie below the middle figure, a tenth beyond each other one"
    table = _table(title, "", *(f"{kind}>" for kind in kinds))
    table.add_row("runs", *(str(part["rows"]) for part in kinds.values()))
    table.add_row("families", *(str(part["families"]) for part in kinds.values()))
    table.add_row("for testing", *(f"{part['test_rows']}\nof {len(part['test_families'])}" for part in kinds.values()))
    for name, (title, factor, digits) in _FIGURES.items():
        spreads = (part[name] for part in kinds.values())
        texts = (
            "unknown" if one is None else " ".join(f"{value * factor:.{digits}f}" for value in one) for one in spreads
        )
        table.add_row(title, *texts)
    return table


def _spread(spread: dict[str, int] | None, is_memory: bool) -> str:
    if spread is None:
        return "unknown"
    texts = [format_bytes(spread[name]) if is_memory else f"{spread[name]:,}" for name in ("smallest", "largest")]
    middle = format_bytes(spread["median"]) if is_memory else f"{spread['median']:,}"
    return f"{texts[0]} to {texts[1]}\nmedian {middle}"


def _shares(counts: dict[str, int], rows: int) -> list[str]:
    return [f"{name} {100 * count / rows:.1f}%" for name, count in counts.items()]


def _classes(name: str, part: dict[str, Any]) -> Table:
    """Return bars for classes of 1 GiB, and the share of each class of 8 GiB next to its first."""
    table = _table(f"{name}: memory of the process, by classes of 1 and 8 GiB", "GiB>", "runs>", "", "8 GiB>")
    small, large = part["classes_1gib"], part["classes_8gib"]
    shown = dict(list(small.items())[:_MOST_CLASSES])
    most, before = max(shown.values(), default=1), None
    for place, count in shown.items():
        beside = ""
        if place // 8 != before:
            before = place // 8
            share = 100 * large[before] / part["with_memory"]
            beside = f"{8 * before} to {8 * before + 8}: {large[before]} ({share:.1f}%)"
        table.add_row(f"{place} to {place + 1}", str(count), "█" * max(1, round(_BAR * count / most)), beside)
    if len(small) > len(shown):
        table.caption = f"{len(small) - len(shown)} larger classes are left out: --json has them"
    return table
