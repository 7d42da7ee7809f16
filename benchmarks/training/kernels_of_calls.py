"""Which kernels operator calls are, on steps that were profiled: how many, and which shares of a call's time they take.

    python benchmarks/training/kernels_of_calls.py

The shares are those of the longest kernel, the second, and so on, of all calls of a kind together. What
`performance/data/kernels-h200.toml` has of calls comes from this table, rounded by hand. Its other table, `usual`,
cannot be printed from these steps: their profiles do not tell how many SMs a kernel fills.
"""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "steps_h200.jsonl.xz"
FEWEST, SHOWN = 20, 6  # calls of a kind, and kernels of a call


def kind_of(name: str, shapes: list[Any], channels_last: bool) -> str:
    """An operator, and of a convolution what decides about its kernels."""
    if "convolution" not in name:
        return name
    backward = name.endswith("backward")
    source, weight = shapes[backward], shapes[backward + 1]
    if weight[1] != source[1]:
        return f"{name}, {'depthwise' if weight[1] == 1 else 'grouped'}"
    if all(side == 1 for side in weight[2:]):
        return f"{name}, of single places"
    return f"{name}, channels last" if channels_last else name


def kernels_by_kind() -> dict[str, list[list[int]]]:
    """The times of the kernels of every call, the longest first."""
    by_kind: dict[str, list[list[int]]] = defaultdict(list)
    with lzma.open(DATA, "rt") as file:
        for row in map(json.loads, file):
            calls, kernels, times = row["calls"], row["kernels"], defaultdict(list)
            for call, taken in zip(kernels["call"], kernels["taken"], strict=True):
                times[call].append(taken)
            for call, each in times.items():
                name = row["names"][calls["name"][call]].removeprefix("aten::")
                shapes = row["shapes"][calls["shapes"][call]][0]
                by_kind[kind_of(name, shapes, row.get("channels_last", False))].append(sorted(each, reverse=True))
    return by_kind


if __name__ == "__main__":
    print(f"{'call':<55}{'calls':>6}{'kernels':>9}  shares of its time")
    for kind, calls in sorted(kernels_by_kind().items(), key=lambda item: -sum(map(sum, item[1]))):
        if len(calls) >= FEWEST and fmean(map(len, calls)) > 1.05:
            whole = sum(map(sum, calls))
            shares = (sum(call[place] for call in calls if len(call) > place) / whole for place in range(SHOWN))
            text = " ".join(f"{share:.2f}" for share in shares)
            print(f"{kind:<55}{len(calls):>6}{fmean(map(len, calls)):>9.1f}  {text}")
