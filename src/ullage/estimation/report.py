"""The report of an estimate: text, HTML for a notebook, or drawn on a console."""

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from ullage.estimation.words import BREAKDOWN_COLOURS, folded, model_words
from ullage.performance.result import Utilization, bar, percent
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage import Estimate

_WIDTH = 110  # characters of a report that is not for a terminal


def as_text(estimate: "Estimate") -> str:
    return "\n".join(line.rstrip() for line in _recorded(estimate).export_text().splitlines()).rstrip()


def as_html(estimate: "Estimate") -> str:
    """Return the report for a notebook; plain text has the notebook's colour, light or dark."""
    return _recorded(estimate).export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _recorded(estimate: "Estimate") -> Console:
    console = Console(file=StringIO(), width=_WIDTH, record=True)
    console.print(estimate)
    return console


def report_parts(estimate: "Estimate", width: int) -> Iterator[RenderableType]:
    """Yield the verdict, the memory at the peak, the confidence, the time of a step, and the assumptions."""
    doubtful = estimate.tight or estimate.mark == "?"
    style = "bold yellow" if doubtful else "bold green" if estimate.fits else "bold red"
    if estimate.source:
        yield Text(estimate.source, style="bold")
    yield Text(f"{estimate.mark} {estimate.verdict}\n", style=style)
    if estimate.fits is not None:
        yield _bar(estimate, min(width - 4, 76))
        if estimate.breakdown:
            yield _indented(Text(f"At the peak{estimate.peak_moment}:"))
        yield _indented(_legend(estimate))
        yield Text()
    yield from (_indented(_fact(name, text)) for name, text in _facts(estimate))
    if estimate.utilization is not None and estimate.fits:
        yield Text()
        yield from (_indented(_fact(name, text)) for name, text in _time_facts(estimate, estimate.utilization))
    yield from rendered_notes(estimate.notes)


def rendered_notes(notes: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the assumptions of an estimate, for a console."""
    if notes:
        yield Text("\nAssumptions", style="bold")
        yield from (_indented(Text(f"- {note}")) for note in folded(notes))


def _bar(estimate: "Estimate", width: int) -> Padding:
    """Return the GPU's memory as a bar, or, if the job does not fit, the job's with a mark at the GPU's end."""
    whole = max(estimate.gpu_memory, estimate.figure, 1)
    drawn, used = Text(), 0
    for name, size in estimate.breakdown.items():
        used += size
        drawn.append("█" * (round(width * used / whole) - len(drawn)), style=BREAKDOWN_COLOURS[name])
    drawn.append("░" * (width - len(drawn)), style="dim")
    if estimate.figure > estimate.gpu_memory:
        end = round(width * estimate.gpu_memory / whole)
        drawn.append(f"\n{' ' * end}▲ {estimate.gpu} ends here", style="red")
    return Padding(drawn, (0, 0, 1, 2), expand=False)


def _legend(estimate: "Estimate") -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, size in estimate.breakdown.items():
        swatch = Text("■ ", style=BREAKDOWN_COLOURS[name]) + Text(name)
        table.add_row(swatch, Text(format_bytes(size), justify="right"), Text(estimate.part_words(name), style="dim"))
    return table


def _facts(estimate: "Estimate") -> Iterator[tuple[str, str]]:
    for name, known in estimate.activity.items():
        words = f"{known['class']}: {percent(known['least'])} to {percent(known['most'])}"
        yield name.upper(), f"{words} (probability {percent(known['probability'])})"
    if estimate.process_memory is not None:
        yield "nvidia-smi", f"{format_bytes(estimate.process_memory)} at the peak"
    yield from map(_rank_fact, estimate.ranks)
    counted = [(estimate.peak_reserved, "reserved"), (estimate.peak_allocated, "allocated")]
    if figures := [f"{format_bytes(size)} {word}" for size, word in counted if size is not None]:
        yield "PyTorch", ", ".join(figures)
    if estimate.peak_words:
        yield "peak", estimate.peak_words
    if estimate.reserved_words and estimate.reserved_words != estimate.peak_words:
        yield "last allocation", estimate.reserved_words
    if len(estimate.phases) > 1:
        yield from ((name, f"{format_bytes(size)} reserved at most") for name, size in estimate.phases.items())
    if estimate.trial_words:
        yield "benchmark", estimate.trial_words
    yield from (("model", model_words(model)) for model in estimate.models)
    yield "confidence", estimate.certainty
    yield "run", estimate.effort
    if estimate.out_of_memory and not estimate.fits:
        yield "PyTorch says", estimate.out_of_memory.split(" If reserved")[0]


def _rank_fact(rank: dict[str, int]) -> tuple[str, str]:
    name = f"rank {rank['rank']}"
    if "like" in rank:
        return name, f"as rank {rank['like']}: the same weights, not followed"
    return name, f"{format_bytes(rank['process_memory'])}, at most {format_bytes(rank['upper'])}"


def _time_facts(estimate: "Estimate", step: Utilization) -> Iterator[tuple[str, str | Text]]:
    yield "step", step.step_words
    yield "limited by", step.limit_words
    for name, share, words in step.shares:
        yield name, Text.assemble(f"{percent(share):>5}  ", (bar(share), "blue"), (f"  {words}", "dim"))
    yield "power", step.power_words
    if estimate.training is not None:
        yield "training", estimate.training.words
    if step.remarks:
        yield "note", "; ".join(step.remarks)


def _indented(shown: RenderableType) -> Padding:
    return Padding(shown, (0, 0, 0, 2), expand=False)


def _fact(name: str, text: str | Text) -> Table:
    table = Table.grid(Column(width=max(16, len(name) + 1)), Column())
    table.add_row(Text(name, style="dim"), Text(text) if isinstance(text, str) else text)
    return table
