"""How well the times of single operator calls add up to the GPU time of real training steps.

    python benchmarks/sums_of_rates.py --steps steps.jsonl.gz

The times are what `ullage measure rates` wrote, the steps what it wrote with `--profile`; both are in benchmarks/data.
The same steps are followed on a virtual GPU, which takes minutes, and kept in `--steps`. Where both have as many calls
of an operator, they are the same calls, in order.

The first table has calls that were measured by themselves beside the same calls in steps, by operator; the second the
sums of them by kind of run; the third the sums of all calls, where one that was not measured takes the time of the
nearest one of its operator, scaled by its bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ullage.performance.step import runs_kernels
from ullage.research.rates.listing import followed
from ullage.research.rates.tensors import bytes_of, identity, packed, unpacked
from ullage.workloads import read_rows

DATA = Path(__file__).parent / "data"
LATENCY = 4.0  # microseconds; calls that take less do not grow with their bytes
Row = dict[str, Any]


def steps_of(rows: Iterable[Row], kept: Path) -> dict[str, Row]:
    """The steps by the runs' names; those that the file lacks are followed now."""
    found = {str(row["id"]): row["step"] for row in read_rows(kept) if "step" in row} if kept.exists() else {}
    missing = [row for row in rows if str(row["id"]) not in found]
    with gzip.open(kept, "at") as file:
        for run in followed([{key: value for key, value in row.items() if key not in COLUMNS} for row in missing]):
            if "step" in run:
                run["step"]["calls"] = [packed(call) for call in run["step"]["calls"]]
                found[str(run["id"])] = run["step"]
                file.write(json.dumps(run, separators=(",", ":")) + "\n")
    return found


COLUMNS = ("calls", "kernels", "names", "shapes", "launches")


class Times:
    """Microseconds of calls: measured ones, and those of the nearest for all others."""

    def __init__(self, rows: Iterable[Row], calls: dict[str, Row]) -> None:
        self.exact: dict[str, float] = {}
        self._by_operator: dict[str, list[tuple[str, float, float, float]]] = defaultdict(list)
        for row in rows:
            if row.get("how") == "graph" and row["id"] in calls:
                self.exact[row["id"]] = row["gpu_us"]
                call = calls[row["id"]]
                self._by_operator[row["operator"]].append((*_size(call), row["gpu_us"]))

    def of(self, call: Row) -> tuple[float | None, bool]:
        """The time, and whether it was measured."""
        known = self.exact.get(identity(call))
        if known is not None:
            return known, True
        kind, given, made = _size(call)
        near = min(
            self._by_operator.get(call["operator"], ()),
            key=lambda one: abs(math.log(given / one[1])) + abs(math.log(made / one[2])) + (one[0] != kind),
            default=None,
        )
        if near is None:
            return None, False
        grown = (given + made) / (near[1] + near[2])
        return (near[3] if near[3] < LATENCY and grown < 2 else near[3] * grown), False


def _size(call: Row) -> tuple[str, float, float]:
    kinds = [value["dtype"] for value in call["outputs"] if isinstance(value, dict) and "dtype" in value]
    given = [value for value in call["args"] if value is not None]
    return (kinds or [""])[0], 1.0 + bytes_of(given), 1.0 + bytes_of(call["outputs"])


def compared(profile: Row, step: Row, times: Times) -> Row:
    """The sums of a run, in microseconds."""
    names, kernels, called = profile["names"], profile["kernels"], profile["calls"]["name"]
    on_gpu = [0.0] * len(called)
    whole = 0.0
    for place, name, taken in zip(kernels["call"], kernels["name"], kernels["taken"], strict=True):
        if "HtoD" in names[name]:
            continue  # on the bus
        whole += taken / 1000
        if place >= 0:
            on_gpu[place] += taken / 1000
    real: dict[str, list[float]] = defaultdict(list)
    for number, taken in zip(called, on_gpu, strict=True):
        real[names[number]].append(taken)
    calls = [unpacked(call) for call in step["calls"]]
    made: dict[str, list[Row]] = defaultdict(list)
    for number in step["order"]:
        space, word, _ = calls[number]["operator"].split(".")
        made[f"{space}::{word}"].append(calls[number])
    summed, alike, pairs = 0.0, 0.0, []
    for name, several in made.items():
        same = len(several) == len(real[name])
        alike += sum(real[name]) if same else 0
        for place, call in enumerate(several):
            taken_us, exact = times.of(call) if _counts(call) else (None, False)
            summed += taken_us or 0
            if taken_us is not None and exact and same and real[name][place] > 0:
                pairs.append((name, taken_us, real[name][place]))
    return {"run": profile, "real": whole, "sum": summed, "alike": alike / whole, "pairs": pairs}


def _counts(call: Row) -> bool:
    """Whether a call works on the GPU, and is no copy from the host or to it."""
    first = call["args"][0] if call["args"] else None
    ends = [first, *call["outputs"]]
    return (
        runs_kernels(call)
        and "_local_scalar" not in call["operator"]
        and not any(isinstance(value, dict) and value.get("cpu") for value in ends)
    )


def family(row: Row) -> str:
    """Where a run's model comes from."""
    source, _, name = row["model"].partition(":")
    return name if source.startswith("ullage.") else {"tv": "torchvision", "mlp": "mlp"}.get(source, source)


def by_operator(found: list[Row]) -> None:
    """Print how calls measured by themselves compare with the same calls in steps."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in found:
        for name, alone, inside in one["pairs"]:
            groups[name].append((alone, inside))
            groups["all"].append((alone, inside))
            groups["all, above 20 us" if inside > 20 else "all, below 5 us" if inside < 5 else "all, between"].append(
                (alone, inside)
            )
    print(f"{'operator':58}{'calls':>7}{'ms':>8}{'sum':>8}{'median':>8}   (sum: against that of the steps)\n")
    ordered = sorted(groups.items(), key=lambda item: (not item[0].startswith("all"), -sum(two for _, two in item[1])))
    for name, several in ordered[:40]:
        whole = sum(inside for _, inside in several)
        ratio = sum(alone for alone, _ in several) / whole - 1
        error = statistics.median(abs(alone / inside - 1) for alone, inside in several)
        print(f"{name:58}{len(several):7}{whole / 1000:8.1f}{ratio:8.1%}{error:8.1%}")


def by_run(found: list[Row], title: str, sums: Callable[[Row], tuple[float, float]]) -> None:
    """Print the errors of sums by family and precision."""
    print(f"\n{title}\n\n{'':14}{'runs':>6}{'bias':>8}{'median':>8}{'90th':>8}{'part':>8}")
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in found:
        alone, inside = sums(one)
        for name in ("all", family(one["run"]), one["run"]["precision"]):
            groups[name].append((alone / inside - 1, inside / one["real"]))
    for name, several in sorted(groups.items(), key=lambda item: (item[0] != "all", item[0])):
        errors = sorted(abs(error) for error, _ in several)
        bias = statistics.median(error for error, _ in several)
        late = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        part = statistics.mean(part for _, part in several)
        print(f"{name:14}{len(several):6}{bias:8.1%}{statistics.median(errors):8.1%}{late:8.1%}{part:8.0%}")


def of_pairs(one: Row) -> tuple[float, float]:
    """The times of the calls that were measured, by themselves and in the step."""
    return sum(alone for _, alone, _ in one["pairs"]), sum(inside for _, _, inside in one["pairs"])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, default=DATA / "rates_h200.jsonl.xz")
    parser.add_argument("--profiles", type=Path, default=DATA / "steps_h200.jsonl.xz")
    parser.add_argument("--steps", type=Path, default=Path("steps.jsonl.gz"))
    given = parser.parse_args()
    profiles = [row for row in read_rows(given.profiles) if "failed" not in row]
    rates = [row for row in read_rows(given.rates) if "call" in row]
    times = Times(rates, {row["id"]: unpacked(row["call"]) for row in rates})
    steps = steps_of(profiles, given.steps)
    found = [compared(row, steps[str(row["id"])], times) for row in profiles if str(row["id"]) in steps]
    alike = statistics.mean(one["alike"] for one in found)
    print(f"{len(found)} runs; of the GPU time, {alike:.1%} is in operators that both call equally often\n")
    by_operator(found)
    by_run([one for one in found if one["pairs"]], "Sums of the measured calls, by run", of_pairs)
    by_run(found, "Sums of all calls, by run", lambda one: (one["sum"], one["real"]))


if __name__ == "__main__":
    main()
