"""The ranking as one HTML page that needs no network and no script: tables and plots, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.measure.protocol import MENDED, PUBLISHED
from ullage.measure.ranking import Errors, Rounds, Standing, rank
from ullage.measure.ranking_plots import errors_by_family, predicted_against_true, time_against_error
from ullage.measure.ranking_worker import Record
from ullage.measure.truth import TruthSet
from ullage.units import MIB, format_bytes, format_duration

_MARK = "<!--BODY-->"
_HEADS = (
    ("estimator", ""),
    ("asked", "runs that it was asked about"),
    ("given", "share of them with an estimate; what is not supported counts here and not as an error"),
    ("median", "median relative error against the memory of the process, what nvidia-smi shows"),
    ("mean", "mean relative error against the same"),
    ("bias", "median error with its sign"),
    ("too low", "share of underestimates"),
    ("own figure", "what the estimator's figure stands for"),
    ("own median", "median error against that figure"),
    ("PEF", "probability of estimation failure, mended protocol"),
    ("MCP", "memory conserved a run, mended protocol"),
    ("PEF xMem", "as published"),
    ("MCP xMem", "as published"),
    ("time", "median time of the whole pipeline"),
    ("95 %", "time that 19 in 20 stay below"),
    ("CPU", "median processor time, which other work on the machine does not lengthen"),
)


def write(ranked: Sequence[tuple[TruthSet, list[Record]]], path: Path) -> None:
    """Write the page of one ranking or of several.

    >>> write([(truth, records)], Path("out.html"))      # doctest: +SKIP
    """
    try:
        path.write_text(page(ranked), encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write the report to {path}: {error.strerror}") from None


def page(ranked: Sequence[tuple[TruthSet, list[Record]]]) -> str:
    """The page as text."""
    template = files("ullage.measure").joinpath("ranking.html").read_text(encoding="utf-8")
    return template.replace(_MARK, "\n".join(_section(truth, records) for truth, records in ranked))


def _section(truth: TruthSet, asked: list[Record]) -> str:
    records = [*asked, *truth.published]
    standings = rank(truth, records)
    families = sorted({family for one in standings for family in one.families})
    plots = "".join(
        f'<figure><figcaption>{escape(family)}</figcaption><div class="scroll">{errors_by_family(standings, family)}'
        "</div></figure>"
        for family in families
    )
    return f"""<section data-truth="{escape(truth.name)}">
<h2>{escape(truth.name)} <small>{escape(truth.gpu)}, {len(truth.runs)} runs</small></h2>
{_said(truth)}
<div class="card"><div class="scroll">{_table(standings)}</div></div>
<div class="card"><h3>Error by family <small>dot: median; line: to the error that nine in ten stay below; against the
memory of the process</small></h3><div class="many">{plots}</div></div>
<div class="card"><h3>Predicted against measured <small>a dot a run, memory of the process; below the line is too low;
what lies beyond an axis is drawn at its end</small></h3>
<div class="many">{_scatters(truth, records, standings)}</div></div>
<div class="card"><h3>Time against error <small>lower left is better</small></h3>
<div class="scroll">{time_against_error(standings)}</div></div>
{_reasons(standings)}
</section>"""


def _said(truth: TruthSet) -> str:
    lines = [f"{count} runs left out: {reason}" for reason, count in truth.left_out.items()] + truth.notes
    ooms = sum(run.oom for run in truth.runs)
    if ooms:
        lines.insert(0, f"{ooms} runs ran out of memory: they are in the protocol and in no error")
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(standings: Sequence[Standing]) -> str:
    heads = "".join(f'<th title="{escape(told)}">{name}</th>' for name, told in _HEADS)
    rows = "".join(_row(one) for one in standings)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row(one: Standing) -> str:
    cells = [
        one.estimator, str(one.asked), f"{one.coverage:.0%}", *_errors(one.process), one.kind or "–",
        f"{one.own.median:.2%}" if one.own else "–", *_rounds(one.rounds[MENDED]), *_rounds(one.rounds[PUBLISHED]),
        *("–" if t is None else format_duration(t) for t in (one.seconds, one.seconds_p95, one.cpu_seconds)),
    ]  # fmt: skip
    kind = "ours" if one.estimator.startswith("ullage") else "peer"
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _errors(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return ("–",) * 4
    return f"{errors.median:.2%}", f"{errors.mean:.2%}", f"{errors.bias:+.2%}", f"{errors.under:.0%}"


def _rounds(rounds: Rounds | None) -> tuple[str, str]:
    return ("–", "–") if rounds is None else (f"{rounds.failure:.1%}", format_bytes(round(rounds.conserved)))


def _scatters(truth: TruthSet, records: Sequence[Record], standings: Sequence[Standing]) -> str:
    runs = {run.id: run for run in truth.runs if run.process and not run.oom}
    true = [run.process for run in runs.values() if run.process]
    if not true:
        return ""
    low, high = max(min(true) // 2, MIB), max(true) * 2
    plots = []
    for name in (one.estimator for one in standings):
        points = [
            (record.process if record.process is not None else record.figure, runs[record.run].process or 0, record.run)
            for record in records
            if record.estimator == name and record.figure is not None and record.run in runs
        ]
        if points:
            drawn = [(figure, measured, run) for figure, measured, run in points if figure is not None]
            plots.append(
                f"<figure><figcaption>{escape(name)}</figcaption>{predicted_against_true(name, drawn, low, high)}"
                "</figure>"
            )
    return "".join(plots)


def _reasons(standings: Sequence[Standing]) -> str:
    rows = [
        f"<tr><td>{escape(one.estimator)}</td><td>{count}</td><td>{escape(reason)}</td></tr>"
        for one in standings
        for reason, count in one.reasons.items()
        if not one.estimator.endswith("(upper)")
    ]
    if not rows:
        return ""
    return (
        '<div class="card"><h3>No estimate, and why</h3><div class="scroll"><table class="words"><thead><tr>'
        f"<th>estimator</th><th>runs</th><th>reason</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )
