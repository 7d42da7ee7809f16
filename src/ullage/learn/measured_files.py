"""Reads files of measured runs and joins what belongs to one run: its memory and its utilisation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ullage.errors import UllageError, UnknownName
from ullage.gpus import gpu
from ullage.learn.drop_reasons import DUPLICATE, NO_RUN, Report, context, trouble
from ullage.workload.configuration import Configuration, read_rows

_FIELDS = tuple(spec.name for spec in fields(Configuration))


@dataclass
class Line:
    """A measured line, the file's word on the GPU and the versions, and the file's name."""

    row: dict[str, Any]
    header: dict[str, Any]
    source: str

    @property
    def id(self) -> str:
        """As the line says; a line without one has none."""
        return str(self.row.get("id", "?"))


@dataclass
class Run:
    """One training run: the line whose memory counts, and one with utilisation if that was read."""

    id: str
    configuration: str
    memory: Line
    utilization: Line | None = None

    @property
    def lines(self) -> list[Line]:
        """The lines that the run is made of: one, or two."""
        apart = self.utilization is not None and self.utilization is not self.memory
        return [self.memory, self.utilization] if apart and self.utilization else [self.memory]


def canonical(row: dict[str, Any]) -> str:
    """The part of a line that says what was trained, as JSON; equal for equal runs.

    >>> canonical({"id": "a", "model": "mlp:x", "opt": "sgd", "batch": 2, "widths": [8, 4], "seq": None})
    '{"model":"mlp:x","batch":2,"opt":"sgd","widths":[8,4]}'
    """
    known = {name: row[name] for name in _FIELDS if row.get(name) is not None}
    return json.dumps(known, separators=(",", ":"))


def read_measured(files: Sequence[Path], report: Report) -> list[Run]:
    """The runs of these files; lines that cannot be used are noted in the report."""
    groups: dict[tuple[str, str | None, str | None], list[Line]] = {}
    for file in files:
        header: dict[str, Any] = {}
        report.files.append(str(file))
        for row in read_rows(file):
            if "header" in row:
                header = row["header"] | {"gpu": gpu_name(row["header"].get("gpu"))}
                continue
            report.read += 1
            line = Line(row, header, file.name)
            wrong = _no_run(row)
            if wrong is not None:
                report.drop(line.id, NO_RUN, wrong, line.source)
                continue
            key = (canonical(row), header.get("gpu"), header.get("torch"))
            groups.setdefault(key, []).append(line)
    runs = [run for key, lines in groups.items() if (run := _joined(key[0], lines, report)) is not None]
    _rename(runs, report)
    _lend_contexts(runs, report)
    return runs


def gpu_name(name: str | None) -> str | None:
    """The catalogue's name of a GPU, or the name as it is where the catalogue has none.

    >>> gpu_name("NVIDIA H200"), gpu_name("Voodoo 2")
    ('H200', 'Voodoo 2')
    """
    if name is None:
        return None
    try:
        return gpu(name).name
    except UnknownName:
        return name


def _no_run(row: dict[str, Any]) -> str | None:
    try:
        Configuration.from_row(row)
    except UllageError as error:
        return str(error).splitlines()[0]
    return None


def _joined(configuration: str, lines: list[Line], report: Report) -> Run | None:
    """The run of lines with the same configuration; the first usable line of each kind counts."""
    chosen: dict[str, Line] = {}
    for line in lines:
        wrong = trouble(line.row, line.header.get("memory"))
        kind = str(line.row.get("pass") or "memory")
        if wrong is not None:
            report.drop(line.id, *wrong, line.source)
        elif kind in chosen:
            report.drop(line.id, DUPLICATE, f"of {chosen[kind].id}", line.source)
        else:
            chosen[kind] = line
    main = chosen.get("memory") or chosen.get("utilization")
    return None if main is None else Run(main.id, configuration, main, chosen.get("utilization"))


def _rename(runs: list[Run], report: Report) -> None:
    """Give runs of different sets that have the same id ids of their own."""
    seen: set[tuple[str, Any, Any]] = set()
    for run in runs:
        number, name = 1, run.id
        header = run.memory.header
        while (run.id, header.get("gpu"), header.get("torch")) in seen:
            number += 1
            run.id = f"{name}+{number}"
        seen.add((run.id, header.get("gpu"), header.get("torch")))
        report.renamed += number > 1


def _lend_contexts(runs: list[Run], report: Report) -> None:
    """Runs that shared a process have no context of their own: they get the one that most of their like had."""
    found: dict[tuple[Any, ...], Counter[int]] = {}
    for run in runs:
        own = context(run.memory.row)
        if own is not None:
            found.setdefault(_kind(run), Counter())[own] += 1
    for run in runs:
        row = run.memory.row
        if "in_bundle" in row and context(row) is None and _kind(run) in found:
            row["lent_context"] = found[_kind(run)].most_common(1)[0][0]
            report.lent += 1


def _kind(run: Run) -> tuple[Any, ...]:
    """Runs of one kind load the same libraries."""
    row, header = run.memory.row, run.memory.header
    return header.get("gpu"), header.get("torch"), row.get("family"), row.get("precision")
