"""Tables of estimates: changes that would make a job fit, one job on many GPUs, and the layers of a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from ullage.estimation.report import rendered_notes
from ullage.estimation.result import Estimate
from ullage.estimation.words import model_words
from ullage.units import format_bytes, format_duration

if TYPE_CHECKING:
    from ullage.estimation.advice import Suggestion

_GAUGE = 6  # characters that show how full a GPU is
DEPTH = 3  # levels of modules that a summary shows


def print_report(estimate: Estimate, console: Console | None = None, options: "Sequence[Suggestion]" = ()) -> None:
    """Print the report, and the changes that would make the job fit (`advice.options`)."""
    console = console or Console()
    console.print(estimate)
    if options:
        print_options(options, console)


def print_options(options: "Sequence[Suggestion]", console: Console | None = None) -> None:
    console = console or Console()
    table = Table(Column("", no_wrap=True), Column("change", overflow="fold"), Column("needs", justify="right"), "")
    for option in options:
        shown = option.to_dict()
        mark = "[green]✓[/]" if option.fits else "[red]✗[/]" if option.estimate else "[dim]·[/]"
        needs = "" if shown["takes"] is None else format_bytes(shown["takes"])
        note = escape(shown["note"]) if option.estimate else f"[dim]{escape(shown['note'])}[/]"
        table.add_row(mark, escape(option.change), needs, note)
    console.print("\n[bold]Changes that would make it fit[/], each estimated:")
    console.print(table)


def print_gpu_table(estimates: Sequence[Estimate], console: Console | None = None) -> None:
    """Print one line for each GPU: those on which the job fits, the smallest first, then the others, the largest first.

    Reasons for differences and the assumptions follow the table. It fits 80 columns.
    """
    console = console or Console()
    ordered = sorted(estimates, key=lambda e: (not e.fits, e.gpu_memory if e.fits else -e.gpu_memory, e.gpu))
    console.print(_gpu_table(ordered))
    runs = sum(e.computed_on is None for e in estimates)
    shared = f"{runs} runs, the others share one of the same kernels" if runs < len(estimates) else f"{runs} runs"
    console.print(f"fits on {sum(bool(e.fits) for e in estimates)} of {len(estimates)} GPUs; {shared}")
    for line in [*_best_words(estimates), *why_they_differ(estimates), *_measured_words(estimates)]:
        console.print(Text(line))
    notes = list(dict.fromkeys(note for e in estimates for note in e.notes if e.fits or note != _WITHOUT_LIMIT))
    for note in rendered_notes(notes):
        console.print(note)


_WITHOUT_LIMIT = "ran out of memory; the figures assume a card without a memory limit"


def _gpu_table(estimates: Sequence[Estimate]) -> Table:
    names = _shown_columns(estimates)
    table = Table(*map(_column, names), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for e in estimates:
        cells = _cells(e)
        table.add_row(*(cells[name] for name in names))
    return table


def _shown_columns(estimates: Sequence[Estimate]) -> list[str]:
    """Return the columns that fit 80 characters: those about training take the place of others."""
    with_hours = any(e.training for e in estimates)
    by_attention = len({tuple(e.attention) for e in estimates}) > 1 and not with_hours
    with_cost = any(e.training and e.training.cost is not None for e in estimates)
    wanted = {
        "free": not with_cost,
        "step": any(e.utilization for e in estimates),
        "training": with_hours,
        "cost": with_cost,
        "attention": by_attention,
        "full": not by_attention and not with_hours,
    }
    return [name for name in _COLUMNS if wanted.get(name, True)]


_COLUMNS = ("", "GPU", "needs", "capacity", "free", "at most", "step", "training", "cost", "attention", "full")
_MAY_WRAP = ("GPU", "attention")  # if a line is too short
_TO_THE_LEFT = ("", "GPU", "attention", "full")


def _column(name: str) -> Column:
    return Column(
        "" if name == "full" else name,
        no_wrap=name not in _MAY_WRAP,
        overflow="fold" if name in _MAY_WRAP else "ellipsis",
        justify="left" if name in _TO_THE_LEFT else "right",
    )


def _cells(e: Estimate) -> dict[str, Text]:
    """Return all cells of one GPU by column; the time of a step only if the job fits."""
    mark, style = ("✓", "yellow" if e.tight else "green") if e.fits else ("✗", "red")
    full = round(_GAUGE * min(1.0, e.figure / max(1, e.gpu_memory)))
    step, training = (e.utilization, e.training) if e.fits else (None, None)
    words = {
        "GPU": e.gpu,
        "needs": format_bytes(e.figure),
        "capacity": format_bytes(e.gpu_memory),
        "free": format_bytes(e.headroom),
        "at most": "" if e.upper is None else format_bytes(e.upper),
        "step": "" if step is None else format_duration(step.step_s),
        "training": "" if training is None else format_duration(3600 * training.hours),
        "cost": "" if training is None else training.cost_words,
        "attention": ", ".join(e.attention),
    }
    gauge = Text("█" * full, style=style) + Text("░" * (_GAUGE - full), style="dim")
    return {name: Text(text) for name, text in words.items()} | {"": Text(mark, style=style), "full": gauge}


def _best_words(estimates: Sequence[Estimate]) -> list[str]:
    """Name the fastest and the cheapest of the GPUs on which the job fits."""
    known = [(e, e.training) for e in estimates if e.fits and e.training is not None]
    if len(known) < 2:
        return []
    quickest, took = min(known, key=lambda each: each[1].hours)
    lines = [f"{took.length_words}; fastest on {quickest.gpu}: {format_duration(3600 * took.hours)}"]
    priced = [(e, training, training.cost) for e, training in known if training.cost is not None]
    if priced:
        cheapest, least, _ = min(priced, key=lambda each: each[2])
        lines.append(f"cheapest on {cheapest.gpu}: {least.cost_words} in {format_duration(3600 * least.hours)}")
    if without := [e.gpu for e, training in known if training.notes]:
        some = ", ".join(without[:4]) + (f" and {len(without) - 4} others" if len(without) > 4 else "")
        lines.append(f"no price is known for {some}")
    return lines


def why_they_differ(estimates: Sequence[Estimate]) -> list[str]:
    """Explain why the job needs more memory on some GPUs, from the kernels of its runs; empty if nothing differs."""
    known = [e for e in estimates if e.peak_reserved]
    lines = []
    with_math = [e for e in known if "math" in e.attention]
    if with_math and len(with_math) < len(known):
        most, least = max(e.peaks[1] for e in with_math), min(e.peaks[1] for e in known if e not in with_math)
        lines.append(
            f"attention as math keeps the scores of all pairs of tokens: {format_bytes(most)} reserved "
            f"instead of {format_bytes(least)}. Flash and cuDNN attention need compute capability 8.0, and so does "
            "efficient attention with bfloat16."
        )
    elif len({e.guessed["of_bytes"] for e in known if e.guessed}) > 1:
        least, most = min(e.peaks[1] for e in known), max(e.peaks[1] for e in known)
        span = f"{format_bytes(least)} to {format_bytes(most)} reserved"
        lines.append(f"cuDNN's workspaces for convolutions differ by GPU: {span}")
    return lines


def _measured_words(estimates: Sequence[Estimate]) -> list[str]:
    others = [e for e in estimates if e.measured is False]
    if not others:
        return []
    which = "none of these GPUs was measured" if len(others) == len(estimates) else f"{len(others)} were not measured"
    steps = "; step times follow from bandwidth, FLOP/s and SMs" if any(e.utilization for e in others) else ""
    return [f"{which}: rules for other GPUs, and 'at most' adds 5% for this{steps}"]


def print_layers(estimate: Estimate, console: Console | None = None, depth: int = DEPTH) -> None:
    """Print the modules of every model down to a depth: class, shape of the output, parameters, activations kept.

    Each line includes the modules below it. The table fits 80 columns.
    """
    console = console or Console()
    if not estimate.layers:
        console.print("no model was called: there are no layers to show")
        return
    console.print(_layer_table([row for row in estimate.layers if row["depth"] <= depth]))
    for model in estimate.models:
        console.print(Text(model_words(model)))
    deepest = max(row["depth"] for row in estimate.layers)
    hidden = f"; --depth {deepest} shows all" if deepest > depth else ""
    console.print(Text(f"kept: activations that one forward pass keeps for the backward pass{hidden}"))


def _layer_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        Column("layer", overflow="fold", ratio=3),
        Column("class", overflow="fold", ratio=2),
        Column("output"),
        Column("parameters", justify="right", no_wrap=True),
        Column("kept", justify="right", no_wrap=True),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="Layers, each with all that is below it",
        title_justify="left",
    )
    for row in rows:
        name = row["path"].rpartition(".")[2] or row["model"]
        shape = "×".join("*" if size is None else str(size) for size in row["output"] or ())
        frozen = " frozen" if row["parameters"] and not row["trainable"] else ""
        parameters = f"{row['parameters']:,}{frozen}" if row["parameters"] else ""
        activations = format_bytes(row["kept"]) if row["kept"] else ""
        cells = ["  " * row["depth"] + name, row["class"] if row["path"] else "", shape, parameters, activations]
        table.add_row(*map(Text, cells))
    return table
