"""Scores of trained models, as tables next to published figures and a constant guess."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from ullage.cli.tables import fitted

if TYPE_CHECKING:
    from ullage_lab.train.sharing import SharingLine
    from ullage_lab.train.steps.judging import UtilizationLine
    from ullage_lab.train.table7 import Table7Line

NAMES = {"mlp": "MLP", "cnn": "CNN", "transformer": "Transformer"}


def print_rows(
    rows: Sequence[Mapping[str, str]], note: str = "", give_way: Sequence[str] = (), left: Sequence[str] = ()
) -> None:
    """Print a table whose columns are the keys of its rows, and their meanings."""
    if rows:
        print(fitted(list(rows[0]), [list(row.values()) for row in rows], give_way=give_way, left=left))
    if note:
        Console().print(note, highlight=False)


def print_table7(lines: list[Table7Line], as_json: bool) -> None:
    """Print the table, with the accuracy of always predicting the most frequent class."""
    if as_json:
        print(json.dumps([asdict(line) for line in lines]))
        return
    rows = [
        {
            "data": NAMES[line.family],
            "metric": line.metric.upper(),
            "rows": str(line.rows),
            "constant": share_of_one(line.constant),
            "paper": share_of_one(line.paper),
            "here": share_of_one(line.accuracy),
            "high": str(line.high),
            "recall paper": share_of_one(line.paper_recall),
            "recall here": share_of_one(line.recall),
        }
        for line in lines
    ]
    note = (
        "here: accuracy on rows that were held out; constant: that of always telling the most frequent class; high: "
        "rows in the high class, and the share of them that was told (recall)"
    )
    print_rows(rows, note, left=("metric",))


def print_utilization(lines: list[UtilizationLine], together: list[SharingLine], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"alone": [asdict(one) for one in lines], "together": [asdict(one) for one in together]}))
        return
    rows = [
        {
            "figure": line.figure,
            "runs": NAMES.get(line.runs, line.runs),
            "count": str(line.count),
            "here": _figure(line.value, line.unit),
            "constant": _figure(line.constant, line.unit),
            "published": _figure(line.published, line.unit),
            "high told": ""
            if not line.high or line.recall is None
            else f"{line.recall * line.high:.0f} of {line.high}",
        }
        for line in lines
    ]
    print_rows(rows, left=("runs",), give_way=("count",))
    print_sharing(together)
    note = (
        "here: on families of models that were left out of the fit; constant: the same for a guess that looks at "
        "nothing, the median or the most frequent class of the other families; high told: how many of the runs in the "
        "high class were told to be there (recall); published: NeuSight's step times of Transformers, and GPUUtilNet's "
        "classes, on other GPUs and jobs"
    )
    print_rows([], note)


def print_sharing(lines: Sequence[SharingLine]) -> None:
    """Print the errors of the model of sharing, next to those of a guess that ignores the jobs."""
    rows = [
        {
            "figure": line.figure,
            "way": line.how,
            "sets": line.sets,
            "count": str(line.count),
            "jobs alone": line.inputs,
            "here": _figure(line.value),
            "constant": _figure(line.constant),
            "always yes": _figure(line.always_yes),
            "published": _figure(line.published),
        }
        for line in lines
    ]
    print_rows(rows, left=("way", "sets", "jobs alone"), give_way=("always yes", "published", "count"))


def print_noise_of_turns(noise: Mapping[str, float]) -> None:
    """Print how exact the measured slowdowns are of sets that were read in turns."""
    for how, share in noise.items():
        print(f"{how}: drawn again from the turns they were read in, measured slowdowns move by {share:.1%}")


def _figure(value: float | None, unit: str = "%") -> str:
    if value is None:
        return ""
    return f"{value:.1f} points" if unit == "points" else f"{value:.1%}"


def share_of_one(value: float | None) -> str:
    """Return a share from 0 to 1, with three decimal places.

    >>> share_of_one(0.5), share_of_one(None)
    ('0.500', '-')
    """
    return "-" if value is None else f"{value:.3f}"
