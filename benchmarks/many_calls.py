"""Lists operator calls to time, far more than `more_calls.py`, of no family that is kept for testing.

    python benchmarks/many_calls.py calls.jsonl.gz --resume steps.jsonl.gz
    ullage measure rates calls.jsonl.gz --out many_rates.jsonl --no-activity --workers 14   # needs a GPU

Convolutions of layers of models (`data/model_layers.json.gz`) with batches, types and layouts at random, of layers with
other sizes, of random layers, and of the runs that the rates are fitted to; matrix products with sizes near those of
these runs; and other calls of theirs. Calls that were timed before are left out, but for a few, which say how far both
readings agree. Every beginning of the list is a fair sample. Takes two minutes.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import random
from collections.abc import Iterator
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
from ullage.performance.step import runs_kernels
from ullage.research.cudnn_tables.collect import random_layer
from ullage.research.cudnn_tables.tasks import ConvolutionLayer
from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.rates.listing import chosen
from ullage.research.rates.tensors import identity, packed
from ullage.research.training.utilization import runs
from ullage.workloads import read_rows

SEED = 19
MOST_BYTES, LONGEST = 400_000_000, 4e-4
TURNS = {"models": 4, "changed": 4, "random": 2, "fitted": 1, "products": 1, "others": 3}
TIMED = ("rates", "more_rates", "many_rates", "later_rates")  # what was timed before
REPEATED = 150  # calls that were timed before
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


def listed(kept: Path | None, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The list."""
    chance = random.Random(seed)
    worth = functools.partial(is_worth_it, most_bytes=MOST_BYTES, longest=LONGEST)
    steps = runs.follow(fitted(), kept).values()
    done = {row["id"]: row for name in TIMED for row in read_rows(DATA / f"{name}_h200.jsonl.xz") if "gpu_us" in row}
    calls = [call for step in steps for call in step.calls if runs_kernels(call)]
    chance.shuffle(calls)
    again = [call for call in calls if identity(call) in done and worth(call)][:REPEATED]
    convolutions = [call for call in calls if is_convolution(call)]
    layers = [*layers_of_models(), *(layer_of(call)[0] for call in convolutions)]
    straight = [call for call in calls if call["operator"] in ("aten.mm.default", "aten.addmm.default")]
    others = [
        {"calls": [call for call in step.calls if not is_convolution(call) and runs_kernels(call)]} for step in steps
    ]
    kinds: dict[str, Iterator[dict[str, Any]]] = {
        "models": _shuffled(from_layers(drawn(layers, chance)), chance),
        "changed": _shuffled(from_layers(changed(*one, chance) for one in drawn(layers, chance)), chance),
        "random": from_layers((random_layer(chance), *one[1:]) for one in drawn(layers, chance)),
        "fitted": iter(convolutions),
        "products": itertools.islice(products(straight, chance), 4000),
        "others": iter(chosen(others, 12_000, seed=seed)),
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
    parser.add_argument("--most", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    with gzip.open(options.out, "wt") as file:
        for one in itertools.islice(listed(options.resume, options.seed), options.most):
            file.write(json.dumps(packed(one)) + "\n")
