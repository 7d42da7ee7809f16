"""Grows the H200's trees of cuDNN's choices anew, from what is shipped: no raw measurements are needed.

    python benchmarks/regrow_trees.py FOLDER --answers benchmarks/data/h200_fresh_answers.jsonl.xz
    python benchmarks/regrow_trees.py FOLDER --answers benchmarks/data/h200_fresh_answers.jsonl.xz \
        --without benchmarks/data/h200_fresh_second.jsonl.gz
    python benchmarks/fresh_networks.py judge benchmarks/data/h200_fresh_second.jsonl.gz --trees FOLDER

What was measured is found in the shipped table (`held_out_families.py` says how), and cuDNN's answers about the fresh
networks come on top. `--without` leaves out every problem of a list of runs, so that the trees can be judged on them;
with both lists left out, on families of networks that nothing was fitted on. Needs a C compiler (`cc`), no GPU, and
about ten minutes for each direction.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import held_out_families as known
import ullage
from ullage.research.cudnn_tables import table
from ullage.research.ranking.truth import measured_rows
from ullage.virtual.kernels.cudnn import workspaces
from ullage.virtual.kernels.cudnn.formulas import ConvolutionProblem
from ullage.virtual.releases import as_measured
from ullage.workloads import Configuration, train

TREES, LEAVES = 6, 10_000


def answered(path: Path) -> dict[ConvolutionProblem, int]:
    """The problems in a file of answers, each with the workspace of the plan that cuDNN names first."""
    rows = (row for row in measured_rows(path) if row.get("candidates"))
    return {ConvolutionProblem.of(row["problem"]): row["candidates"][0][2] for row in rows}


def problems_of_runs(path: Path) -> set[ConvolutionProblem]:
    """What the runs of a list give to cuDNN."""
    found: set[ConvolutionProblem] = set()
    for row in measured_rows(path):
        if "peak_reserved" in row:
            with ullage.virtual_gpu("H200") as gpu:
                train(Configuration.from_row(row))
            found |= set(gpu.uncertainty.convolutions)
    return found


def grow_direction(
    direction: str, folder: Path, answers: dict[ConvolutionProblem, int], left_out: set[ConvolutionProblem]
) -> dict[str, Any]:
    """The trees of a direction as arrays; formulas are found in the table alone."""
    sys.setrecursionlimit(100_000)  # a tree may be as deep as it has leaves
    layers = {layer._replace(bias=False) for members in known.read_layers().values() for layer in members}
    measured = known.random_problems(direction) | known.measured_layers(direction, layers)
    measured = {problem: size for problem, size in measured.items() if problem not in left_out}
    fresh = {
        problem: size for problem, size in answers.items() if problem.direction == direction and problem not in left_out
    }
    formulas = [formula for formula, _ in table.find_formulas(table.measured_part(list(measured.items())))]
    part = table.measured_part(list((measured | fresh).items()))
    labels, labelled = table.label(part, formulas)
    rows = np.array([workspaces.features(problem) for problem in part.problems], dtype=np.int64)
    grown = table.export(known.Grower(folder).grow(rows, np.array(labels), TREES, LEAVES))
    known.say(f"{direction}: {len(measured)} problems of the table, {len(fresh)} answers, {len(formulas)} formulas")
    arrays = {f"{direction}_{name}": values for name, values in grown.items()}
    return arrays | {f"{direction}_formulas": np.array(labelled, dtype=np.int64)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the trees, beside copies of the other files that are shipped")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="of 'ullage measure cudnn'")
    parser.add_argument("--without", type=Path, action="append", default=[], metavar="RUNS", help="leave these out")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes at once")
    options = parser.parse_args()
    shutil.copytree(workspaces.DATA_FOLDER, options.folder, dirs_exist_ok=True)
    answers = answered(options.answers) if options.answers else {}
    left_out: set[ConvolutionProblem] = set().union(*map(problems_of_runs, options.without))
    grow = partial(grow_direction, folder=options.folder, answers=answers, left_out=left_out)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        directions = list(pool.map(grow, table.DIRECTIONS))
    arrays = {name: values for part in directions for name, values in part.items()}
    np.savez_compressed(options.folder / known.H200_TREES, **arrays)


if __name__ == "__main__":
    as_measured()
    main()
