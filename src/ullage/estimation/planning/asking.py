"""`ullage.plan`: the number of GPUs and the parallelism with which a job fits, and the fastest combination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue
from ullage.estimation.asking import names_unknown_options, request_for
from ullage.estimation.planning.clusters import Cluster, read_gpus
from ullage.estimation.planning.filling import Filling, Progress
from ullage.estimation.planning.result import ITS_OWN, ONE, GPUPlan, PlanRow
from ullage.estimation.scripts.parent import many_runs
from ullage.jobs.job import Function, JobRequest, Script
from ullage.jobs.kinds import MODEL
from ullage.jobs.model import Model
from ullage.jobs.parallel import PARALLEL, PP, check_parallel, data_ranks
from ullage.jobs.ranks import Rank


@names_unknown_options
def plan(
    job: str | Path | Function | Model | Script,
    gpus: str,
    *,
    parallel: str | Sequence[str] | None = None,
    checkpointing: bool | None = None,
    global_batch: int | None = None,
    interconnect: str | None = None,
    workers: int = 1,
    batch_size: int | None = None,
    args: Sequence[str] = (),
    steps: int | None = 3,
    allocator: AllocatorConfig | None = None,
    progress: Progress | None = None,
) -> GPUPlan:
    """On how many GPUs, and spread how, a job fits, and what is fastest. No GPU is needed.

    Args:
        job: A model, a script or a function, as for `ullage.estimate`. A script has its own way to use many GPUs, so
            only their number changes.
        gpus: `"1..64xH100"` (powers of two, eight in a machine), `"8xA100-80GB"`, `"2x8xH100"` (machines, and GPUs in
            each).
        parallel: Only these ways to spread a model: `"ddp"`, `"fsdp2"`, `"tp"`, `"pp"`. Default: all.
        checkpointing: Only with activation checkpointing, or only without. Default: both.
        global_batch: Samples in a step over all ranks. Default: `batch_size` for each rank, however many there are; for
            a pipeline as many as its stages have together.
        interconnect: The networks, as for `ullage.estimate`.
        workers: Rows that are estimated at once. More than one are processes of their own, so a program needs the usual
            `if __name__ == "__main__":`. A function's rows come one after another.
        batch_size: Short for `Model(..., batch_size=)`.
        args: Short for `Script(..., args=)`.
        steps: As for `ullage.estimate`.
        allocator: As for `ullage.estimate`.
        progress: Called when a row is begun, with the row, how many are done and how many there are.

    Returns:
        A `GPUPlan`; `print` shows it as a table.

    Raises:
        UllageError: Where nothing can be tried at all.

    >>> small = Model("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64])
    >>> found = plan(small, "1..2xH200", checkpointing=False)
    >>> [(row.gpus, row.strategy) for row in found.rows]
    [(1, 'one GPU'), (2, 'ddp'), (2, 'fsdp2'), (2, 'tp'), (2, 'pp')]

    Not covered: ways that mix more than two kinds of parallelism.
    """
    request = request_for(job, batch_size=batch_size, args=args, steps=steps, allocator=allocator)
    return plan_request(
        request,
        gpus,
        parallel=parallel,
        checkpointing=checkpointing,
        global_batch=global_batch,
        interconnect=interconnect,
        workers=workers,
        progress=progress,
    )


def plan_request(
    request: JobRequest,
    gpus: str,
    *,
    parallel: str | Sequence[str] | None = None,
    checkpointing: bool | None = None,
    global_batch: int | None = None,
    interconnect: str | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> GPUPlan:
    card, clusters = read_gpus(gpus)
    ways = [parallel] if isinstance(parallel, str) else list(parallel or PARALLEL)
    for way in ways:
        check_parallel(way)
    if workers < 1:
        raise InvalidValue(f"workers must be at least 1, got {workers}")
    if request.kind != MODEL and (parallel is not None or checkpointing is not None or global_batch is not None):
        raise InvalidValue("parallel, checkpointing and global_batch are for a model's name; a script has its own ways")
    rows = list(_rows(request.model, clusters, ways, checkpointing, global_batch))
    with many_runs(of_ranks=True) as stop:
        filled = Filling(rows, request, card, interconnect, workers, stop).fill(progress)
    return GPUPlan(
        source=request.source or str(getattr(request.job, "__name__", request.job)), gpu=card.name, rows=filled
    )


def _rows(
    model: Model | None, clusters: list[Cluster], ways: list[str], checkpointing: bool | None, global_batch: int | None
) -> Iterator[PlanRow]:
    for cluster in clusters:
        where: dict[str, Any] = {"gpus": cluster.gpus, "nodes": cluster.nodes}
        if model is None:
            yield PlanRow(**where, strategy=ITS_OWN)
            continue
        kept = (model.checkpointing or bool(checkpointing),) if checkpointing is not None else (False, True)
        for strategy in [ONE] if cluster.gpus == 1 else ways:
            ranks = data_ranks(strategy, Rank(cluster.gpus, nodes=cluster.nodes))
            given = model.batch_size * (cluster.gpus if strategy == PP else 1)
            batch, rest = (given, 0) if global_batch is None else divmod(global_batch, ranks)
            why_not = f"{global_batch} samples cannot be shared evenly by {ranks} ranks" if rest or not batch else None
            for with_checkpoints in kept:
                yield PlanRow(
                    **where,
                    strategy=strategy,
                    checkpointing=with_checkpoints,
                    batch_size=batch,
                    data_ranks=ranks,
                    why_not=why_not,
                )
