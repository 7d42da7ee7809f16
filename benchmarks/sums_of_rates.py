"""How well the times of single operator calls add up to the GPU time of real training steps.

    python benchmarks/sums_of_rates.py rates.jsonl.xz profiles.jsonl.xz --steps steps.jsonl.gz

`rates` is what `ullage measure rates` wrote, `profiles` what `--profile` did. The steps are followed on a virtual GPU
and kept in `--steps`. For each run the times of its calls are added and compared with the kernels in its profile. A
call that was not measured takes the time of the nearest one of its operator, scaled by its bytes. The first table has
only runs of whose time nine tenths were measured, call by call; the second has all; the third has the operators that
fail most.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ullage.research.rates.listing import followed
from ullage.research.rates.tensors import bytes_of, identity, packed, unpacked
from ullage.utilization.step import runs_kernels

KNOWN = 0.9  # of a run's time, for the first table
LATENCY = 4.0  # microseconds; calls that take less do not grow with their bytes
Row = dict[str, Any]


def lines(path: Path) -> Iterator[Row]:
    """The rows of a file, plain or compressed."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def steps_of(rows: Iterable[Row], kept: Path) -> dict[str, Row]:
    """The steps by the runs' names; those that the file lacks are followed now."""
    found = {str(row["id"]): row["step"] for row in lines(kept) if "step" in row} if kept.exists() else {}
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
    """The sums of a run, in microseconds, whole and by operator."""
    real: dict[str, float] = defaultdict(float)
    names, kernels = profile["names"], profile["kernels"]
    of_call = [names[number] for number in profile["calls"]["name"]]
    for place, taken in zip(kernels["call"], kernels["taken"], strict=True):
        real[of_call[place] if place >= 0 else "?"] += taken / 1000
    summed: dict[str, float] = defaultdict(float)
    measured = 0.0
    calls = [unpacked(call) for call in step["calls"]]
    counts: dict[int, int] = defaultdict(int)
    for number in step["order"]:
        counts[number] += 1
    for number, count in counts.items():
        call = calls[number]
        if not runs_kernels(call) or call["operator"].startswith("aten._local_scalar"):
            continue
        if any(value.get("cpu") for value in call["args"][:1] if isinstance(value, dict)):
            continue  # copies between the host and the GPU are on the bus
        taken_us, exact = times.of(call)
        if taken_us is not None:
            space, word, _ = call["operator"].split(".")
            summed[f"{space}::{word}"] += count * taken_us
            measured += count * taken_us if exact else 0
    copies = sum(
        taken / 1000 for name, taken in zip(kernels["name"], kernels["taken"], strict=True) if "HtoD" in names[name]
    )
    whole = sum(real.values()) - copies
    return {
        "run": profile, "real": whole, "sum": sum(summed.values()), "known": measured / max(1e-9, sum(summed.values())),
        "by_operator": {name: (real.get(name, 0.0), summed.get(name, 0.0)) for name in {*real, *summed}},
    }  # fmt: skip


def family(row: Row) -> str:
    """Where a run's model comes from."""
    source, _, name = row["model"].partition(":")
    return name if source.startswith("ullage.") else {"tv": "torchvision", "mlp": "mlp"}.get(source, source)


def table(found: list[Row], title: str) -> None:
    """Print the errors by family and precision."""
    print(f"\n{title}: {len(found)} runs\n")
    print(f"{'':14}{'runs':>6}{'bias':>8}{'median':>8}{'90th':>8}{'known':>8}")
    groups: dict[str, list[Row]] = defaultdict(list)
    for one in found:
        for name in ("all", family(one["run"]), one["run"]["precision"]):
            groups[name].append(one)
    for name, several in sorted(groups.items(), key=lambda entry: (entry[0] != "all", entry[0])):
        errors = sorted(abs(one["sum"] / one["real"] - 1) for one in several)
        bias = statistics.median(one["sum"] / one["real"] for one in several) - 1
        late = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        known = statistics.mean(one["known"] for one in several)
        print(f"{name:14}{len(several):6}{bias:8.1%}{statistics.median(errors):8.1%}{late:8.1%}{known:8.0%}")


def operators(found: list[Row]) -> None:
    """Print the operators by how much of the time they get wrong."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0])
    for one in found:
        for name, (real, summed) in one["by_operator"].items():
            entry = sums[name]
            entry[0] += real / one["real"]
            entry[1] += summed / one["real"]
            entry[2] += abs(real - summed) / one["real"]
            entry[3] += 1
    print(f"\n{'operator':48}{'runs':>6}{'share':>8}{'summed':>8}{'wrong':>8}   (means over runs, of the GPU time)\n")
    for name, (real, summed, wrong, runs) in sorted(sums.items(), key=lambda entry: -entry[1][2])[:25]:
        count = len(found)
        print(f"{name:48}{runs:6}{real / count:8.2%}{summed / count:8.2%}{wrong / count:8.2%}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", type=Path)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--steps", type=Path, default=Path("steps.jsonl.gz"))
    parser.add_argument("--calls", type=Path, help="the list of calls, where the rows have none")
    given = parser.parse_args()
    profiles = [row for row in lines(given.profiles) if "failed" not in row]
    rates = list(lines(given.rates))
    calls = {row["id"]: unpacked(row["call"]) for row in rates if "call" in row}
    if given.calls:
        listed = (unpacked(row) for row in lines(given.calls))
        calls |= {identity(call): call for call in listed}
    steps = steps_of(profiles, given.steps)
    times = Times(rates, calls)
    found = [compared(row, steps[str(row["id"])], times) for row in profiles if str(row["id"]) in steps]
    table([one for one in found if one["known"] >= KNOWN], "Runs whose calls were measured")
    table(found, "All runs")
    operators([one for one in found if one["known"] >= KNOWN])


if __name__ == "__main__":
    main()
