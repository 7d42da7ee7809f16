"""Errors of estimates of measured runs, by figure and group."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ullage.errors import UllageError
from ullage.estimation.asking import estimate
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs import Model, train

FIGURES = ("allocated", "reserved", "process")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured run and its estimate; sizes are bytes, `None` if not estimated or measured."""

    id: str
    model: str
    precision: str
    seconds: float
    allocated: int | None = None
    allocated_truth: int | None = None
    reserved: int | None = None
    reserved_truth: int | None = None
    process: int | None = None
    process_truth: int | None = None
    upper: int | None = None
    failed: str | None = None

    @property
    def family(self) -> str:
        """The part of the model's name before the colon; a custom factory is a family of its own."""
        prefix = self.model.partition(":")[0]
        return self.model if "." in prefix else prefix

    def error(self, figure: str) -> float | None:
        value, truth = getattr(self, figure), getattr(self, f"{figure}_truth")
        return None if value is None or not truth else (value - truth) / truth


def compare(row: dict[str, Any], gpu: str | GPU = "H200", run: Callable[[], Any] | None = None) -> Comparison:
    """Estimate a measured run; `run` trains it, by default the standard loop over its configuration."""
    begin = time.perf_counter()
    figures: dict[str, Any] = {}
    try:
        if run is None:
            configuration = Model.from_row(row)
            figures = _figures(row, estimate(lambda: train(configuration), gpu=gpu))
        else:
            figures = _figures(row, estimate(run, gpu=gpu))
    except (UllageError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        figures = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    figures |= {name: str(row.get(name, "")) for name in ("id", "model", "precision")}
    return Comparison(seconds=time.perf_counter() - begin, **figures)


def _figures(row: dict[str, Any], answer: Estimate) -> dict[str, int | None]:
    reserved = row.get("peak_reserved")
    process = None
    if reserved is not None and row.get("nvml_end") is not None:
        process = row["nvml_end"] - row.get("end_reserved", reserved) + reserved
    return {
        "allocated": answer.peak_allocated,
        "allocated_truth": row.get("peak_alloc"),
        "reserved": answer.peak_reserved,
        "reserved_truth": reserved,
        "process": answer.process_memory,
        "process_truth": process,
        "upper": answer.upper,
    }


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    group: str
    figure: str
    rows: int
    given: int
    exact: float
    median: float
    mean: float
    p90: float
    p99: float
    under: float


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value at or below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000 * len(ordered)) // 1000) - 1))]


def groups(results: list[Comparison]) -> dict[str, list[Comparison]]:
    """Return all runs, then those of each family and of each precision."""
    members: dict[str, list[Comparison]] = {"all": results}
    for result in results:
        members.setdefault(result.family, []).append(result)
    for result in results:
        members.setdefault(result.precision, []).append(result)
    return members


def summarize(results: list[Comparison]) -> list[ErrorSummary]:
    summaries = []
    for group, members in groups(results).items():
        for figure in FIGURES:
            errors = [error for member in members if (error := member.error(figure)) is not None]
            if not errors:
                continue
            count, sizes = len(errors), [abs(error) for error in errors]
            exact, mean, under = errors.count(0) / count, sum(sizes) / count, sum(error < 0 for error in errors) / count
            median, p90, p99 = (quantile(sizes, share) for share in (0.5, 0.9, 0.99))
            summaries.append(ErrorSummary(group, figure, len(members), count, exact, median, mean, p90, p99, under))
    return summaries


def bound(results: list[Comparison]) -> dict[str, float]:
    """Return the share of runs below `upper`, and its median distance above the truth.

    If runs shared a process and only their reserved memory was measured, the truth is this memory and the context of
    the estimate.
    """
    pairs = [(r.upper, truth) for r in results if r.upper is not None and (truth := _whole(r))]
    if not pairs:
        return {}
    return {
        "holds": sum(upper >= truth for upper, truth in pairs) / len(pairs),
        "above": quantile([upper / truth - 1 for upper, truth in pairs], 0.5),
    }


def _whole(result: Comparison) -> int | None:
    """Return the memory of the measured process, as far as it is known."""
    if result.process_truth or result.process is None or result.reserved is None or not result.reserved_truth:
        return result.process_truth
    return result.reserved_truth + result.process - result.reserved


def as_dict(results: list[Comparison]) -> dict[str, Any]:
    return {
        "summary": [asdict(summary) for summary in summarize(results)],
        "upper": bound(results),
        "seconds": {share: quantile([r.seconds for r in results], share) for share in (0.5, 0.95)},
        "rows": [asdict(result) for result in results],
    }
