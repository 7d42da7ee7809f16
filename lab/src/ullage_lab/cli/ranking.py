"""`ullage lab evaluate --estimators`: runs all estimators, and shows the ranking as tables, JSON or a page."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from ullage.cli import completion
from ullage.cli.measured_files import check_file
from ullage.cli.options import ALL, Json, MeasuredGpu, option
from ullage.cli.progress import Following, following
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue
from ullage.units import parse_duration
from ullage.virtual.releases import refuse_if_unserved

if TYPE_CHECKING:
    from ullage_lab.judge.standings import Standing
    from ullage_lab.judge.truth import TruthSet
    from ullage_lab.judge.worker import Record

RANKING = "Ranking (with --truth)"
_GIVE_WAY = ("MCP xMem", "PEF xMem", "own low", "own median", "own figure", "CPU", "95%", "bias", "MCP", "mean", "PEF")


@dataclass(frozen=True, kw_only=True)
class RankingPlan:
    """What to rank, as options of a command."""

    truth: Annotated[
        Path | None, option("Measured runs: JSONL, a data set (Parquet), or an A100 table.", "FILE", panel=RANKING)
    ] = None
    gpu: MeasuredGpu = None
    every: Annotated[int, option("Use only every Nth run.", "N", min=1, panel=RANKING)] = 1
    estimators: Annotated[
        str,
        option(
            "The estimators to rank: 'all', or names separated by commas.",
            "all|A,B,C",
            panel=RANKING,
            complete=completion.several_estimators,
        ),
    ] = "all"
    sample: Annotated[
        list[str] | None,
        option("Use a fixed sample of N runs; NAME=N for one estimator. Can be repeated.", "N|NAME=N", panel=RANKING),
    ] = None
    timeout: Annotated[
        str, option("Give up on an estimate after this long, such as 90s or 10m.", "TIME", panel=RANKING)
    ] = "2m"
    resume: Annotated[
        Path | None,
        option("Keep answers in this file; answers already in it are not computed again.", "FILE.jsonl", panel=RANKING),
    ] = None
    report: Annotated[Path | None, option("Write the ranking as one HTML page.", "FILE.html", panel=RANKING)] = None
    cached_only: Annotated[
        bool, option("Rank only the answers already in the --resume file.", "--cached-only", panel=RANKING)
    ] = False
    workers: Annotated[
        int,
        option("Maximum number of concurrent estimates. Above 1, times are less reliable.", "N", min=1, panel=RANKING),
    ] = 1
    as_json: Json = False


def estimator_list(text: str) -> list[str]:
    """Return the estimators that "all" or a comma-separated list names, each once."""
    from ullage.estimation.estimators.registry import estimators, find

    refuse_if_unserved()
    if text.strip().casefold() == ALL:
        return [name for name in estimators() if name != "gpuutilnet"]  # it knows no memory
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidValue(f"estimators must be 'all' or names separated by commas, got {text!r}")
    return [find(name).name for name in names]


def rank_estimators(plan: RankingPlan) -> None:
    assert plan.truth is not None
    from ullage_lab.judge.truth import read_truth

    for file in (plan.resume, plan.report):
        check_file(file)
    names = estimator_list(plan.estimators)
    counts = sample_counts(names, plan.sample or [])
    sets = [replace(one, runs=one.runs[:: plan.every]) for one in read_truth(plan.truth, plan.gpu)]
    records, going = _ask(plan, sets, counts)
    ranked = [(one, [record for record in records if record.gpu == one.gpu]) for one in sets]
    if plan.report is not None:
        from ullage_lab.judge.page import write

        write(ranked, plan.report)
    if plan.as_json:
        from ullage_lab.judge.standings import as_dict

        print(json.dumps([as_dict(one, standings) for one, standings in ranked]))
    elif records:
        for one, standings in ranked:
            print_ranking(one, standings)
    going.end()


def sample_counts(names: list[str], samples: list[str]) -> dict[str, int | None]:
    """Return the number of runs for each estimator; `None` means all.

    >>> sample_counts(["ullage", "xmem"], ["300", "xmem=40"])
    {'ullage': 300, 'xmem': 40}
    """
    counts: dict[str, int | None] = dict.fromkeys(names)
    for text in sorted(samples, key=lambda text: "=" in text):  # the count for all estimators comes first, in any order
        name, equals, number = text.rpartition("=")
        if not number.strip().isdigit() or not int(number):
            raise InvalidValue(
                f"--sample must be a number such as 300, or an estimator's such as xmem=40, got {text!r}"
            )
        if equals and name not in counts:
            raise InvalidValue(f"--sample: {name!r} is not among the estimators that are ranked: {', '.join(names)}")
        counts |= {name: int(number)} if equals else dict.fromkeys(names, int(number))
    return counts


def _ask(plan: RankingPlan, sets: list[TruthSet], counts: dict[str, int | None]) -> tuple[list[Record], Following]:
    from ullage.estimation.asking import ask
    from ullage_lab.judge.questions import answers, questions, read_answers

    wanted = questions(sets, counts)
    if plan.cached_only and plan.resume is not None:
        known = read_answers(plan.resume)
        wanted = [question for question in wanted if question.key in known]
    given = answers(wanted, ask, limit=parse_duration(plan.timeout), file=plan.resume, workers=plan.workers)
    records: list[Record] = []
    with following("asking", len(wanted), stoppable=True) as going, closing(given):
        for question, record in given:
            records.append(record)
            going.step(f"{question.estimator} {question.run.id}")
    return records, going


def print_ranking(truth: TruthSet, records: list[Record]) -> None:
    from ullage_lab.judge.standings import rank, shared_runs

    console = Console()
    console.print(f"\n[bold]{truth.name}[/] ({truth.gpu}): {len(truth.runs)} runs", highlight=False)
    ooms = sum(run.oom for run in truth.runs)
    if ooms:
        console.print(f"{ooms} of them ran out of memory: they are in the protocol and not in the errors")
    for reason, count in truth.left_out.items():
        console.print(f"left out: {count} ({reason})", highlight=False)
    for note in truth.notes:
        console.print(f"note: {note}", highlight=False)
    standings = rank(truth, [*records, *truth.published])
    print(_table(standings))
    _print_families(console, standings)
    _print_decided(console, standings)
    _print_reasons(console, standings)
    _print_shared(console, truth, records, shared_runs(records))
    _print_versions(console, records)


def _print_versions(console: Console, records: list[Record]) -> None:
    """Warn about answers from a file that are older than this code."""
    from ullage_lab.judge.questions import code_version

    old = Counter(record.estimator for record in records if record.code != code_version())
    if old:
        which = ", ".join(f"{count} of {name}" for name, count in sorted(old.items()))
        console.print(f"answers by another version of this package: {which}", highlight=False)


def _table(standings: list[Standing]) -> str:
    from ullage_lab.judge.standings import COLUMNS

    rows = [[cell(one) or "-" for _, cell in COLUMNS.values()] for one in standings]
    return fitted(list(COLUMNS), rows, give_way=(*_GIVE_WAY, "given"), left=("own figure",))


def _print_families(console: Console, standings: list[Standing]) -> None:
    families = sorted({family for one in standings for family in one.families})
    if len(families) < 2:
        return
    console.print("\nmedian error against the process's memory (share too low) by family:")
    rows = []
    for one in standings:
        errors: list[Any] = [one.families.get(family) for family in families]
        rows.append([one.estimator, *(f"{e.median:.2%} ({e.under:.0%} of {e.count})" if e else "-" for e in errors)])
    print(fitted(["estimator", *families], rows, give_way=families[:0:-1]))


def _print_decided(console: Console, standings: list[Standing]) -> None:
    """Print how the second round was decided, which differs between estimators only by coverage."""
    words = {
        "replay": "by an exact replay of the recorded history",
        "reserved": "by comparing with the reserved memory",
        "process": "by comparing with the memory of the process",
        "first round": "by the first round (said not to fit)",
    }
    decided: dict[str, list[str]] = {}
    for one in standings:
        rounds = one.rounds["mended"]
        if rounds is not None:
            texts = ", ".join(f"{rounds.by[name]} {words[name]}" for name in words if name in rounds.by)
            decided.setdefault(texts, []).append(one.estimator)
    console.print("\nsecond round decided:")
    for texts, names in decided.items():
        console.print(f"  {texts}: {', '.join(names)}", highlight=False, soft_wrap=True)


def _print_reasons(console: Console, standings: list[Standing]) -> None:
    for one in standings:
        if one.estimator.endswith("(upper)"):
            continue
        for reason, count in one.reasons.items():
            console.print(f"{one.estimator}: {count} x {reason}", highlight=False, markup=False, soft_wrap=True)


def _print_shared(console: Console, truth: TruthSet, records: list[Record], shared: set[str]) -> None:
    """Print the ranking on the runs for which all estimators have an estimate, unless these are all runs."""
    from ullage_lab.judge.standings import rank

    if not shared or len({record.estimator for record in records}) < 2 or len(shared) == len(truth.runs):
        return
    fewer = [record for record in records if record.run in shared]
    console.print(f"\nOn the {len(shared)} runs that all of them gave an estimate for:", highlight=False)
    print(_table(rank(truth, fewer)))
