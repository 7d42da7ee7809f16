"""`ullage lab evaluate`: all estimators as a ranking, and learned ones on data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli.options import argument, option, with_options
from ullage.cli.progress import Following, following
from ullage.errors import InvalidValue
from ullage.units import format_bytes, format_duration
from ullage.virtual.releases import as_measured
from ullage_lab.cli.ranking import RankingPlan, rank_estimators
from ullage_lab.cli.scores import (
    NAMES,
    print_noise_of_turns,
    print_rows,
    print_table7,
    print_utilization,
    share_of_one,
)

if TYPE_CHECKING:
    from ullage_lab.train.protocol import Examples
    from ullage_lab.train.steps.judging import UtilizationLine
    from ullage_lab.train.table2 import Table2Line

LEARNED = "Tables 2 and 7 of the GPUMemNet paper (with gpumemnet or gpuutilnet)"


@with_options(RankingPlan)
def evaluate(
    what: Annotated[
        str | None,
        argument(
            "gpumemnet (the paper's Table 2), gpuutilnet (Table 7): score its networks on data sets; utilization:"
            " step times, how busy a GPU is, and jobs together, on families left out.",
            "METHOD",
            complete=lambda: list(LEARNED_METHODS),
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        option(
            "Rows of 'ullage lab data clean' (Parquet), the authors' table (.csv), or, for utilization, sets of "
            "'ullage lab measure together'. Repeatable.",
            "FILE",
            default="the project's own, in benchmarks/data",
            panel=LEARNED,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        option(
            "A folder of weights; for gpuutilnet and utilization, a file.",
            "PATH",
            default="those that are shipped",
            panel=LEARNED,
        ),
    ] = None,
    retrain: Annotated[
        bool,
        option("Train new networks on this data, with cross-validation. Takes minutes.", "--retrain", panel=LEARNED),
    ] = False,
    **ranking: Any,
) -> None:
    """Rank estimators by measured runs, or score learned ones.

    With --truth, a ranking by error, underestimates, xMem's two-round protocol, time and coverage. After Ctrl-C, what
    was done is printed. 'ullage evaluate' shows Ullage's own estimates in detail.

    Examples:

      ullage lab evaluate --truth h200_train_steps.jsonl --sample 300 --sample xmem=40 --resume out.jsonl
      ullage lab evaluate --truth realworld_a100.csv --estimators ullage,horus --report out.html
      ullage lab evaluate gpumemnet
      ullage lab evaluate gpuutilnet
      ullage lab evaluate utilization --resume steps.jsonl
      ullage lab evaluate gpumemnet --data gpumemnet_mlp_a100.csv --retrain
    """
    plan = RankingPlan(**ranking)
    if plan.cached_only and plan.resume is None:
        raise InvalidValue("--cached-only needs a file of answers; name it with --resume")
    if what is not None:
        _learned(what, data or [], weights, retrain, plan.resume, plan.as_json)
        return
    if plan.truth is None:
        raise typer.BadParameter("give a file of measured runs, or a method", param_hint="--truth")
    as_measured()
    rank_estimators(plan)


def _learned(
    what: str, data: list[Path], weights: Path | None, retrain: bool, resume: Path | None, as_json: bool
) -> None:
    if what not in LEARNED_METHODS:
        *known, last = LEARNED_METHODS
        raise InvalidValue(
            f"name after 'evaluate' must be {', '.join(known)} or {last}, got {what!r} (--truth takes a file of runs)"
        )
    if what == "gpuutilnet":
        evaluate_gpuutilnet(data, weights, retrain, as_json)
    elif what == "utilization":
        evaluate_utilization(data, weights, resume, as_json)
    else:
        evaluate_gpumemnet(data, weights, retrain, as_json)


# `ullage lab evaluate gpumemnet`: the paper's Table 2 on the user's data.

# The project's data are in its source tree, not in the installed package.
SHIPPED_DATA = Path(__file__).parents[4] / "benchmarks" / "data" / "generated_h200.parquet"
_NETWORKS = ("mlp", "transformer")
LEARNED_METHODS = ("gpumemnet", "gpuutilnet", "utilization")


def evaluate_gpumemnet(data: list[Path], weights: Path | None, retrain: bool, as_json: bool) -> None:
    """Judge both estimators on every family in the data, and print the lines next to the paper's."""
    files = _data_files("gpumemnet", data)
    if weights is not None and not weights.is_dir():
        raise InvalidValue(
            f"--weights must be a folder of files that 'ullage lab train gpumemnet' wrote, got {weights}"
        )
    lines: list[Table2Line] = []
    with following(f"reading {files[0].name}", stoppable=True) as going:
        for file in files:
            for new_lines in _lines(file, weights, retrain, going):
                lines += new_lines
    if as_json:
        print(json.dumps([asdict(line) for line in lines]))
    elif lines:
        print_lines(lines)
    going.end()


def _data_files(method: str, given: list[Path]) -> list[Path]:
    if not given and not SHIPPED_DATA.is_file():
        raise InvalidValue(
            "give --data: a Parquet file of 'ullage lab data clean', or the authors' table "
            f"(ullage lab evaluate {method} --data FILE); the project's own is in its source, benchmarks/data"
        )
    return given or [SHIPPED_DATA]


def _lines(file: Path, weights: Path | None, retrain: bool, going: Following) -> Iterator[list[Table2Line]]:
    """Yield the lines of each family and network of a file, as they come."""
    from ullage_lab.train.protocol import examples_of, read_rows

    rows = read_rows(file)
    families = list(dict.fromkeys(str(row["family"]) for row in rows))
    going.begin("judging gpumemnet", None if retrain else len(families) * len(_NETWORKS))
    for family in families:
        going.doing(f"reading the jobs of {NAMES.get(family, family)}s")
        examples = examples_of([row for row in rows if row["family"] == family])
        for network in _NETWORKS:
            going.doing(f"{NAMES.get(family, family)}s by the {NAMES[network]}")
            yield _judged(examples, family, network, weights, retrain, going)
            going.step()


def _judged(
    examples: Examples, family: str, estimator: str, weights: Path | None, retrain: bool, going: Following
) -> list[Table2Line]:
    from ullage_lab.train.table2 import retrained_lines, shipped_lines

    if not retrain:
        return shipped_lines(examples, family, estimator, weights)

    def named(name: str, steps: int) -> None:
        going.begin(f"{family} {estimator}, {name}", steps)

    return retrained_lines(examples, family, estimator, seed=1, begin=named, notify=going.step)


def print_lines(lines: list[Table2Line]) -> None:
    rows = [
        {
            "data": NAMES.get(line.family, line.family),
            "GPU": line.gpu,
            "estimator": NAMES[line.estimator],
            "bin": format_bytes(line.bin),
            "rows": str(line.rows),
            "paper": share_of_one(line.paper),
            "here": share_of_one(line.accuracy),
            "folds": share_of_one(line.validation),
            "F1 paper": share_of_one(line.paper_f1),
            "F1 here": share_of_one(line.f1),
            "too low": f"{line.under:.1%}",
            "too high": f"{line.over:.1%}",
            "one job": format_duration(line.seconds),
        }
        for line in lines
    ]
    note = (
        "here: accuracy on the held-out 30%; folds: mean of 3-fold cross-validation on the rest, a new network in "
        "each; one job: the processor's time for the longest one, on one core (paper: at most 32 ms)"
    )
    give_way = ("GPU", "too high", "F1 paper", "F1 here", "rows", "folds", "one job")
    print_rows(rows, note, give_way=give_way, left=("GPU", "estimator"))


def evaluate_gpuutilnet(data: list[Path], weights: Path | None, retrain: bool, as_json: bool) -> None:
    """Judge GPUUtilNet's networks on their held-out rows, and print them next to the paper's Table 7."""
    from ullage_lab.estimators.gpuutilnet import BINS, SHIPPED, load
    from ullage_lab.train import table7
    from ullage_lab.train.protocol import read_rows

    files = _data_files("gpuutilnet", data)
    with following(f"reading {files[0].name}") as going:
        rows = [row for file in files for row in read_rows(file)]
        if retrain:
            going.begin("training", len(BINS))
        model = table7.train(rows, notify=going.step) if retrain else load(weights or SHIPPED)
    print_table7(table7.lines_of(model, rows), as_json)


def evaluate_utilization(data: list[Path], weights: Path | None, resume: Path | None, as_json: bool) -> None:
    """Judge the model of a job alone, and the model of sharing, on families that were left out of their fits."""
    from ullage.performance.rates import SHIPPED, load
    from ullage_lab.train import sharing
    from ullage_lab.train.protocol import read_rows
    from ullage_lab.train.steps import judging, runs

    shipped = [SHIPPED_DATA.with_name(name) for name in ("utilization_h200.parquet", "together_h200.jsonl.gz")]
    given = data or [file for file in shipped if file.is_file()] or _data_files("utilization", [])
    with following("reading runs") as going:
        rows = [row for file in given if file.suffix == ".parquet" for row in read_rows(file)]
        sets = [file for file in given if file.suffix != ".parquet"]
        measured = sharing.read_rows(sets) if sets else []
        rates = load(weights or SHIPPED)
        lines: list[UtilizationLine] = []
        if rows:
            read = judging.of_one_host(runs.read_alone(rows), rates)
            learn, test = ([run for run in read if run.is_test is wanted] for wanted in (False, True))
            strange = [run for run in learn if run.machine != rates.card.get("machine")]
            going.begin("following runs", len(test) + len(strange))
            steps = runs.follow(runs.configurations(rows, [*test, *strange]), resume, going.step)
            if strange:
                rates = judging.on_host(rates, runs.with_work(strange, steps))
                known = runs.read_alone(read_rows(shipped[0])) if shipped[0].is_file() else []
                learn += [run for run in judging.of_one_host(known, rates) if not run.is_test]
            lines = judging.lines_of(rates, learn, runs.with_work(test, steps))
        together = []
        if measured:
            going.begin("following jobs", len({row["alone"] for row in measured if "alone" in row}))
            jobs = sharing.follow(measured, resume, going.step)
            alone = sharing.measured_alone(measured, jobs)
            predicted = sharing.predicted_alone(alone, jobs, rates)
            together = sharing.lines_of(sharing.sets_of(measured, alone), alone, predicted)
    print_utilization(lines, together, as_json)
    if not as_json:
        print_noise_of_turns(sharing.noise_of_turns(measured))
