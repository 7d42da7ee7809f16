"""Lists operator calls to time, far more than `more_calls.py`, of no family that is kept for testing.

    python benchmarks/many_calls.py calls.jsonl.gz --resume steps.jsonl.gz
    ullage measure rates calls.jsonl.gz --out many_rates.jsonl --no-activity --workers 16   # needs a GPU

Calls of the runs that the rates are fitted to, those first that take much of a step; convolutions of layers of models
(`data/model_layers.json.gz`) with batches, types and layouts at random, of layers with other sizes, of random layers,
and of layers with groups; and matrix products with sizes near those of these runs. Calls that were timed before are
left out, but for a few, which say how far both readings agree. Every beginning of the list is a fair sample. Takes
minutes.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from more_calls import (
    BATCHES,
    DATA,
    TYPES,
    by_turns,
    changed,
    fitted,
    from_layers,
    is_convolution,
    is_worth_it,
    layer_of,
)

from ullage.hardware.work import work_of
from ullage.performance.rates import load
from ullage.performance.step import StepCalls, runs_kernels
from ullage.research.cudnn_tables.collect import random_layer
from ullage.research.cudnn_tables.tasks import ConvolutionLayer
from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.rates.tensors import identity, packed
from ullage.research.rates.timing import waits
from ullage.research.training.utilization import runs
from ullage.workloads import read_rows

SEED = 19
MOST_BYTES, LONGEST = 600_000_000, 6e-4
TURNS = {"fitted": 12, "models": 5, "changed": 2, "random": 1, "grouped": 2, "products": 2}
TIMED = ("rates", "more_rates", "many_rates", "later_rates", "shared_rates")  # what was timed before
REPEATED = 400  # calls that were timed before
LAYERS = 40_000
CHANNELS_LAST = 0.3
Drawn = tuple[ConvolutionLayer, int, str, bool]


def layers_of_models() -> list[ConvolutionLayer]:
    """The layers of models of families that are not for testing."""
    found = json.loads(gzip.decompress((DATA / "model_layers.json.gz").read_bytes()))
    places = {
        place
        for model, several in found["models"].items()
        if not is_for_testing(family_of({"model": f"timm:{model}", "arch": "cnn"}).name)
        for place in several
    }
    return [_layer(found["layers"][place]) for place in sorted(places)]


def _layer(values: list[Any]) -> ConvolutionLayer:
    return ConvolutionLayer(*(tuple(value) if isinstance(value, list) else value for value in values))


def drawn(layers: list[ConvolutionLayer], chance: random.Random) -> Iterator[Drawn]:
    """Layers at random, with a batch, a type and a layout."""
    for _ in range(LAYERS):
        yield chance.choice(layers), chance.choice(BATCHES), chance.choice(TYPES), chance.random() < CHANNELS_LAST


def products(calls: list[dict[str, Any]], chance: random.Random) -> Iterator[dict[str, Any]]:
    """Matrix products with sizes near those of these calls, in all layouts and types."""
    while calls:
        left, right = (one for one in chance.choice(calls)["args"] if isinstance(one, dict) and len(one["shape"]) == 2)
        rows, inner, columns = (_near(size, chance) for size in (*left["shape"], right["shape"][1]))
        dtype = chance.choice(TYPES)

        def matrix(high: int, wide: int, dtype: str = dtype) -> dict[str, Any]:
            turned = {"stride": [1, high]} if chance.random() < 0.35 and min(high, wide) > 1 else {}
            return {"dtype": dtype, "shape": [high, wide], **turned}

        given, made = [matrix(rows, inner), matrix(inner, columns)], {"dtype": dtype, "shape": [rows, columns]}
        name, tf32 = "aten.mm.default", {"tf32": chance.random() < 0.3} if dtype == "float32" else {}
        if chance.random() < 0.4:
            name, given = "aten.addmm.default", [{"dtype": dtype, "shape": [columns]}, *given]
        yield {"operator": name, "pass": "forward", "args": given, "kwargs": {}, "outputs": [made], **tf32}


def _near(size: int, chance: random.Random) -> int:
    if chance.random() < 0.4:
        return size
    step = chance.choice((1, 8, 16, 64, 64))
    return max(1, round(size * 2 ** chance.uniform(-1.5, 1.5) / step)) * step


def grouped(many: Iterator[Drawn], chance: random.Random) -> Iterator[Drawn]:
    """Layers with groups in place of these: most of them depthwise, some with many results a channel, some in a row."""
    for layer, batch, dtype, last in many:
        if layer.transposed or max(layer.dilation) > 1:
            continue
        channels = max(8, layer.input[0])
        groups = channels if chance.random() < 0.6 else max(2, channels // chance.choice((4, 8, 16, 16, 32, 64)))
        each, results = max(1, channels // groups), 1 if chance.random() < 0.6 else chance.choice((1, 2, 2, 3, 4))
        side, stride = chance.choice((3, 3, 3, 5, 7, 9)), chance.choice((1, 1, 1, 2))
        size: tuple[int, ...] = layer.input[1:]
        if chance.random() < 0.15:
            size, last = (chance.choice((64, 128, 196, 256, 384, 512, 1024)),), False
        flat = len(size)
        yield layer._replace(
            input=(each * groups, *size), weight=(each * groups * results, each, *(side,) * flat), groups=groups,
            stride=(stride,) * flat, padding=(side // 2,) * flat, dilation=(1,) * flat, output_padding=(0,) * flat,
        ), batch, dtype, last  # fmt: skip


def by_share(
    steps: Mapping[str, StepCalls], families: Mapping[str, str], chance: random.Random
) -> list[dict[str, Any]]:
    """Calls of steps in random order, those with a large share of their step's time early; few runs of a family weigh
    more than one of many."""
    rates, several = load(), Counter(families.values())
    weights: dict[str, float] = {}
    calls: dict[str, dict[str, Any]] = {}
    for name, family in families.items():
        made = Counter(steps[name].order) if name in steps else Counter()
        some = [(call, made[place]) for place, call in enumerate(steps[name].calls) if made[place] and _is_timed(call)]
        works = [work_of(call) for call, _ in some]
        times = rates.times(works, rates.vectors(works)) * [count for _, count in some]
        for (call, _), share in zip(some, times / times.sum(), strict=True):
            key = identity(call)
            calls[key] = call
            weights[key] = weights.get(key, 0.0) + share / several[family] ** 0.5
    return [
        calls[key] for key in sorted(calls, key=lambda key: math.log(1 - chance.random()) / weights[key], reverse=True)
    ]


def _is_timed(call: dict[str, Any]) -> bool:
    return runs_kernels(call) and not call["operator"].startswith("triton.") and not waits(call)


def listed(kept: Path | None, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The list."""
    chance = random.Random(seed)
    worth = functools.partial(is_worth_it, most_bytes=MOST_BYTES, longest=LONGEST)
    rows = fitted()
    families = {str(row["id"]): family_of(row).name for row in rows}
    steps = runs.follow(rows, kept)
    done = {row["id"]: row for name in TIMED for row in read_rows(DATA / f"{name}_h200.jsonl.xz") if "gpu_us" in row}
    calls = by_share(steps, {name: family for name, family in families.items() if name in steps}, chance)
    again = [call for call in calls if identity(call) in done and worth(call)][:REPEATED]
    layers = [*layers_of_models(), *(layer_of(call)[0] for call in calls if is_convolution(call))]
    straight = [call for call in calls if call["operator"] in ("aten.mm.default", "aten.addmm.default")]
    kinds: dict[str, Iterator[dict[str, Any]]] = {
        "fitted": iter(calls),
        "models": _shuffled(from_layers(drawn(layers, chance)), chance),
        "changed": _shuffled(from_layers(changed(*one, chance) for one in drawn(layers, chance)), chance),
        "random": from_layers((random_layer(chance), *one[1:]) for one in drawn(layers, chance)),
        "grouped": _shuffled(from_layers(grouped(drawn(layers, chance), chance)), chance),
        "products": itertools.islice(products(straight, chance), 8000),
    }
    yield from again
    yield from by_turns(kinds, TURNS, set(done), worth)


def _shuffled(calls: Iterator[dict[str, Any]], chance: random.Random) -> Iterator[dict[str, Any]]:
    """Forward calls and gradients of different layers by turns."""
    while some := list(itertools.islice(calls, 2000)):
        chance.shuffle(some)
        yield from some


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--most", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    with gzip.open(options.out, "wt") as file:
        for one in itertools.islice(listed(options.resume, options.seed), options.most):
            file.write(json.dumps(packed(one)) + "\n")
