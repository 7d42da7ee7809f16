"""The data of the rates' fit: timed operator calls, and whole runs with the work of their step."""

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model, read_rows, rows_so_far
from ullage.performance.alone import StepWork, host_word
from ullage.performance.rates import SHARES, measured_gpu
from ullage.performance.step import StepCalls, runs_kernels
from ullage.performance.work import Work, work_of
from ullage_lab.calls import identity, packed, unpacked
from ullage_lab.clean.families import family_of, is_for_testing
from ullage_lab.following import step_of

Notify = Callable[[str], None]
_MEASURED = ("graph", "loop")
_NOTHING_US = 0.5  # shorter than any kernel: nothing ran, such as for empty lists of tensors
_LEAST_SMACT = 0.25  # of a call whose SMOCC over SMACT is used
READ = ("step_seconds", "gract", "smact", "smocc", "drama", "power_w")
_FEW, _USUAL_CALL, _PROFILED = 5, 1e-5, 3.0
_WARPS, _BLOCKS, _REGISTERS, _SHARED, _RESERVED = 64, 32, 65536, 233_472, 1024  # of an SM of the H200; bytes of a block
_OF_PROFILES = ("calls", "kernels", "names", "shapes", "launches")


@dataclass(frozen=True)
class MeasuredCall:
    """An operator call, and the seconds that the GPU works on it; `warps` is SMOCC over SMACT, if known."""

    work: Work
    seconds: float
    warps: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """A training run that was read alone: its family, the machine, and the figures."""

    id: str
    family: str
    kind: str
    is_test: bool
    machine: str
    step_s: float
    gpu_s: float
    host_s: float | None
    shares: Mapping[str, float]
    power_w: float
    compiled: bool = False
    host_passes: tuple[float, float] | None = None  # of host_s, until the backward pass, and that pass


@dataclass(frozen=True, kw_only=True)
class FollowedRun(ReadRun):
    """A training run that was read alone, with the work of its step."""

    work: StepWork


def read_calls(paths: Iterable[Path]) -> list[MeasuredCall]:
    """Read the calls of files of `ullage lab measure calls`; the last timing of a call counts.

    Machines differ by what passes between two calls of a graph. The first line of a file may say by how much it is
    `shorter_us` there than elsewhere, and that is added.
    """
    calls: dict[str, MeasuredCall] = {}
    for path in paths:
        shorter = 0.0
        for row in read_rows(path):
            shorter = row.get("shorter_us", shorter)
            if row.get("how") in _MEASURED and row.get("gpu_us", 0.0) > _NOTHING_US and "call" in row:
                work = work_of(unpacked(row["call"]))
                if work.kind != "transfer":
                    calls[row["id"]] = MeasuredCall(work, 1e-6 * (row["gpu_us"] + shorter), _warps(row))
    if not calls:
        raise InvalidValue(f"there are no operator calls with times in {', '.join(map(str, paths))}")
    return list(calls.values())


def _warps(row: Mapping[str, Any]) -> float | None:
    """Return SMOCC over SMACT: if counters were read too early, both are too low by the same factor."""
    read = row.get("activity", {})
    return min(1.0, read["smocc"] / read["smact"]) if read.get("smact", 0.0) > _LEAST_SMACT else None


def calls_in_steps(profiles: Path, steps: Mapping[str, StepCalls]) -> list[MeasuredCall]:
    """Return the calls of profiled steps (`ullage lab measure steps`), if both have as many calls of an operator.

    Steps of families for testing are left out.
    """
    times: dict[str, list[float]] = {}
    warps: dict[str, list[float]] = {}
    calls: dict[str, Mapping[str, Any]] = {}
    for row in read_rows(profiles):
        step = steps.get(str(row.get("id")))
        if step is None or "failed" in row or is_for_testing(family_of(row).name):
            continue
        for name, several in _profiled(row).items():
            made = [call for call in step if _word(call) == name]
            for call, (taken, resident) in zip(made, several, strict=False) if len(made) == len(several) else ():
                if taken > 0 and runs_kernels(call):
                    key = identity(call)
                    calls[key] = call
                    times.setdefault(key, []).append(taken)
                    if resident is not None:
                        warps.setdefault(key, []).append(resident)
    works = (
        (work_of(call), _middle(times[key]), _middle(warps[key]) if key in warps else None)
        for key, call in calls.items()
    )
    return [MeasuredCall(*of_call) for of_call in works if of_call[0].kind != "transfer"]


def calls_on_host(rates: Iterable[Path], profiles: Path | None) -> dict[str, float]:
    """Return the host's seconds for a single call of each operator, named by `host_name`.

    Single calls were timed in both passes alike (`ullage lab measure calls`). A profile knows the pass, but makes calls
    `_PROFILED` times as long; families for testing are left out. Where both know an operator, the middle of both. A
    profile does not tell convolutions with groups from others: by how much these differ, single calls say. Other
    operators are named by the pass alone.
    """
    single, profiled = _timed_on_host(rates), _profiled_on_host(profiles)
    by_call = {"forward": _USUAL_CALL, "backward": _USUAL_CALL}
    for operator in {word.partition(" ")[0] for word in single} | {name.partition(" ")[2] for name in profiled}:
        for which, other in (("forward", "backward"), ("backward", "forward")):
            seen = profiled.get(f"{which} {operator}", profiled.get(f"{other} {operator}"))
            known = [one for one in (single.get(operator), seen) if one is not None]
            if known:
                by_call[f"{which} {operator}"] = sum(known) / len(known)
    for word, seconds in single.items():
        operator, _, kind = word.partition(" ")
        for which in ("forward", "backward") if kind else ():
            whole = by_call.get(f"{which} {operator}", seconds)
            by_call[f"{which} {word}"] = seconds / single.get(operator, whole) * whole
    return by_call


def _timed_on_host(rates: Iterable[Path]) -> dict[str, float]:
    """By `host_word`, of the machine with most calls; other machines count as well, as much faster as they are."""
    by_machine: dict[str, dict[str, list[float]]] = {}
    for path in rates:
        machine = ""
        for row in read_rows(path):
            machine = str(row.get("machine", {}).get("uuid", "")) or machine
            if "host_us" in row:
                word = host_word(unpacked(row["call"]) if "call" in row else row)
                by_machine.setdefault(machine, {}).setdefault(word, []).append(1e-6 * row["host_us"])
    several = sorted(by_machine.values(), key=lambda one: -sum(map(len, one.values())))
    times: dict[str, list[float]] = {}
    for one in several:
        shared = [_middle(times[word]) / _middle(taken) for word, taken in one.items() if word in times]
        factor = _middle(shared) if shared else 1.0
        for word, taken in one.items():
            times.setdefault(word, []).extend(factor * seconds for seconds in taken)
    return {word: _middle(taken) for word, taken in times.items()}


def _profiled_on_host(profiles: Path | None) -> dict[str, float]:
    taken: dict[str, list[float]] = {}
    for row in [] if profiles is None else read_rows(profiles):
        if "names" not in row or is_for_testing(family_of(row).name):
            continue
        calls = row["calls"]
        for number, nanoseconds, thread in zip(calls["name"], calls["taken"], calls["thread"], strict=True):
            name = f"{'backward' if thread else 'forward'} {row['names'][number].partition('::')[2]}"
            taken.setdefault(name, []).append(1e-9 * nanoseconds / _PROFILED)
    return {name: _middle(several) for name, several in taken.items() if len(several) >= _FEW}


def _middle(several: Sequence[float]) -> float:
    return sorted(several)[len(several) // 2]


def _word(call: Mapping[str, Any]) -> str:
    space, name, *_ = str(call["operator"]).split(".")
    return f"{space}::{name}"


def _profiled(row: Mapping[str, Any]) -> dict[str, list[tuple[float, float | None]]]:
    """Seconds on the GPU of each call of a profile, and `resident_warps` meanwhile, by operator, in their order."""
    names, kernels, called = row["names"], row["kernels"], row["calls"]["name"]
    on_gpu, launched, warps = ([0.0] * len(called) for _ in range(3))
    for place, name, launch, taken in zip(*(kernels[key] for key in ("call", "name", "launch", "taken")), strict=True):
        if place >= 0 and "HtoD" not in names[name]:
            on_gpu[place] += 1e-9 * taken
            grid, *limits = row["launches"][launch][:4]
            if grid:  # a copy has none
                launched[place] += taken
                warps[place] += taken * resident_warps(grid, *limits)
    by_operator: dict[str, list[tuple[float, float | None]]] = {}
    for number, taken, whole, weighted in zip(called, on_gpu, launched, warps, strict=True):
        by_operator.setdefault(names[number], []).append((taken, weighted / whole if whole else None))
    return by_operator


def resident_warps(grid: Sequence[int], block: Sequence[int], registers: int | None, shared: int | None) -> float:
    """Return the share of an SM's warps that a kernel occupies, by its launch.

    Registers and shared memory limit the blocks of an SM, and a small grid has at most one for each.

    >>> resident_warps([4096, 1, 1], [256, 1, 1], 128, 0), resident_warps([64, 1, 1], [256, 1, 1], 32, 0)
    (0.25, 0.125)
    """
    warps = -(-math.prod(block) // 32)
    in_registers = _REGISTERS // (-(-(registers or 16) * 32 // 256) * 256 * warps)
    most = min(_BLOCKS, _WARPS // warps, in_registers, _SHARED // ((shared or 0) + _RESERVED))
    return min(1.0, min(max(1, most), -(-math.prod(grid) // (measured_gpu().sms or 1))) * warps / _WARPS)


# Runs. Following a thousand of them takes half an hour, so their steps are kept in a file.


def read_alone(rows: Sequence[Mapping[str, Any]]) -> list[ReadRun]:
    runs = []
    for row in rows:
        if any(row.get(name) is None for name in READ) or not row["gract"]:
            continue
        configuration = _configuration(row)
        family = family_of({**configuration, "arch": row["arch"]})
        busy, step_s = min(1.0, float(row["gract"])), float(row["step_seconds"])
        runs.append(
            ReadRun(
                id=str(row["id"]),
                family=family.name,
                kind=family.kind,
                is_test=is_for_testing(family.name),
                machine=str(row.get("machine")),
                step_s=step_s,
                gpu_s=busy * step_s,
                host_s=row.get("host_seconds"),
                power_w=float(row["power_w"]),
                compiled=bool(configuration.get("compiled")),
                shares={name: float(row[name]) for name in SHARES if row.get(name) is not None},
                host_passes=_passes(row),
            )
        )
    if not runs:
        raise InvalidValue("there are no rows that 'ullage lab measure dataset --utilization' read")
    return runs


def _passes(row: Mapping[str, Any]) -> tuple[float, float] | None:
    passes = row.get("host_forward"), row.get("host_backward")
    return None if passes[0] is None or passes[1] is None else (float(passes[0]), float(passes[1]))


def with_work(runs: Sequence[ReadRun], steps: Mapping[str, StepCalls]) -> list[FollowedRun]:
    return [FollowedRun(**vars(run), work=StepWork.of(steps[run.id])) for run in runs if run.id in steps]


def _configuration(row: Mapping[str, Any]) -> dict[str, Any]:
    configuration: dict[str, Any] = json.loads(row["configuration"])
    return configuration | {"model": Model.from_row(configuration).name}


def configurations(rows: Sequence[Mapping[str, Any]], runs: Sequence[ReadRun]) -> list[dict[str, Any]]:
    wanted = {run.id for run in runs}
    return [{**json.loads(row["configuration"]), "id": row["id"]} for row in rows if row["id"] in wanted]


def profiled_runs(profiles: Path) -> list[dict[str, Any]]:
    rows = (row for row in read_rows(profiles) if "names" in row)
    return [{key: value for key, value in row.items() if key not in _OF_PROFILES} for row in rows]


def follow(
    configurations: Sequence[Mapping[str, Any]], cache: Path | None, notify: Notify = lambda _: None
) -> dict[str, StepCalls]:
    """Return the steps of runs by id; those that the file `cache` lacks are followed now, and added to it."""
    steps = {} if cache is None else _cached_steps(cache)
    for row in configurations:
        name = str(row["id"])
        if name not in steps:
            try:
                steps[name] = step_of(JobRequest(Model.from_row({**row})))
            except (UllageError, ImportError, MemoryError):
                continue
            if cache is not None:
                with _appending(cache) as file:
                    file.write(json.dumps({"id": name, "step": _packed(steps[name])}) + "\n")
        notify(name)
    return steps


def _cached_steps(file: Path) -> dict[str, StepCalls]:
    """Return the steps of a file to which more are added; a file of another kind stays unchanged."""
    rows = rows_so_far(file)
    if any("id" not in row or "step" not in row for row in rows):
        raise InvalidValue(f"{file} is not a file of followed steps, and was left as it is: name another one")
    return {str(row["id"]): _unpacked(row["step"]) for row in rows}


def _appending(file: Path) -> TextIO:
    try:
        return gzip.open(file, "at") if file.suffix == ".gz" else file.open("a")
    except OSError as error:
        raise InvalidValue(f"cannot write {file}: {error.strerror}") from None


def _packed(step: StepCalls) -> dict[str, Any]:
    return {**step.to_dict(), "calls": [packed(call) for call in step.calls]}


def _unpacked(values: Mapping[str, Any]) -> StepCalls:
    return StepCalls(**{**values, "calls": [unpacked(call) for call in values["calls"]]})
