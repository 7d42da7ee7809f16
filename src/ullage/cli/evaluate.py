"""`ullage evaluate`: estimates beside measured runs, ours in depth or all estimators as a ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli.options import Json
from ullage.errors import InvalidValue, UllageError

if TYPE_CHECKING:
    from ullage.measure.accuracy import Comparison

RANKING = "Ranking (with --estimators)"
LEARNED = "Table 2 of the GPUMemNet paper (with walknet)"


def evaluate(
    what: Annotated[
        str | None, typer.Argument(help="walknet: judge its networks on data sets, beside the paper's Table 2.")
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option(help="Measured runs: JSONL, or a data set (Parquet); with --estimators also an A100 table."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU they were measured on.", show_default="H200, A100-40GB for .csv")
    ] = None,
    every: Annotated[int, typer.Option(help="Only every Nth run.", min=1)] = 1,
    worst: Annotated[int, typer.Option(help="List so many of the worst runs.", min=0)] = 5,
    estimators: Annotated[
        str | None, typer.Option(help="Rank estimators: 'all', or names with commas.", metavar="all|A,B,C",
                                 rich_help_panel=RANKING)
    ] = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="Only N runs, always the same; NAME=N for one estimator. Repeat it for "
                                       "more.", metavar="N|NAME=N", rich_help_panel=RANKING)
    ] = None,
    limit: Annotated[
        str, typer.Option(help="Give an estimate up after so long.", metavar="TIME", rich_help_panel=RANKING)
    ] = "2m",
    resume: Annotated[
        Path | None, typer.Option(help="Keep answers in this file; those that it has are not asked for again.",
                                  metavar="FILE.jsonl", rich_help_panel=RANKING)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the ranking as one HTML page.", metavar="FILE.html",
                                  rich_help_panel=RANKING)
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept", help="Rank the answers that --resume has and ask nothing: how far a ranking is.",
                           rich_help_panel=RANKING)
    ] = False,
    workers: Annotated[
        int, typer.Option(help="Ask so many at once; times are then those of a busy machine.", min=1,
                          rich_help_panel=RANKING)
    ] = 1,
    data: Annotated[
        list[Path] | None, typer.Option(help="Rows of 'ullage dataset clean' (Parquet) or the authors' table (.csv). "
                                        "Repeat it for more.", show_default="benchmarks/data/generated_h200.parquet",
                                        rich_help_panel=LEARNED)
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A folder of weights.", show_default="those that are shipped",
                                  rich_help_panel=LEARNED)
    ] = None,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train anew on these data, with cross-validation: minutes.",
                           rich_help_panel=LEARNED)
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare estimates with measured runs.

    Without --estimators: ours, in depth. With it: the ranking of estimators by error, underestimates, xMem's two-round
    protocol, time and coverage.

    Examples:

      ullage evaluate --truth h200_train_steps.jsonl --every 10

      ullage evaluate --truth h200_train_steps.jsonl --estimators all --sample 300 --sample xmem=40 --resume out.jsonl

      ullage evaluate --truth realworld_a100.csv --estimators ullage,horus --report out.html

      ullage evaluate walknet

      ullage evaluate walknet --data gpumemnet_mlp_a100.csv --retrain
    """
    if kept and resume is None:
        raise InvalidValue("--kept ranks answers that are kept: name their file with --resume")
    if what is not None:
        _learned(what, data or [], weights, retrain, as_json)
        return
    if truth is None:
        raise typer.BadParameter("needed a file of measured runs", param_hint="--truth")
    if estimators is not None:
        from ullage.cli.evaluate_ranking import Plan, rank_estimators

        rank_estimators(
            Plan(truth, gpu, every, estimators, sample or [], limit, resume, report, as_json, workers, kept)
        )
        return
    given = {"--sample": sample, "--resume": resume, "--report": report}
    unused = [name for name, value in given.items() if value]
    if unused:
        raise InvalidValue(f"{unused[0]} belongs to a ranking: add --estimators all, or names with commas")
    _ours(truth, gpu or "H200", every, worst, as_json)


def _learned(what: str, data: list[Path], weights: Path | None, retrain: bool, as_json: bool) -> None:
    if what != "walknet":
        raise InvalidValue(f"needed nothing or walknet after 'evaluate'; found {what!r} (--truth takes a file of runs)")
    from ullage.cli.evaluate_gpumemnet import Plan, evaluate_gpumemnet

    evaluate_gpumemnet(Plan(data=data, weights=weights, retrain=retrain, as_json=as_json))


def _ours(truth: Path, gpu: str, every: int, worst: int, as_json: bool) -> None:
    from rich.progress import track

    from ullage.measure import accuracy
    from ullage.measure.truth import measured_rows

    rows = measured_rows(truth)[::every]
    if not rows:
        raise UllageError(f"{truth} holds no runs")
    results = [accuracy.compare(row, gpu) for row in track(rows, "estimating", console=Console(stderr=True))]
    if as_json:
        print(json.dumps(accuracy.as_dict(results)))
        return
    _print_accuracy(results, worst)


def _print_accuracy(results: list[Comparison], worst: int) -> None:
    from ullage.measure import accuracy

    console = Console(width=130)
    table = Table("rows", "figure", "count", "given", "exact", "median", "mean", "90 %", "99 %", "too low")
    for line in accuracy.summarize(results):
        shares = [f"{value:.2%}" for value in (line.median, line.mean, line.p90, line.p99)]
        cells = [line.group, line.figure, str(line.rows), str(line.given), f"{line.exact:.0%}", *shares]
        table.add_row(*cells, f"{line.under:.0%}")
    console.print(table)
    limits = accuracy.bound(results)
    if limits:
        print(f"upper holds for {limits['holds']:.1%} of the runs and lies {limits['above']:.2%} above (median)")
    times = [result.seconds for result in results]
    print(
        f"one estimate: {accuracy.quantile(times, 0.5):.2f} s (median), {accuracy.quantile(times, 0.95):.2f} s (95 %)"
    )
    known = [result for result in results if result.error("reserved") is not None]
    for result in sorted(known, key=lambda result: -abs(result.error("reserved") or 0))[:worst]:
        print(f"worst: {result.id} {result.model} {result.precision}: reserved {result.error('reserved'):+.2%}")
    for result in results:
        if result.failed:
            print(f"not estimated: {result.id} {result.model}: {result.failed}")
