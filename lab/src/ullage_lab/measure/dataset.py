"""Measures a file of configurations on this machine's GPU: memory with many runs at once, or utilisation one by one.

Rows are appended as they come, so that a killed session can be continued. The file's first line has the GPU and the
versions of its rows; another such line follows when these change.
"""

import importlib
import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.model import Model, read_rows, rows_so_far
from ullage.units import GIB, MIB
from ullage_lab.measure.pool import ParallelRuns, RunKind

Rows = Generator[dict[str, Any], None, None]
SPARE = 2 * GIB  # of the GPU, left for the driver and others
BASE = 800 * MIB  # a process with a context before training
# What `generate.Cost` counts is not exact, and cached memory comes on top of it: most for convolutions in 16 bits,
# whose workspaces are large. Runs that meet the end of the card all the same are tried again alone.
SAFETY, SAFETY_CONVOLUTIONS = 1.35, 1.6
MARGIN = GIB
UNKNOWN_NEED = 30 * GIB
TURNS = 5  # children that have made their first step before the first of them is read
_OF_PLANS = ("iterations", "seconds", "readings", "raw")


@dataclass(frozen=True, kw_only=True)
class MeasurementSettings:
    """Settings of a measurement. `utilization` reads each run alone, for `seconds`, `readings` times."""

    out: Path
    at_once: int = 14
    iterations: int = 3
    utilization: bool = False
    seconds: float = 1.0
    readings: int = 1
    timeout: float = 60.0
    raw: Path | None = None
    together: int = 1  # memory runs that share a process, one after the other

    @property
    def kind(self) -> str:
        return "utilization" if self.utilization else "memory"

    def log(self, order: dict[str, Any]) -> Path | None:
        """Make the folder of a run's log, and return the log's path."""
        if self.raw is None:
            return None
        folder = self.raw / str(order["id"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.kind}.log"


def measure_rows(rows: Sequence[dict[str, Any]], plan: MeasurementSettings) -> tuple[int, Rows]:
    """Return the number of rows left to measure, and an iterator of rows that are measured and already in the file.

    left, measured = measure_rows(rows, MeasurementSettings(out=Path("measured.jsonl")))
    for row in measured:
        print(row["id"], row.get("peak_reserved"))
    """
    checked = checked_rows(rows, plan)
    done = mend(plan.out, plan.kind)
    left = [row for row in checked if row["id"] not in done]
    return len(left), _measured(left, plan)


def checked_rows(rows: Sequence[dict[str, Any]], plan: MeasurementSettings) -> list[dict[str, Any]]:
    """Return the rows for the children, each with an id, checked before anything runs."""
    checked, seen = [], set()
    for number, row in enumerate(rows):
        if "header" in row:
            continue
        name = str(row.get("id") or f"r{number:05d}")
        if name in seen or "/" in name:
            raise InvalidValue(f"each run must have a unique id without '/', got {name!r}")
        seen.add(name)
        Model.from_row(row)
        extra: dict[str, Any] = {"iterations": plan.iterations}
        if plan.utilization:
            extra = {"seconds": plan.seconds, "readings": plan.readings}
        checked.append({**row, "id": name, **extra, **({"raw": True} if plan.raw else {})})
    return checked


def _measured(rows: list[dict[str, Any]], plan: MeasurementSettings) -> Rows:
    if not rows:
        return
    runs, header = prepare_runs(plan)
    import_models(rows)
    known = last_header(plan.out)
    with appending(plan.out) as file:
        if known != header:
            file.write(json.dumps({"header": header}) + "\n")
        for settings, answer in _answers(runs, rows, plan):
            row = {key: value for key, value in settings.items() if key not in _OF_PLANS}
            row |= {"pass": plan.kind, **answer}
            file.write(json.dumps(row) + "\n")
            file.flush()
            if plan.raw is not None:
                (plan.raw / row["id"] / f"{plan.kind}.json").write_text(json.dumps(row, indent=1) + "\n")
            yield row


def _answers(
    runs: ParallelRuns, rows: list[dict[str, Any]], plan: MeasurementSettings
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield rows with their answers; rows that a bundle did not reach get a fresh process afterwards."""
    if plan.together > 1 and not plan.utilization:
        from ullage_lab.measure.memory import bundle, prepare_bundle, run_bundle, untied

        left = []
        kind = replace(runs.kind, prepare=prepare_bundle, run=run_bundle, log=lambda row: None)
        bundles = ParallelRuns(
            kind,
            total=runs.total,
            at_once=runs.at_once,
            timeout=plan.timeout + 2 * plan.together,
            host_total=runs.host_total,
            retry=lambda answer: False,
        )
        for parcel, answers in bundles.work(bundle(rows, plan.together, need)):
            for row, answer in untied(parcel, answers):
                if answer is None:
                    left.append(row)
                else:
                    yield row, answer
        rows = left
    yield from runs.work(rows)


def prepare_runs(plan: MeasurementSettings) -> tuple[ParallelRuns, dict[str, Any]]:
    """Return the runs of a plan, and the facts about the GPU. This process itself never touches CUDA."""
    header = prepare_forking()
    import psutil

    from ullage_lab.measure import memory as memory_run
    from ullage_lab.measure import utilization as utilization_run

    kind = RunKind(
        prepare=memory_run.prepare_memory,
        run=memory_run.run_memory,
        gpu_memory=need,
        before_run=BASE,
        host_memory=_host,
        log=plan.log,
    )
    if plan.utilization:
        kind = replace(
            kind,
            prepare=utilization_run.prepare_utilization,
            run=utilization_run.run_utilization,
            turns=TURNS if plan.readings == 1 else max(TURNS, plan.at_once // 3),
            renew=None if plan.raw else utilization_run.renew,
        )
    runs = ParallelRuns(
        kind,
        total=max(GIB, header["free"] - SPARE),
        at_once=plan.at_once,
        timeout=plan.timeout + plan.seconds,
        host_total=int(psutil.virtual_memory().available * 0.75),
        retry=_is_doubtful,
    )
    return runs, {key: value for key, value in header.items() if key != "free"}


def prepare_forking() -> dict[str, Any]:
    """Import PyTorch with one thread, as forking wants it, and return the facts about the GPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before PyTorch is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import torch

    from ullage.virtual.compiler.without_dynamo import no_compiler

    torch.set_num_threads(1)
    no_compiler()
    return look_at_gpu()


def import_models(rows: Sequence[dict[str, Any]]) -> None:
    """Import the models' packages once for all children. A missing package is an error of its own runs."""
    names: dict[str, set[str]] = {}
    for configuration in map(Model.from_row, rows):
        names.setdefault(configuration.source, set()).add(configuration.short_name)
    packages = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}
    if packages.keys() & names.keys():
        from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

        make_torchvision_importable()
    for source, package in packages.items():
        with suppress(ImportError):
            module = importlib.import_module(package) if source in names else None
            for name in names.get(source, ()):
                getattr(module, name, None)  # this imports a class of transformers


def look_at_gpu() -> dict[str, Any]:
    """Return name, memory and versions, read by a child: a process that has used CUDA cannot fork others."""
    from ullage_lab.measure.memory import describe_gpu

    kind = RunKind(prepare=lambda row: None, run=lambda prepared, pause: describe_gpu(), gpu_memory=lambda row: 0)
    answer = next(description for _, description in ParallelRuns(kind, total=GIB, at_once=1, timeout=120).work([{}]))
    if "failed" in answer:
        raise UllageError(
            f"cannot measure: PyTorch finds no NVIDIA GPU here: {answer['failed']}. "
            "'ullage lab draw dataset' and 'ullage lab data clean' need no GPU."
        )
    return answer


def need(order: dict[str, Any]) -> int:
    """Return the memory of the card that a run may use without its context: the count, and an allowance."""
    counted: int | None = order.get("need")
    if counted is None:
        return UNKNOWN_NEED
    wide = order.get("family") == "cnn" and order.get("precision") != "fp32"
    return round(counted * (SAFETY_CONVOLUTIONS if wide else SAFETY)) + MARGIN


def _host(order: dict[str, Any]) -> int:
    """Return the host memory of a run: the weights on the CPU, twice if they are cast, and a context's share."""
    return GIB + 6 * int(order.get("parameters") or 500_000_000)


def _is_doubtful(answer: dict[str, Any]) -> bool:
    """Whether other runs may have caused the result: no memory left, too slow, or cached memory freed."""
    return "failed" in answer or "oom" in answer or bool(answer.get("retries"))


def mend(out: Path, kind: str) -> set[str]:
    """Return the ids that a file has measured in this way, after removing an incomplete last line."""
    return {str(row["id"]) for row in rows_so_far(out) if "id" in row and row.get("pass") == kind}


def last_header(out: Path) -> dict[str, Any] | None:
    headers = [row["header"] for row in read_rows(out) if "header" in row] if out.exists() else []
    return headers[-1] if headers else None


def appending(out: Path) -> Any:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("a")
    except OSError as error:
        raise InvalidValue(f"cannot write {out}: {error.strerror}") from None
