"""`ullage.plan`: on how many GPUs, and spread how, a job fits, and what is fastest.

Each row is an estimate, made by running PyTorch's own code as one rank of so many. Two rows share a run only where the
code cannot tell them apart: whole models with the same batch do the same on 16 ranks and on 64, and only the network's
part differs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ullage.errors import InvalidValue, ModelLacks, UllageError
from ullage.estimation.asking import estimate_workload
from ullage.estimation.result import Estimate
from ullage.estimation.scripts.parent import many_runs
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.performance.step import StepCalls
from ullage.units import format_bytes, format_duration
from ullage.virtual.nccl import Communicator
from ullage.workloads.kinds import MODEL
from ullage.workloads.parallel import DDP, PARALLEL, PP, check_parallel, data_ranks
from ullage.workloads.ranks import Rank
from ullage.workloads.workload import Workload, workload_of

GPUS_OF_A_NODE = 8
ONE, ITS_OWN = "one GPU", "its own"
_GPUS = re.compile(r"(?:(\d+)(?:\.\.(\d+))?\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(.+)")


@dataclass(frozen=True)
class Cluster:
    """So many GPUs of one kind on so many machines.

    >>> Cluster(16, 2).ranks_per_node
    8
    """

    gpus: int
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        """The GPUs of a machine."""
        return self.gpus // self.nodes


def read_gpus(text: str) -> tuple[GPU, list[Cluster]]:
    """GPUs to plan for: `"1..64xH100"` (powers of two, eight in a machine), `"8xA100-80GB"`, `"2x8xH100"` (machines,
    and GPUs in each), `"1..8x8xH100"`.

    >>> card, clusters = read_gpus("4..16xH100")
    >>> card.name, [(one.gpus, one.nodes) for one in clusters]
    ('H100-80GB', [(4, 1), (8, 1), (16, 2)])
    >>> read_gpus("2x4xL4")[1]
    [Cluster(gpus=8, nodes=2)]
    """
    found = _GPUS.fullmatch(text.strip())
    assert found is not None or not text.strip()
    if found is None or found[1] is not None and int(found[1]) < 1 or found[3] is not None and int(found[3]) < 1:
        raise InvalidValue(f"needed GPUs such as 1..64xH100, 8xA100-80GB or 2x8xH100; found {text!r}")
    first = int(found[1] or 1)
    last = int(found[2] or first)
    if last < first:
        raise InvalidValue(f"needed a range of GPUs that rises, such as 1..64xH100; found {text!r}")
    counts = [first]
    while found[2] is not None and counts[-1] < last:
        counts.append(min(last, 1 << counts[-1].bit_length()))
    card = find_gpu(found[4])
    if found[3] is not None:
        return card, [Cluster(count * int(found[3]), count) for count in counts]
    for count in counts:
        if count > GPUS_OF_A_NODE and count % GPUS_OF_A_NODE:
            raise InvalidValue(
                f"{count} GPUs are not whole machines of {GPUS_OF_A_NODE}; say how they are, such as 3x4x{found[4]}"
            )
    return card, [Cluster(count, max(1, count // GPUS_OF_A_NODE)) for count in counts]


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One way to run a job: on so many `gpus` of so many `nodes`, spread by a `strategy`, with or without activation
    `checkpointing`.

    Each of `data_ranks` ranks takes `batch_size` samples a step. `estimate` is what one rank takes; `None` where it was
    not tried or does not run, for the reason that `why_not` gives. `same_run` says that another row's run was taken.
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
        return self.estimate is not None and self.estimate.fits

    @property
    def samples_per_s(self) -> float | None:
        """The samples that all ranks take in a second; `None` where the time of a step is not known."""
        found = None if self.estimate is None else self.estimate.utilization
        if found is None or found.samples is None or not found.step_s:
            return None
        return found.samples * self.data_ranks / found.step_s

    @property
    def in_words(self) -> str:
        """The way in words, such as "16 GPUs on 2 machines, fsdp2 with activation checkpointing"."""
        where = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + (f" on {self.nodes} machines" if self.nodes > 1 else "")
        way = "" if self.strategy in (ONE, ITS_OWN) else f", {self.strategy}"
        return where + way + (" with activation checkpointing" if self.checkpointing else "")

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values; the estimate without its timeline and layers."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        taken = None if self.estimate is None else self.estimate.to_dict(timeline=False, layers=False)
        return values | {"estimate": taken, "fits": self.fits, "samples_per_s": self.samples_per_s}


@dataclass(frozen=True, kw_only=True)
class GPUPlan:
    """The ways to run a job that were tried, and the `fastest` of those that fit.

    >>> GPUPlan(source="train.py", gpu="H200", rows=[]).fastest is None
    True
    """

    source: str
    gpu: str
    rows: list[PlanRow] = field(default_factory=list)

    @property
    def fastest(self) -> PlanRow | None:
        """The row with the most samples a second among those that are sure to fit; else among those that fit."""
        known = [row for row in self.rows if row.fits and row.samples_per_s]
        sure = [row for row in known if row.estimate is not None and not row.estimate.tight]
        return max(sure or known, key=lambda row: row.samples_per_s or 0.0, default=None)

    @property
    def fewest(self) -> PlanRow | None:
        """The fastest row with the fewest GPUs on which it is sure to fit; else on which it fits."""
        fitting = [row for row in self.rows if row.fits]
        among = [row for row in fitting if row.estimate is not None and not row.estimate.tight] or fitting
        least = [row for row in among if row.gpus == min(each.gpus for each in among)]
        return max(least, key=lambda row: row.samples_per_s or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values; `fastest` and `fewest` are places in `rows`."""
        places = {name: getattr(self, name) for name in ("fastest", "fewest")}
        return {
            "source": self.source, "gpu": self.gpu, "rows": [row.to_dict() for row in self.rows],
            **{name: None if row is None else self.rows.index(row) for name, row in places.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        text = StringIO()
        print_plan(self, Console(file=text, width=100, no_color=True))
        return text.getvalue().rstrip()


# The table


def print_plan(found: GPUPlan, console: Console) -> None:
    """Print one line for each way that was tried, what is fastest, and what was not tried. It fits 80 columns."""
    tried = [row for row in found.rows if row.estimate is not None]
    if tried:
        console.print(_table(found, tried))
    for line in _words(found):
        console.print(Text(line))


def _table(found: GPUPlan, rows: list[PlanRow]) -> Table:
    names = ("", "GPUs", "spread", "batch", "takes", "at most", "a step", "network", "samples/s")
    columns = [Column(name, no_wrap=True, justify="left" if name in ("", "spread") else "right") for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    before = rows[0].gpus
    for row in rows:
        answer = row.estimate
        assert answer is not None
        if row.gpus != before:
            table.add_section()
        before = row.gpus
        mark = "[green]✓[/]" if answer.fits and not answer.tight else "[yellow]?[/]" if answer.fits else "[red]✗[/]"
        times = answer.utilization if answer.fits else None
        rate = row.samples_per_s if answer.fits else None
        table.add_row(
            "[green]★[/]" if row is found.fastest else mark, str(row.gpus), f"{row.strategy}{_KEPT[row.checkpointing]}",
            "" if row.batch_size is None else str(row.batch_size), format_bytes(answer.needed),
            format_bytes(answer.bound),
            "" if times is None else format_duration(times.step_s),
            "" if times is None or times.interconnect is None else format_duration(times.network_s),
            "" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}",
            style="bold" if row is found.fastest else None,
        )  # fmt: skip
    return table


def _words(found: GPUPlan) -> Iterator[str]:
    tried = [row for row in found.rows if row.estimate is not None]
    fitting = [row for row in tried if row.fits]
    times = [row.estimate.utilization for row in tried if row.estimate is not None]
    networks = {found.interconnect for found in times if found is not None}
    yield f"{found.source} on {found.gpu}: {len(fitting)} of {len(tried)} ways fit"
    best, least = found.fastest, found.fewest
    if best is not None:
        yield f"★ fastest: {best.in_words}, {best.samples_per_s:,.1f} samples/s"
    if least is not None and least is not best:
        yield f"fewest GPUs: {least.in_words}"
    if any(row.checkpointing for row in tried):
        yield "+ac: with activation checkpointing"
    if any(row.estimate is not None and row.estimate.tight for row in tried):
        yield "?: fits by the estimate, but not by its bound"
    for names in sorted(filter(None, networks)):
        yield f"the network is modelled, not measured: {names}"
    if any(row.strategy == PP for row in tried):
        yield "pp: a step has the samples of all GPUs, in micro-batches; the figures are those of the largest stage"
    if any(row.same_run for row in tried):
        yield "ddp: some share a run; each rank does the same, and only the network's part differs"
    reasons: dict[str, list[PlanRow]] = {}
    for row in found.rows:
        if row.estimate is None:
            reasons.setdefault(row.why_not or "", []).append(row)
    for reason, rows in reasons.items():
        ways = list(dict.fromkeys(f"{row.strategy}{_KEPT[row.checkpointing]}" for row in rows))
        counts = list(dict.fromkeys(str(row.gpus) for row in rows))
        yield f"not possible: {', '.join(ways)} on {', '.join(counts)} GPUs: {reason}"
    if not any(row.strategy == ITS_OWN for row in found.rows):
        yield "not tried: several kinds of parallelism in one machine"


_KEPT = {False: "", True: " +ac"}


def plan(
    source: str | Path | Callable[[], Any],
    gpus: str,
    *,
    parallel: str | Sequence[str] | None = None,
    checkpointing: bool | None = None,
    global_batch: int | None = None,
    interconnect: str | None = None,
    progress: Callable[[PlanRow, int, int], Any] | None = None,
    **options: Any,
) -> GPUPlan:
    """On how many GPUs, and spread how, a job fits, and what is fastest. No GPU is needed.

    Args:
        source: A model's name, a script or a function, as for `ullage.estimate`. A script has its own way to use many
            GPUs, so only their number changes.
        gpus: `"1..64xH100"` (powers of two, eight in a machine), `"8xA100-80GB"`, `"2x8xH100"` (machines, and GPUs in
            each).
        parallel: Only these ways to spread a model: `"ddp"`, `"fsdp2"`, `"tp"`, `"pp"`. Default: all.
        checkpointing: Only with activation checkpointing, or only without. Default: both.
        global_batch: Samples in a step over all ranks. Default: `batch_size` for each rank, however many there are; for
            a pipeline as many as its stages have together.
        interconnect: The networks, as for `ullage.estimate`.
        progress: Called before each row is estimated, with the row, its number and how many there are.
        options: Other options of `ullage.estimate`.

    Returns:
        A `GPUPlan`; `print` shows it as a table.

    Raises:
        UllageError: Where nothing can be tried at all.

    >>> found = plan("torchvision:resnet18", "1..2xH200", batch_size=8, input_shape=[3, 64, 64], checkpointing=False)
    >>> [(row.gpus, row.strategy) for row in found.rows]
    [(1, 'one GPU'), (2, 'ddp'), (2, 'fsdp2'), (2, 'tp'), (2, 'pp')]

    Not covered: ways that mix more than two kinds of parallelism.
    """
    card, clusters = read_gpus(gpus)
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    workload = workload_of(source, given)
    ways = [parallel] if isinstance(parallel, str) else list(parallel or PARALLEL)
    for way in ways:
        check_parallel(way)
    if workload.kind != MODEL and (parallel is not None or checkpointing is not None or global_batch is not None):
        raise InvalidValue("parallel, checkpointing and global_batch are for a model's name; a script has its own ways")
    rows = list(_rows(workload, clusters, ways, checkpointing, global_batch))
    with many_runs(of_ranks=True):
        filled = _filled(rows, workload, card, interconnect, progress)
    return GPUPlan(source=workload.source or str(getattr(source, "__name__", source)), gpu=card.name, rows=filled)


def _rows(
    workload: Workload, clusters: list[Cluster], ways: list[str], checkpointing: bool | None, global_batch: int | None
) -> Iterator[PlanRow]:
    configuration = workload.configuration
    for cluster in clusters:
        where: dict[str, Any] = {"gpus": cluster.gpus, "nodes": cluster.nodes}
        if configuration is None:
            yield PlanRow(**where, strategy=ITS_OWN)
            continue
        kept = (configuration.checkpointing or bool(checkpointing),) if checkpointing is not None else (False, True)
        for strategy in [ONE] if cluster.gpus == 1 else ways:
            ranks = data_ranks(strategy, Rank(cluster.gpus, nodes=cluster.nodes))
            given = configuration.batch_size * (cluster.gpus if strategy == PP else 1)
            batch, rest = (given, 0) if global_batch is None else divmod(global_batch, ranks)
            why_not = f"{global_batch} samples cannot be shared evenly by {ranks} ranks" if rest or not batch else None
            for with_checkpoints in kept:
                yield PlanRow(
                    **where, strategy=strategy, checkpointing=with_checkpoints, batch_size=batch, data_ranks=ranks,
                    why_not=why_not,
                )  # fmt: skip


def _filled(
    rows: list[PlanRow], workload: Workload, card: GPU, interconnect: str | None, progress: Any
) -> list[PlanRow]:
    filled: list[PlanRow] = []
    errors: list[UllageError] = []
    hopeless: dict[tuple[str, bool], str] = {}  # what does not run at all, whatever the number of GPUs
    for number, row in enumerate(rows):
        if progress is not None:
            progress(row, number, len(rows))
        reason = row.why_not or hopeless.get((row.strategy, row.checkpointing))
        known = _same_run(row, filled, card)
        if reason is not None:
            filled.append(replace(row, why_not=reason))
        elif known is not None:
            filled.append(_moved(row, known, card))
        else:
            try:
                filled.append(_run(row, workload, card, interconnect))
                whatever_the_number = filled[-1].why_not == _ALONE
            except UllageError as error:
                errors.append(error)
                filled.append(replace(row, why_not=str(error).splitlines()[0]))
                whatever_the_number = isinstance(error, ModelLacks)
            failed = filled[-1].why_not
            if failed is not None and whatever_the_number:
                hopeless[row.strategy, row.checkpointing] = failed
    reasons = {row.why_not for row in filled if row.estimate is None}
    if len(errors) and len(reasons) == 1 and not any(row.estimate for row in filled):
        raise errors[0]
    return filled


_ALONE = "its ranks send each other nothing in a step, so each would train alone: torch.distributed is not used"


def _run(row: PlanRow, workload: Workload, card: GPU, interconnect: str | None) -> PlanRow:
    many = row.gpus > 1 or workload.kind != MODEL
    run = replace(
        workload.run, world_size=row.gpus if many else None, nodes=row.nodes, interconnect=interconnect,
        parallel=row.strategy if workload.kind == MODEL and many else None,
    )  # fmt: skip
    asked = replace(workload, run=run)
    if workload.configuration is not None and row.batch_size is not None:
        asked = replace(
            asked,
            configuration=replace(workload.configuration, batch_size=row.batch_size, checkpointing=row.checkpointing),
        )
    found = estimate_workload(asked, card)
    return replace(row, estimate=found) if workload.kind == MODEL else _as_it_ran(row, found)


def _as_it_ran(row: PlanRow, found: Estimate) -> PlanRow:
    """How code of its own shares its work: its samplers say, or what its ranks send. Those that send to a single other
    one are stages of a pipeline, and those that exchange activations in the forward pass have the same samples, too."""
    step = found.utilization
    if step is None:
        return replace(row, estimate=found)
    if row.gpus > 1 and not step.collectives:
        return replace(row, why_not=_ALONE)
    alone = row.gpus if step.data_ranks is None else min(step.data_ranks, row.gpus)
    if step.data_ranks is None:
        stages = [each["ranks"] for each in step.collectives if each["operation"] in ("send", "recv")]
        sharing = [each["ranks"] for each in step.collectives if each["activations"]]
        alone = max(1, row.gpus // max(stages, default=1) // max(sharing, default=1))
    return replace(row, estimate=found, batch_size=step.samples, data_ranks=alone)


def _same_run(row: PlanRow, filled: list[PlanRow], card: GPU) -> PlanRow | None:
    """A row whose run this one can share: whole models on several ranks ask for the same, whatever their number, where
    NCCL's connections take the same."""
    if row.strategy != DDP:
        return None
    connections = Communicator(card, ranks=row.gpus, machines=row.nodes)
    return next(
        (
            other
            for other in filled
            if other.strategy == DDP and other.estimate is not None and not other.same_run
            and (other.checkpointing, other.batch_size) == (row.checkpointing, row.batch_size)
            and Communicator(card, ranks=other.gpus, machines=other.nodes).size == connections.size
        ),
        None,
    )  # fmt: skip


def _moved(row: PlanRow, known: PlanRow, card: GPU) -> PlanRow:
    """The same run among other ranks: what it sends is the same, to others."""
    found = known.estimate
    assert found is not None
    if found.step_calls is not None:
        ranks = Cluster(row.gpus, row.nodes)
        calls = [_among(call, ranks) for call in found.step_calls.calls]
        found = found.with_utilization(StepCalls(**vars(found.step_calls) | {"calls": calls}), card)
    return replace(row, estimate=found, same_run=True)


def _among(call: dict[str, Any], ranks: Cluster) -> dict[str, Any]:
    if "ranks" not in call.get("kwargs", {}) or not str(call["operator"]).startswith("collective."):
        return call
    values = {"ranks": ranks.gpus, "nodes": ranks.nodes, "ranks_per_node": ranks.ranks_per_node}
    return {**call, "kwargs": {**call["kwargs"], **values}}
