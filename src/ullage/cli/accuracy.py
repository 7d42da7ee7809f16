"""`ullage evaluate`: compare estimates with measured runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ullage.cli.options import Json, MeasuredGpu, option
from ullage.cli.progress import following
from ullage.cli.tables import fitted
from ullage.errors import UllageError
from ullage.hardware import GPU
from ullage.jobs.model import read_rows
from ullage.virtual.releases import as_measured, follow

if TYPE_CHECKING:
    from ullage.measuring.accuracy import Comparison


def evaluate(
    truth: Annotated[Path, option("Measured runs (JSONL), or a file from 'ullage contribute'.", "FILE")],
    gpu: MeasuredGpu = None,
    every: Annotated[int, option("Evaluate only every Nth run.", "N", min=1)] = 1,
    worst: Annotated[int, option("Number of worst runs to list.", "N", min=0)] = 5,
    as_json: Json = False,
) -> None:
    """Compare estimates with measured runs.

    A file from 'ullage contribute' is checked first; it names its GPU and its PyTorch. Ctrl-C prints the runs done so
    far. 'ullage lab evaluate' ranks estimators.

    Examples:

      ullage evaluate --truth h200_train_steps.jsonl --every 10
      ullage evaluate --truth my-card.jsonl
    """
    from ullage.measuring import contribution

    if contribution.is_one(truth):
        contributed = contribution.read(truth)
        version = contributed.header["versions"]["torch"]
        follow(version)
        rows, card = contributed.truth()[::every], contributed.gpu
        if not rows:
            raise UllageError(f"{truth} has no training that was measured")
        if not as_json:
            failed = len(contributed.runs) - len(rows)
            print(
                f"{truth} is in order: {len(rows)} trainings on {card.name} with PyTorch {version}, "
                f"{failed} failed there"
            )
        _compare(rows, card, worst, as_json)
        return
    as_measured()
    rows = [row for row in read_rows(truth) if "header" not in row][::every]
    if not rows:
        raise UllageError(f"{truth} holds no runs")
    _compare(rows, gpu or "H200", worst, as_json)


def _compare(rows: list[dict[str, Any]], gpu: str | GPU, worst: int, as_json: bool) -> None:
    results: list[Comparison] = []
    with following("reading runs", stoppable=True) as going:
        from ullage.measuring import accuracy

        going.begin("estimating", len(rows))
        for row in rows:
            going.doing(str(row.get("model", "")))
            results.append(accuracy.compare(row, gpu))
            going.step()
    if results and as_json:
        print(json.dumps(accuracy.as_dict(results)))
    elif results:
        _print_accuracy(results, worst)
    going.end()


def _print_accuracy(results: "list[Comparison]", worst: int) -> None:
    from ullage.measuring import accuracy

    heads = ("rows", "figure", "count", "given", "exact", "median", "mean", "90%", "99%", "too low")
    rows = []
    for line in accuracy.summarize(results):
        shares = [f"{value:.2%}" for value in (line.median, line.mean, line.p90, line.p99)]
        cells = [line.group, line.figure, str(line.rows), str(line.given), f"{line.exact:.0%}", *shares]
        rows.append([*cells, f"{line.under:.0%}"])
    print(fitted(heads, rows, give_way=("given", "mean", "99%", "count"), left=("figure",)))
    limits = accuracy.bound(results)
    if limits:
        print(f"upper holds for {limits['holds']:.1%} of the runs and lies {limits['above']:.2%} above (median)")
    times = [result.seconds for result in results]
    print(f"one estimate: {accuracy.quantile(times, 0.5):.2f} s (median), {accuracy.quantile(times, 0.95):.2f} s (95%)")
    known = [result for result in results if result.error("reserved") is not None]
    for result in sorted(known, key=lambda result: -abs(result.error("reserved") or 0))[:worst]:
        print(f"worst: {result.id} {result.model} {result.precision}: reserved {result.error('reserved'):+.2%}")
    for result in results:
        if result.failed:
            print(f"not estimated: {result.id} {result.model}: {result.failed}")
