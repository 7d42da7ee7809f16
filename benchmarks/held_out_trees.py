"""Grows the trees for cuDNN's choice without the convolutions of whole families of models. Needs no GPU.

    python benchmarks/held_out_trees.py FOLDER [--seconds 3600]

The shipped table holds the workspace of every measured convolution under a hash. The lists of what to measure are made
again: layers of torchvision's and timm's models (`collect_convolutions`), random ones, arbitrary ones. What is found in
the table was measured. A convolution belongs to a family if its filter, stride and groups occur in a model of the
family: at every image size, batch size, type and layout, and whoever else uses it.

For each fold of families in `held_out_families.py` trees are grown from all the rest, five of 16,000 leaves each,
like the shipped ones. The formulas that trees choose among are found in the random convolutions alone. `--seconds` is
the time for listing layers of models; those whose runs are judged are always listed. Needs a C compiler (`cc`).
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from held_out_families import FAMILIES, MODELS, NOTHING, RUNS, family_of, fold_of
from ullage.measure import collect_convolutions, convolution_table
from ullage.measure.convolution_tasks import TYPES, Layer
from ullage.measure.random_convolutions import arbitrary_configurations, random_layers
from ullage.measure.truth import measured_rows
from ullage.virtual.kernels import cudnn_choice
from ullage.virtual.kernels.cudnn_workspaces import Problem, terms

TREES, LEAVES = 5, 16_000
_RESOLUTIONS = 3  # a model, as `collect_convolutions` does by default
_RANDOM, _ARBITRARY = 6_000, 80_000  # as many as were listed for the shipped table
_FEATURES_TRIED = 0.5

Filter = tuple[tuple[int, ...], tuple[int, ...], int]


def filter_of(one: Layer | Problem) -> Filter:
    """What a layer keeps at every size of its input."""
    return one.weight, one.stride, one.groups


def problems_of(direction: str, layer: Layer, batch: int, kinds: Iterable[str] = TYPES) -> Iterator[Problem]:
    """A layer as cuDNN sees it, in every layout."""
    source, out = (batch, *layer.input), (batch, *layer.output())
    if layer.transposed:
        source, out = out, source
    for kind in kinds:
        for channels_last in (False, True):
            rest = layer.stride, layer.padding, layer.dilation, layer.groups, kind, channels_last
            yield Problem(direction, source, layer.weight, out, *rest)


def measured(problems: Iterable[Problem]) -> dict[Problem, int]:
    """Those of the problems that are in the shipped table, and their workspaces."""
    (path,) = cudnn_choice.tables(cudnn_choice.DATA_FOLDER).values()
    table = cudnn_choice.table(path)
    asked = list(problems)
    hashes = np.array([cudnn_choice.hash_of(problem) for problem in asked], dtype=np.uint64)
    places = np.minimum(np.searchsorted(table.hashes, hashes), len(table.hashes) - 1)
    hits = np.flatnonzero(table.hashes[places] == hashes)
    return {asked[hit]: int(table.sizes[places[hit]]) for hit in hits.tolist()}


def measured_layers(direction: str, layers: Iterable[Layer]) -> dict[Problem, int]:
    """What was measured of these layers at the batch sizes that were listed."""
    found: dict[Problem, int] = {}
    for layer in layers:
        found |= measured(one for batch in collect_convolutions.BATCHES for one in problems_of(direction, layer, batch))
    return found


def random_problems(direction: str) -> dict[Problem, int]:
    """What was measured of layers that belong to no model."""
    found = measured_layers(direction, random_layers(_RANDOM))
    for layer, batch, kind, _ in arbitrary_configurations(_ARBITRARY):
        found |= measured(problems_of(direction, layer, batch, TYPES[kind : kind + 1]))
    return found


def model_layers(file: Path, seconds: float) -> dict[str, set[Layer]]:
    """Layers of the models whose runs are judged, then of others for so long; those in the file are done already."""
    found: dict[str, set[Layer]] = pickle.loads(file.read_bytes()) if file.exists() else {}
    judged = {row["model"].partition(":")[2] for row in measured_rows(RUNS) if family_of(row["model"])}
    kept = collect_convolutions.declare_torchvision_operators()
    names = [name for name, _, _ in collect_convolutions.models()]
    end = time.monotonic() + seconds
    for wanted in (judged, set(names)) if seconds else (judged,):
        for name, layers in collect_convolutions.layers_by_model(_RESOLUTIONS, wanted - set(found)):
            found.setdefault(name, set()).update(layers)
            if wanted is not judged and time.monotonic() > end:
                break
        file.write_bytes(pickle.dumps(found))
    say(f"layers of {len(found)} of {len(set(names))} models; {len(kept)} operators of torchvision declared")
    return found


def say(message: str) -> None:
    """Tell how far it is."""
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)


class _Node(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "end", "feature", "place", "left", "right")),
        ("gain", ctypes.c_double),
    )


class Shares:
    """The samples of each class in a node, as scikit-learn's `tree_.value`."""

    def __init__(self, labels: Any, starts: Any, ends: Any, classes: int) -> None:
        self._labels, self._starts, self._ends, self._classes = labels, starts, ends, classes

    def __getitem__(self, node: int) -> Any:
        members = self._labels[self._starts[node] : self._ends[node]]
        return np.bincount(members, minlength=self._classes).astype(np.float64)[None]


class Grower:
    """`convolution_table.grow` with the compiled loop; what it returns has what `convolution_table.export` reads."""

    def __init__(self, folder: Path) -> None:
        library = folder / f"grow_tree_{os.getpid()}.so"
        source = Path(__file__).with_name("grow_tree.c")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
        self._grow = ctypes.CDLL(str(library.resolve())).grow
        self._grow.restype = ctypes.c_int64

    def grow(self, rows: Any, labels: Any, trees: int = TREES, leaves: int = LEAVES) -> list[Any]:
        """Trees on rows of features, each with other features tried at its nodes."""
        columns = [np.unique(column, return_inverse=True) for column in rows.T]
        ranks = np.ascontiguousarray([places for _, places in columns], dtype=np.int32)
        classes, targets = np.unique(labels, return_inverse=True)
        targets = targets.astype(np.int32)
        return [self._tree(columns, ranks, targets, classes, leaves, seed) for seed in range(trees)]

    def _tree(self, columns: Any, ranks: Any, targets: Any, classes: Any, leaves: int, seed: int) -> Any:
        features, samples = ranks.shape
        order = np.arange(samples, dtype=np.int64)
        nodes = (_Node * (2 * leaves))()
        numbers = (samples, features, int(_FEATURES_TRIED * features), len(classes), leaves)
        count = self._grow(
            *(ctypes.c_void_p(array.ctypes.data) for array in (ranks, targets)),
            *(ctypes.c_int64(number) for number in numbers),
            ctypes.c_uint64(seed),
            ctypes.c_void_p(order.ctypes.data),
            nodes,
        )
        made = nodes[:count]
        thresholds = np.zeros(count)
        for number, node in enumerate(made):
            if node.left >= 0:
                values = columns[node.feature][0]
                inside = ranks[node.feature][order[node.start : node.end]]
                above = inside[inside > node.place].min()
                thresholds[number] = (values[node.place] + values[above]) / 2
        inner = SimpleNamespace(
            children_left=np.array([node.left for node in made]),
            children_right=np.array([node.right for node in made]),
            feature=np.array([node.feature for node in made]),
            threshold=thresholds,
            value=Shares(targets[order], [n.start for n in made], [n.end for n in made], len(classes)),
        )
        return SimpleNamespace(tree_=inner, classes_=classes)


def grow_direction(direction: str, folder: Path, layers: dict[str, set[Layer]], controls: bool) -> dict[str, Any]:
    """The trees of a direction without each fold; as controls also without any model, and with all that was found."""
    left_out: dict[str, set[Filter]] = {fold_of(family): set() for family in FAMILIES}
    for name, members in layers.items():
        left_out[fold_of(family_of(f"timm:{name}"))] |= {filter_of(layer) for layer in members}
    drawn = random_problems(direction)
    every = {layer._replace(bias=False) for members in layers.values() for layer in members}
    part = _part(drawn | measured_layers(direction, every))
    say(f"{direction}: {len(part.problems)} measured problems, {len(drawn)} of them of random layers")
    shares = convolution_table.find_formulas(_part(drawn))
    labels, formulas = convolution_table.label(part, [formula for formula, _ in shares])
    targets = np.array(labels)
    say(f"{direction}: {len(shares)} formulas explain {(targets < len(shares)).mean():.1%}")
    rows = np.array([cudnn_choice.features(problem) for problem in part.problems], dtype=np.int64)
    grower, trees = Grower(folder), {}
    for name in (*left_out, *((MODELS, NOTHING) if controls else ())):
        kept = np.array([filter_of(problem) not in left_out.get(name, ()) for problem in part.problems])
        if name == MODELS:
            kept = np.array([problem in drawn for problem in part.problems])
        grown = convolution_table.export(grower.grow(rows[kept], targets[kept]))
        trees[name] = {f"{direction}_{column}": values for column, values in grown.items()}
        trees[name][f"{direction}_formulas"] = np.array(formulas, dtype=np.int64)
        say(f"{direction}, without {name}: grown from {kept.sum()} problems, {(~kept).sum()} left out")
    return trees


def _part(rows: dict[Problem, int]) -> convolution_table.Measured:
    sizes = np.array(list(rows.values()), dtype=np.int64)
    return convolution_table.Measured(list(rows), sizes, [terms(problem) for problem in rows])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for models that no run is judged of")
    parser.add_argument("--controls", action="store_true", help="the trees of the variants `regrown` and `models` too")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes at once; at most 3 help")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    layers = model_layers(options.folder / "layers.pickle", options.seconds)
    grow = partial(grow_direction, folder=options.folder, layers=layers, controls=options.controls)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        directions = list(pool.map(grow, "fdw"))
    for name in directions[0]:
        target = options.folder / f"without {name}"
        target.mkdir(exist_ok=True)
        columns = {column: values for trees in directions for column, values in trees[name].items()}
        np.savez_compressed(target / cudnn_choice.TREES, **columns)


if __name__ == "__main__":
    main()
