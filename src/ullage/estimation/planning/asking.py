"""`ullage.plan`: the number of GPUs and the parallelism with which a job fits, and the fastest combination."""

import multiprocessing
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, ModelLacks, UllageError
from ullage.estimation.asking import answer_request, names_unknown_options, request_for
from ullage.estimation.planning.result import ITS_OWN, ONE, GPUPlan, PlanRow
from ullage.estimation.result import Estimate
from ullage.estimation.scripts.parent import many_runs
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import Function, JobRequest, Ranks, Script
from ullage.jobs.kinds import MODEL, SCRIPT
from ullage.jobs.model import Model
from ullage.jobs.parallel import DDP, PARALLEL, PP, check_parallel, data_ranks
from ullage.jobs.ranks import Rank
from ullage.performance.step import StepCalls
from ullage.sandbox.child import end_with
from ullage.sandbox.process_identity import Process, this_process
from ullage.virtual.memory.nccl import Communicator

Progress = Callable[[PlanRow, int, int], Any]
_ALONE = "its ranks send each other nothing in a step, so each would train alone: torch.distributed is not used"
GPUS_OF_A_NODE = 8
_GPUS = re.compile(r"(?:(\d+)(?:\.\.(\d+))?\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(.+)")


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs on a number of machines."""

    gpus: int
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return self.gpus // self.nodes


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
    """Find the numbers of GPUs and the parallelism with which a job fits, and the fastest. No GPU is needed.

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
        workers: Rows that are estimated at once. More than one run in separate processes, so a program needs the usual
            `if __name__ == "__main__":`. A function's rows come one after another.
        batch_size: Short for `Model(..., batch_size=)`.
        args: Short for `Script(..., args=)`.
        steps: As for `ullage.estimate`.
        allocator: As for `ullage.estimate`.
        progress: Called when a row is begun, with the row, how many are done and how many there are.

    Returns:
        A `GPUPlan`; `print` shows it as a table.

    Raises:
        UllageError: If nothing can be tried at all.

    >>> small = Model("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64])
    >>> found = plan(small, "1..2xH200", checkpointing=False)
    >>> [(row.gpus, row.strategy) for row in found.rows]
    [(1, 'one GPU'), (2, 'ddp'), (2, 'fsdp2'), (2, 'tp'), (2, 'pp')]

    Not covered: combinations of more than two kinds of parallelism.
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
        checkpointings = (model.checkpointing or bool(checkpointing),) if checkpointing is not None else (False, True)
        for strategy in [ONE] if cluster.gpus == 1 else ways:
            ranks = data_ranks(strategy, Rank(cluster.gpus, nodes=cluster.nodes))
            given = model.batch_size * (cluster.gpus if strategy == PP else 1)
            batch, rest = (given, 0) if global_batch is None else divmod(global_batch, ranks)
            why_not = f"{global_batch} samples cannot be shared evenly by {ranks} ranks" if rest or not batch else None
            for with_checkpoints in checkpointings:
                yield PlanRow(
                    **where,
                    strategy=strategy,
                    checkpointing=with_checkpoints,
                    batch_size=batch,
                    data_ranks=ranks,
                    why_not=why_not,
                )


class Filling:
    """The rows of a plan, of which up to `workers` are estimated at once: each runs the job as one rank of N.

    Several workers are processes. A function cannot be sent to one, so its rows come one after another. Two rows share
    a run only if the code cannot tell them apart: whole models with the same batch do the same on 16 ranks and on 64.
    """

    def __init__(
        self,
        rows: list[PlanRow],
        request: JobRequest,
        card: GPU,
        interconnect: str | None,
        workers: int,
        stop: Event,
    ) -> None:
        self._rows, self._request, self._card, self._interconnect = rows, request, card, interconnect
        self._workers = min(workers, len(rows)) if request.kind in (MODEL, SCRIPT) else 1
        self._stop = stop
        self._filled: dict[int, PlanRow] = {}
        self._errors: list[UllageError] = []
        self._hopeless: dict[tuple[str, bool], str] = {}  # strategies that never run, whatever the number of GPUs

    def fill(self, progress: Progress | None) -> list[PlanRow]:
        """Return all rows, with `why_not` if one does not run. If none runs, all for one reason, raise the error."""
        waiting, under_way = list(range(len(self._rows))), dict[Future[Estimate], int]()
        with self._pool() as pool:
            while waiting or under_way:
                number = self._next(waiting, under_way.values())
                if number is None:
                    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                        self._take(under_way.pop(future), future)
                    continue
                row = self._rows[number]
                waiting.remove(number)
                if progress is not None:
                    progress(row, len(self._filled), len(self._rows))
                known = self._known(row)
                if known is None:
                    under_way[pool.submit(answer_request, self._request_of(row), self._card)] = number
                else:
                    self._filled[number] = known
        filled = [row for _, row in sorted(self._filled.items())]
        reasons = {row.why_not for row in filled if row.estimate is None}
        if self._errors and len(reasons) == 1 and not any(row.estimate for row in filled):
            raise self._errors[0]
        return filled

    def _next(self, waiting: list[int], under_way: Iterable[int]) -> int | None:
        """Return the next row, but not of a kind that is being tried for the first time: it may fail for all rows."""
        busy = [_kind(self._rows[number]) for number in under_way]
        if len(busy) == self._workers:
            return None
        tried = {_kind(row) for row in self._filled.values()}
        for number in waiting:
            kind = _kind(self._rows[number])
            if kind not in busy or kind in tried and kind[0] != DDP:
                return number
        return None

    def _known(self, row: PlanRow) -> PlanRow | None:
        reason = row.why_not or self._hopeless.get(_kind(row))
        if reason is not None:
            return replace(row, why_not=reason)
        same = _same_run(row, self._filled.values(), self._card)
        return None if same is None else _moved(row, same, self._card)

    def _take(self, number: int, future: Future[Estimate]) -> None:
        row = self._rows[number]
        try:
            answer = future.result()
            filled = replace(row, estimate=answer) if self._request.kind == MODEL else _as_it_ran(row, answer)
            whatever_the_number = filled.why_not == _ALONE
        except BrokenProcessPool:
            raise InvalidValue(
                f"a process that estimated a row was killed; {self._workers} at once may need more memory than this "
                "machine has: try --workers 1"
            ) from None
        except UllageError as error:
            self._errors.append(error)
            filled = replace(row, why_not=str(error).splitlines()[0])
            whatever_the_number = isinstance(error, ModelLacks)
        if filled.why_not is not None and whatever_the_number:
            self._hopeless[_kind(row)] = filled.why_not
        self._filled[number] = filled

    def _request_of(self, row: PlanRow) -> JobRequest:
        request = self._request
        many = row.gpus > 1 or request.kind != MODEL
        ranks = Ranks(
            size=row.gpus if many else None,
            nodes=row.nodes,
            interconnect=self._interconnect,
            parallel=row.strategy if request.kind == MODEL and many else None,
        )
        if request.model is None or row.batch_size is None:
            return replace(request, ranks=ranks)
        model = replace(request.model, batch_size=row.batch_size, checkpointing=row.checkpointing)
        return replace(request, ranks=ranks, job=model)

    @contextmanager
    def _pool(self) -> Iterator[Executor]:
        """Estimate in this process, in threads for scripts (which run in processes), or in processes."""
        if self._workers == 1:
            yield _Here()
        elif self._request.kind == SCRIPT:
            with ThreadPoolExecutor(self._workers) as pool:
                try:
                    yield pool
                except BaseException:
                    self._stop.set()
                    raise
        else:
            yield from self._processes()

    def _processes(self) -> Iterator[Executor]:
        pool = ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"), _begin, (this_process(),))
        try:
            yield pool
        except BaseException:
            for process in [*(pool._processes or {}).values()]:
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(asker: Process) -> None:
    """Start a process that estimates rows: it ignores Ctrl-C and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(asker)


class _Here(Executor):
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except UllageError as error:
            future.set_exception(error)
        return future


def _kind(row: PlanRow) -> tuple[str, bool]:
    return row.strategy, row.checkpointing


def _as_it_ran(row: PlanRow, answer: Estimate) -> PlanRow:
    """Read how a script shares its work among ranks, from its samplers or its messages. Ranks that send to a single
    other one are stages of a pipeline; ranks that exchange activations in the forward pass share samples."""
    step = answer.utilization
    if step is None:
        return replace(row, estimate=answer)
    if row.gpus > 1 and not step.collectives:
        return replace(row, why_not=_ALONE)
    alone = row.gpus if step.data_ranks is None else min(step.data_ranks, row.gpus)
    if step.data_ranks is None:
        stages = [each["ranks"] for each in step.collectives if each["operation"] in ("send", "recv")]
        sharing = [each["ranks"] for each in step.collectives if each["activations"]]
        alone = max(1, row.gpus // max(stages, default=1) // max(sharing, default=1))
    return replace(row, estimate=answer, batch_size=step.samples, data_ranks=alone)


def _same_run(row: PlanRow, filled: Iterable[PlanRow], card: GPU) -> PlanRow | None:
    """Return a row with the same run: whole models on several ranks request the same memory, whatever their number, if
    NCCL's connections need the same."""
    if row.strategy != DDP:
        return None
    connections = Communicator(card, ranks=row.gpus, machines=row.nodes)
    return next(
        (
            other
            for other in filled
            if other.strategy == DDP
            and other.estimate is not None
            and not other.same_run
            and (other.checkpointing, other.batch_size) == (row.checkpointing, row.batch_size)
            and Communicator(card, ranks=other.gpus, machines=other.nodes).size == connections.size
        ),
        None,
    )


def _moved(row: PlanRow, known: PlanRow, card: GPU) -> PlanRow:
    """Return the row with the estimate of another row, whose network time is computed again for its ranks."""
    answer = known.estimate
    assert answer is not None
    if answer.step_calls is not None:
        ranks = Cluster(row.gpus, row.nodes)
        calls = [_among(call, ranks) for call in answer.step_calls.calls]
        answer = answer.with_utilization(StepCalls(**vars(answer.step_calls) | {"calls": calls}), card)
    return replace(row, estimate=answer, same_run=True)


def _among(call: dict[str, Any], ranks: Cluster) -> dict[str, Any]:
    if "ranks" not in call.get("kwargs", {}) or not str(call["operator"]).startswith("collective."):
        return call
    values = {"ranks": ranks.gpus, "nodes": ranks.nodes, "ranks_per_node": ranks.ranks_per_node}
    return {**call, "kwargs": {**call["kwargs"], **values}}


def read_gpus(text: str) -> tuple[GPU, list[Cluster]]:
    """Read the GPUs to plan for: `"1..64xH100"` (powers of two, eight in a machine), `"8xA100-80GB"`, `"2x8xH100"`
    (machines, and GPUs in each), `"1..8x8xH100"`.

    >>> card, clusters = read_gpus("4..16xH100")
    >>> card.name, [(one.gpus, one.nodes) for one in clusters]
    ('H100-80GB', [(4, 1), (8, 1), (16, 2)])
    >>> read_gpus("2x4xL4")[1]
    [Cluster(gpus=8, nodes=2)]
    """
    match = _GPUS.fullmatch(text.strip())
    assert match is not None or not text.strip()
    if match is None or match[1] is not None and int(match[1]) < 1 or match[3] is not None and int(match[3]) < 1:
        raise InvalidValue(f"GPUs must be written as 1..64xH100, 8xA100-80GB or 2x8xH100, got {text!r}")
    first = int(match[1] or 1)
    last = int(match[2] or first)
    if last < first:
        raise InvalidValue(f"a range of GPUs must rise, such as 1..64xH100, got {text!r}")
    counts = [first]
    while match[2] is not None and counts[-1] < last:
        counts.append(min(last, 1 << counts[-1].bit_length()))
    card = find_gpu(match[4])
    if match[3] is not None:
        return card, [Cluster(count * int(match[3]), count) for count in counts]
    for count in counts:
        if count > GPUS_OF_A_NODE and count % GPUS_OF_A_NODE:
            raise InvalidValue(
                f"{count} GPUs are not whole machines of {GPUS_OF_A_NODE}; say how they are, such as 3x4x{match[4]}"
            )
    return card, [Cluster(count, max(1, count // GPUS_OF_A_NODE)) for count in counts]
