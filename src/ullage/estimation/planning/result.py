"""The rows of a plan, and their table."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ullage.estimation.result import Estimate
from ullage.jobs.parallel import PP
from ullage.units import format_bytes, format_duration

ONE, ITS_OWN = "one GPU", "its own"


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One way to run a job: on `gpus` of `nodes` machines with a `strategy`, and maybe activation `checkpointing`.

    Each of `data_ranks` ranks has `batch_size` samples in a step. `estimate` is that of one rank; `None` if it was not
    tried or does not run, with the reason in `why_not`. `same_run` marks a row that shares another row's run.
    """

    gpus: int
    nodes: int
    strategy: str
    checkpointing: bool = False
    batch_size: int | None = None
    data_ranks: int = 1
    estimate: Estimate | None = None
    same_run: bool = False
    why_not: str | None = None

    @property
    def fits(self) -> bool:
        """Whether it fits by the estimate."""
        return self.estimate is not None and bool(self.estimate.fits)

    @property
    def is_sure(self) -> bool:
        """Whether it also fits by the upper bound."""
        return self.estimate is not None and self.fits and not self.estimate.tight

    @property
    def way(self) -> str:
        """The strategy and checkpointing, as in the table."""
        return f"{self.strategy}{' +ac' if self.checkpointing else ''}"

    @property
    def samples_per_s(self) -> float | None:
        """The samples of all ranks in a second; `None` if the time of a step is unknown."""
        step = None if self.estimate is None else self.estimate.utilization
        if step is None or step.samples is None or not step.step_s:
            return None
        return step.samples * self.data_ranks / step.step_s

    @property
    def in_words(self) -> str:
        """The row in words, such as "16 GPUs on 2 machines, fsdp2 with activation checkpointing"."""
        where = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + (f" on {self.nodes} machines" if self.nodes > 1 else "")
        way = "" if self.strategy in (ONE, ITS_OWN) else f", {self.strategy}"
        return where + way + (" with activation checkpointing" if self.checkpointing else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the estimate comes without its timeline and layers."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        taken = None if self.estimate is None else self.estimate.to_dict(timeline=False, layers=False)
        return values | {"estimate": taken, "fits": self.fits, "samples_per_s": self.samples_per_s}


@dataclass(frozen=True, kw_only=True)
class GPUPlan:
    """The ways to run a job that were tried, and the `fastest` of those that fit."""

    source: str
    gpu: str
    rows: list[PlanRow] = field(default_factory=list)

    @property
    def fastest(self) -> PlanRow | None:
        """The row with the most samples per second, of those that fit by the upper bound, else of those that fit."""
        known = [row for row in self.rows if row.fits and row.samples_per_s]
        return max(
            [row for row in known if row.is_sure] or known, key=lambda row: row.samples_per_s or 0.0, default=None
        )

    @property
    def fewest(self) -> PlanRow | None:
        """The fastest row with the fewest GPUs, of those that fit by the upper bound, else of those that fit."""
        fitting = [row for row in self.rows if row.fits]
        among = [row for row in fitting if row.is_sure] or fitting
        least = [row for row in among if row.gpus == min(each.gpus for each in among)]
        return max(least, key=lambda row: row.samples_per_s or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `fastest` and `fewest` are places in `rows`."""
        places = {name: getattr(self, name) for name in ("fastest", "fewest")}
        return {
            "source": self.source,
            "gpu": self.gpu,
            "rows": [row.to_dict() for row in self.rows],
            **{name: None if row is None else self.rows.index(row) for name, row in places.items()},
        }

    def __str__(self) -> str:
        text = StringIO()
        print_plan(self, Console(file=text, width=100, no_color=True))
        return text.getvalue().rstrip()


# The table


def print_plan(plan: GPUPlan, console: Console) -> None:
    """Print a line for each way, the fastest one, and the ways that were not tried. It fits 80 columns."""
    tried = [row for row in plan.rows if row.estimate is not None]
    if tried:
        console.print(_table(plan, tried))
    for line in _words(plan):
        console.print(Text(line))


def _table(plan: GPUPlan, rows: list[PlanRow]) -> Table:
    names = ("", "GPUs", "spread", "batch", "needs", "at most", "step", "network", "samples/s")
    columns = [Column(name, no_wrap=True, justify="left" if name in ("", "spread") else "right") for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    before = rows[0].gpus
    for row in rows:
        if row.gpus != before:
            table.add_section()
        before = row.gpus
        if row is plan.fastest:
            table.add_row("[green]★[/]", *_cells(row), style="bold")
        else:
            table.add_row(_mark(row), *_cells(row))
    return table


def _mark(row: PlanRow) -> str:
    if not row.fits:
        return "[red]✗[/]"
    return "[green]✓[/]" if row.is_sure else "[yellow]?[/]"


def _cells(row: PlanRow) -> list[str]:
    answer = row.estimate
    assert answer is not None
    step = answer.utilization if answer.fits else None
    rate = row.samples_per_s if answer.fits else None
    return [
        str(row.gpus),
        row.way,
        "" if row.batch_size is None else str(row.batch_size),
        format_bytes(answer.needed),
        format_bytes(answer.bound),
        "" if step is None else format_duration(step.step_s),
        "" if step is None or step.interconnect is None else format_duration(step.network_s),
        "" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}",
    ]


def _words(plan: GPUPlan) -> Iterator[str]:
    tried = [row for row in plan.rows if row.estimate is not None]
    fitting = [row for row in tried if row.fits]
    times = [row.estimate.utilization for row in tried if row.estimate is not None]
    networks = {plan.interconnect for plan in times if plan is not None}
    yield f"{plan.source} on {plan.gpu}: {len(fitting)} of {len(tried)} ways fit"
    best, least = plan.fastest, plan.fewest
    if best is not None:
        yield f"★ fastest: {best.in_words}, {best.samples_per_s:,.1f} samples/s"
    if least is not None and least is not best:
        yield f"fewest GPUs: {least.in_words}"
    if any(row.checkpointing for row in tried):
        yield "+ac: with activation checkpointing"
    if not all(row.is_sure for row in fitting):
        yield "?: fits by the estimate, but not by its bound"
    for names in sorted(filter(None, networks)):
        yield f"the network is modelled, not measured: {names}"
    if any(row.strategy == PP for row in tried):
        yield "pp: a step has the samples of all GPUs, in micro-batches; the figures are those of the largest stage"
    if any(row.same_run for row in tried):
        yield "ddp: some share a run; each rank does the same, and only the network's part differs"
    reasons: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        if row.estimate is None:
            reasons.setdefault(row.why_not or "", []).append(row)
    for reason, rows in reasons.items():
        ways = list(dict.fromkeys(row.way for row in rows))
        counts = list(dict.fromkeys(str(row.gpus) for row in rows))
        yield f"not possible: {', '.join(ways)} on {', '.join(counts)} GPUs: {reason}"
    if not any(row.strategy == ITS_OWN for row in plan.rows):
        yield "not tried: several kinds of parallelism in one machine"
