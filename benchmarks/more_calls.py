"""Lists operator calls to time, most of them convolutions, of no family that is kept for testing.

    python benchmarks/more_calls.py calls.jsonl.gz --resume steps.jsonl.gz
    ullage measure rates calls.jsonl.gz --out more_rates.jsonl --no-activity   # needs a GPU

cuDNN chooses another kernel for almost every convolution, so that few of them say little about the others. The calls
are those of the runs that the rates are fitted to, those of other models of timm and torchvision, and convolutions of
no model: random layers, and layers of models with other sizes, types and layouts. Calls that were timed before are left
out. Every beginning of the list is a fair sample. `--resume` keeps the steps of runs, which takes a second each.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.hardware.work import work_of
from ullage.performance.rates import measured_gpu
from ullage.performance.step import runs_kernels
from ullage.research.cudnn_tables.collect import random_layer
from ullage.research.cudnn_tables.tasks import ConvolutionLayer
from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.measure.drawing import draw
from ullage.research.rates.listing import chosen
from ullage.research.rates.tensors import bytes_of, identity, packed
from ullage.research.training.protocol import read_rows
from ullage.research.training.utilization import runs
from ullage.workloads import read_rows as read_lines

SEED = 18
DATA = Path(__file__).parent / "data"
DRAWN, MODELS = 1500, 78
TYPES = ("float32", "bfloat16", "float16")
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_BYTES, LONGEST = 600_000_000, 2e-3  # of a call: its tensors, and the seconds that it takes at least
# How many of each kind come by turns: convolutions of fitted runs, of drawn models, random, changed; other calls.
TURNS = {"fitted": 3, "drawn": 3, "random": 1, "changed": 3, "others": 2}
Worth = Callable[[Mapping[str, Any]], bool]


def drawn() -> list[dict[str, Any]]:
    """Runs of so many image models, one each, that belong to no family for testing."""
    found: dict[str, dict[str, Any]] = {}
    for row in draw(DRAWN, SEED):
        family = family_of(row)
        is_convolutional = row["model"].startswith(("timm:", "torchvision:", "tv:")) and family.kind in ("cnn", "other")
        if is_convolutional and not is_for_testing(family.name):
            found.setdefault(row["model"], row)
    rows = list(found.values())
    random.Random(SEED).shuffle(rows)
    return rows[:MODELS]


def fitted() -> list[dict[str, Any]]:
    """The configurations of the runs that the rates are fitted to."""
    found = []
    for name in ("utilization_h200.parquet", "generated_h200.parquet", "host_h200.parquet"):
        rows = read_rows(DATA / name)
        found += runs.configurations(rows, [run for run in runs.read_alone(rows) if not run.is_test])
    return found


def is_convolution(call: Mapping[str, Any]) -> bool:
    """Whether it is a convolution or its gradients."""
    return call["operator"] in ("aten.convolution.default", "aten.convolution_backward.default")


def layer_of(call: Mapping[str, Any]) -> tuple[ConvolutionLayer, int, str, bool]:
    """The layer of a convolution, its batch, type, and whether channels come last."""
    args = call["args"]
    backward = "backward" in call["operator"]
    source, weight = args[1:3] if backward else args[:2]
    stride, padding, dilation, transposed, more, groups = args[4:10] if backward else args[3:9]
    bias = bool(args[10][2]) if backward else args[2] is not None
    layer = ConvolutionLayer(
        tuple(source["shape"][1:]), tuple(weight["shape"]), tuple(stride), tuple(padding), tuple(dilation),
        bool(transposed), tuple(more), int(groups), bias,
    )  # fmt: skip
    last = "stride" in source and source["stride"][1] == 1
    return layer, int(source["shape"][0]), str(source["dtype"]), last


def calls_of(
    layer: ConvolutionLayer, batch: int, dtype: str, last: bool, with_source: bool = True
) -> Iterator[dict[str, Any]]:
    """The forward call of a layer, and its gradients, as `ullage.virtual.tracking.calls` writes them."""

    def tensor(shape: Sequence[int], turned: bool = last) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": dtype, "shape": list(shape)}
        if turned and len(shape) == 4 and shape[1] > 1 and math.prod(shape[2:]) > 1:
            found["stride"] = [math.prod(shape[1:]), 1, shape[1] * shape[3], shape[1]]
        return found

    source, result = tensor((batch, *layer.input)), tensor((batch, *layer.output()))
    weight, outer = tensor(layer.weight), layer.output()[0]
    settings = [
        list(layer.stride), list(layer.padding), list(layer.dilation), layer.transposed, list(layer.output_padding),
        layer.groups,
    ]  # fmt: skip
    bias = tensor((outer,)) if layer.bias else None
    yield {
        "operator": "aten.convolution.default", "pass": "forward", "args": [source, weight, bias, *settings],
        "kwargs": {}, "outputs": [result],
    }  # fmt: skip
    wanted = [with_source, True, layer.bias]
    yield {
        "operator": "aten.convolution_backward.default", "pass": "backward",
        "args": [result, source, weight, [outer if layer.bias else 0], *settings, wanted], "kwargs": {},
        "outputs": [made for made, is_wanted in zip((source, weight, bias), wanted, strict=True) if is_wanted],
    }  # fmt: skip


def changed(
    layer: ConvolutionLayer, batch: int, dtype: str, last: bool, chance: random.Random
) -> tuple[ConvolutionLayer, int, str, bool]:
    """The same layer with some of its sizes, its type or its layout changed."""
    entering, *space = layer.input
    outer, inner, *window = layer.weight
    groups, padding, stride = layer.groups, layer.padding, layer.stride
    if chance.random() < 0.5:
        batch = chance.choice(BATCHES)
    if chance.random() < 0.5:
        dtype = chance.choice(TYPES)
    if chance.random() < 0.4:
        last = not last
    if chance.random() < 0.6:
        factor = 2 ** chance.uniform(-1, 1)
        space = [max(1, round(length * factor)) for length in space]
    if chance.random() < 0.6 and not layer.transposed:
        step = chance.choice((1, 4, 8, 8, 16, 32))
        scale = 2 ** chance.uniform(-1, 1)
        if groups == entering == outer and groups > 1:
            entering = outer = groups = max(2, round(entering * scale / step) * step)
        elif groups == 1:
            other = 2 ** chance.uniform(-1, 1)
            entering = inner = max(1, round(entering * scale / step)) * step
            outer = max(1, round(outer * other / step)) * step
    if chance.random() < 0.25 and not layer.transposed and len(set(window)) == 1 and set(layer.dilation) == {1}:
        side = chance.choice((1, 3, 3, 5, 7) if groups == 1 else (3, 3, 5, 7, 9))
        window, padding = [side] * len(window), (side // 2,) * len(window)
    if chance.random() < 0.2 and not layer.transposed:
        stride = (3 - min(2, stride[0]),) * len(stride)
    made = layer._replace(
        input=(entering, *space), weight=(outer, inner, *window), groups=groups, padding=padding, stride=stride
    )
    return made, batch, dtype, last


def is_worth_it(call: Mapping[str, Any], most_bytes: int = MOST_BYTES, longest: float = LONGEST) -> bool:
    """Whether a call is neither too large nor too slow to be timed many times."""
    if bytes_of([call["args"], call["outputs"]]) > most_bytes:
        return False
    return work_of(call).least_time(measured_gpu()) < longest


def from_layers(many: Iterable[tuple[ConvolutionLayer, int, str, bool]]) -> Iterator[dict[str, Any]]:
    """The calls of layers, as far as they have an output."""
    for layer, batch, dtype, last in many:
        if min(layer.output()) > 0 and (set(layer.output_padding) == {0} or layer.transposed):
            yield from calls_of(layer, batch, dtype, last)


def _random_layers(count: int, chance: random.Random) -> Iterator[tuple[ConvolutionLayer, int, str, bool]]:
    for _ in range(count):
        yield random_layer(chance), chance.choice(BATCHES), chance.choice(TYPES), chance.random() < 0.35


def listed(kept: Path | None) -> Iterator[dict[str, Any]]:
    """The list."""
    chance = random.Random(SEED)
    of_fitted = runs.follow(fitted(), kept)
    of_drawn = runs.follow(drawn(), kept)
    done = {row["id"] for row in read_lines(DATA / "rates_h200.jsonl.xz") if "gpu_us" in row}
    kinds: dict[str, list[dict[str, Any]]] = {name: [] for name in TURNS}
    layers = []
    for name, steps in (("fitted", of_fitted), ("drawn", of_drawn)):
        for step in steps.values():
            for call in step.calls:
                if is_convolution(call):
                    kinds[name].append(call)
                    layers.append(layer_of(call))
    some = chance.sample(layers, min(len(layers), 6000))
    kinds["changed"] = list(from_layers(changed(*one, chance) for one in some))
    kinds["random"] = list(from_layers(_random_layers(2500, chance)))
    for name in ("fitted", "drawn", "changed", "random"):
        chance.shuffle(kinds[name])
    everything = [{"calls": [c for c in step.calls if not is_convolution(c) and runs_kernels(c)]}
                  for step in of_drawn.values()]  # fmt: skip
    kinds["others"] = chosen(everything, 4000, seed=SEED)
    yield from by_turns(kinds, TURNS, done)


def by_turns(
    kinds: Mapping[str, Iterable[dict[str, Any]]], turns: Mapping[str, int], done: set[str], worth: Worth = is_worth_it
) -> Iterator[dict[str, Any]]:
    """So many calls of each kind by turns, each once, without those that were timed before."""
    seen, left = set(done), {name: iter(several) for name, several in kinds.items()}
    while left:
        for name in list(left):
            new = (call for call in left[name] if identity(call) not in seen and worth(call))
            taken = 0
            for call in itertools.islice(new, turns[name]):
                seen.add(identity(call))
                taken += 1
                yield call
            if not taken:
                del left[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--most", type=int, default=20_000)
    options = parser.parse_args()
    with gzip.open(options.out, "wt") as file:
        for one in itertools.islice(listed(options.resume), options.most):
            file.write(json.dumps(packed(one)) + "\n")
