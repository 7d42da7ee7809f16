"""The project's own format of traces, as CSV and JSON; see docs/reference/traces.md.

CSV has a known workload or the memory of each job; JSON also has the activity of kinds of jobs, so it loses nothing.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError, UnknownName, nearest
from ullage.manager.simulation.assignment import TraceFormat
from ullage.manager.simulation.formats.files import TraceRow, first_row, head, opened, read_json, table
from ullage.manager.simulation.known import known_workload, known_workloads
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.performance.result import Utilization
from ullage.units import parse_bytes

COLUMNS = ("id", "arrival", "user", "kind", "memory", "gpus", "work_s", "priority", "time_limit")
_ESTIMATE = "estimate_"
_NO_ANSWER = "-"


def _recognises(text: str) -> bool:
    if _is_json(text):
        return '"ullage_trace"' in text or '"arrival"' in text and '"work_s"' in text
    return {"arrival", "work_s"} <= set(first_row(text))


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def write_trace(trace: JobTrace, path: str | Path) -> None:
    """Write a trace as CSV or JSON, by the name of the file (.csv, .json, .csv.gz, .json.gz), which must not exist. CSV
    has no activity of kinds on GPUs, so only that of known workloads survives."""
    path = Path(path)
    suffixes = path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]
    lines = {".csv": _csv_lines, ".json": _json_lines}.get(suffixes[0] if suffixes else "")
    if lines is None:
        raise InvalidValue(f"the file name must end in .csv, .json, .csv.gz or .json.gz, got {path.name!r}")
    opener = gzip.open if path.suffix == ".gz" else open
    made = False
    try:
        with opener(path, "xt", encoding="utf-8", newline="") as file:
            made = True
            file.writelines(lines(trace))
    except FileExistsError:
        raise InvalidValue(f"{path} already exists; name another file") from None
    except OSError as error:
        if made:
            path.unlink()
        raise InvalidValue(f"cannot write {path}: {error.strerror}") from None


# CSV.


def _read_csv(path: Path) -> JobTrace:
    with opened(path) as file:
        names = first_row(file.readline())
    for name in names:
        if name not in COLUMNS and not name.startswith(_ESTIMATE):
            near = nearest(name, COLUMNS)
            advice = (
                f"; did you mean {near[0]}?" if near else f"; the columns are {', '.join(COLUMNS)} and estimate_NAME"
            )
            raise InvalidValue(f"{path}, line 1: there is no column {name!r}{advice}")
    estimators = {name.removeprefix(_ESTIMATE): name for name in names if name.startswith(_ESTIMATE)}
    kinds: dict[tuple[object, ...], JobKind] = {}
    rows = table(path, ("arrival", "work_s"))
    return JobTrace(path.name, _jobs((row, _kind(row, estimators, kinds)) for row in rows))


def _jobs(rows: Iterable[tuple[TraceRow, JobKind]]) -> list[TraceJob]:
    jobs: list[TraceJob] = []
    seen: set[int] = set()
    dated = None
    for row, kind in rows:
        if dated not in (None, row.is_dated("arrival")):
            raise row.wrong("arrivals must all be seconds, or all be dates and times, got both")
        dated = row.is_dated("arrival")
        job = _job(row, len(jobs) + 1, kind)
        if job.id in seen:
            raise row.wrong(f"id must be a unique number, but another job has {job.id}")
        seen.add(job.id)
        jobs.append(job)
    if not dated:
        return jobs
    first = min(job.arrival for job in jobs)
    return [replace(job, arrival=job.arrival - first) for job in jobs]


def _job(row: TraceRow, number: int, kind: JobKind) -> TraceJob:
    try:
        return TraceJob(
            id=row.whole("id", number),
            arrival=row.moment("arrival"),
            kind=kind,
            work_s=row.seconds("work_s"),
            gpus=row.whole("gpus", 1),
            user=row.text("user", "user"),
            priority=row.whole("priority", 0),
            time_limit=row.seconds("time_limit") if row.has("time_limit") else None,
        )
    except InvalidValue as error:
        raise error if str(error).startswith(row.where) else row.wrong(str(error)) from None


def _kind(row: TraceRow, estimators: Mapping[str, str], kinds: dict[tuple[object, ...], JobKind]) -> JobKind:
    """Return the kind of a row: a known workload, perhaps with other memory and estimates, or memory only."""
    key = (row.text("kind", ""), row.text("memory", ""), *(row.text(column, "") for column in estimators.values()))
    kind = kinds.get(key)
    if kind is None:
        name = row.text("kind", "")
        if not name and not row.has("memory"):
            raise row.wrong("kind or memory must have a value, but both are empty")
        if not row.has("memory"):
            try:
                known = known_workload(name).kind
            except UnknownName as error:
                raise row.wrong(f"{error}; for a kind of your own, give its memory") from None
        else:
            memory = row.bytes("memory")
            likely = known_workloads().get(name)
            base = likely.kind if likely is not None else JobKind(name or f"{row.text('memory')} job", memory)
            known = replace(base, memory=memory)
        given = {
            name: None if row.text(column) == _NO_ANSWER else row.bytes(column)
            for name, column in estimators.items()
            if row.has(column)
        }
        kind = kinds[key] = replace(known, estimates={**known.estimates, **given}) if given else known
    return kind


def _csv_lines(trace: JobTrace) -> Iterator[str]:
    estimators = sorted({name for kind in trace.kinds for name in kind.estimates})
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")

    def written(cells: Iterable[object]) -> str:
        line.seek(0)
        line.truncate()
        writer.writerow(cells)
        return line.getvalue()

    yield written([*COLUMNS, *(_ESTIMATE + name for name in estimators)])
    for job in trace.jobs:
        sizes = [job.kind.estimates.get(name, "") for name in estimators]
        promises = [_NO_ANSWER if size is None else size for size in sizes]
        row = [job.id, job.arrival, job.user, job.kind.name, job.kind.memory, job.gpus, job.work_s, job.priority]
        yield written([*row, "" if job.time_limit is None else job.time_limit, *promises])


# JSON.


def _json_lines(trace: JobTrace) -> Iterator[str]:
    names = _names(trace.kinds)
    kinds = {}
    for kind in trace.kinds:
        alone = {gpu: utilization.to_dict() for gpu, utilization in kind.alone.items()}
        kinds[names[id(kind)]] = {
            "name": kind.name,
            "memory": kind.memory,
            "estimates": dict(kind.estimates),
            "alone": alone,
        }
    jobs = [
        {name: getattr(job, name) for name in COLUMNS if name != "memory"} | {"kind": names[id(job.kind)]}
        for job in trace.jobs
    ]
    yield json.dumps({"ullage_trace": 1, "name": trace.name, "notes": list(trace.notes), "kinds": kinds, "jobs": jobs})


def _names(kinds: Sequence[JobKind]) -> dict[int, str]:
    taken: dict[str, int] = {}
    names = {}
    for kind in kinds:
        count = taken[kind.name] = taken.get(kind.name, 0) + 1
        names[id(kind)] = kind.name if count == 1 else f"{kind.name} ({count})"
    return names


def _read_json(path: Path) -> JobTrace:
    content = read_json(path)
    content = {"jobs": content} if isinstance(content, list) else content
    if not isinstance(content.get("jobs"), list) or not isinstance(content.get("kinds", {}), dict):
        raise InvalidValue(f'{path} must be a list of jobs, or an object with "jobs", a list, and "kinds", an object')
    kinds = {name: _kind_from(path, name, values) for name, values in content.get("kinds", {}).items()}
    jobs = _jobs(_row_from(path, number, values, kinds) for number, values in enumerate(content["jobs"], 1))
    return JobTrace(str(content.get("name", path.name)), jobs, [str(note) for note in content.get("notes", [])])


def _kind_from(path: Path, name: str, values: Any) -> JobKind:
    try:
        alone = {gpu: Utilization.from_dict(figures) for gpu, figures in values.get("alone", {}).items()}
        sizes = values.get("estimates", {}).items()
        estimates = {by: None if size is None else parse_bytes(size) for by, size in sizes}
        return JobKind(str(values.get("name", name)), parse_bytes(values["memory"]), alone, estimates)
    except (UllageError, KeyError, TypeError, ValueError, AttributeError) as error:
        missing = " is missing" if isinstance(error, KeyError) else ""
        raise InvalidValue(f"{path}: the kind {name!r} is not one: {error}{missing}") from None


def _row_from(path: Path, number: int, values: Any, kinds: dict[str, JobKind]) -> tuple[TraceRow, JobKind]:
    where = f"{path}, job {number}"
    if not isinstance(values, dict):
        raise InvalidValue(f"{where}: a job must be an object, got {values!r}")
    cells = {name: "" if value is None else str(value) for name, value in values.items()}
    unknown = [name for name in cells if name not in COLUMNS]
    if unknown:
        raise InvalidValue(f"{where}: there is no {unknown[0]!r}; there are {', '.join(COLUMNS)}")
    row = TraceRow(where, {name: place for place, name in enumerate(cells)}, list(cells.values()))
    name = " ".join(filter(None, [cells.get("kind"), cells.get("memory")]))
    if name not in kinds:
        kinds[name] = _kind(row, {}, {})
    return row, kinds[name]


OWN = TraceFormat(
    "ullage",
    "Ullage's own form, CSV or JSON (arrival, kind or memory, gpus, work_s)",
    _recognises,
    lambda path, assignment: _read_json(path) if _is_json(head(path)) else _read_csv(path),
)
