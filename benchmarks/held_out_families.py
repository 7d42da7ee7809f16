"""How much of the accuracy on measured runs rests on having measured the convolutions of the same models?

The virtual GPU looks a convolution up in a table of measured ones. All others are guessed by a network that was taught
by random convolutions. Most models whose runs are judged here had their layers measured for that table. So the same
runs are estimated several times, some with decision trees instead of the network:

    shipped     with the table and the network that are shipped
    guessed     without the table
    families    without both; trees are grown without the convolutions of the run's family of models, and of
                those in the same fold (`FOLDS`)
    regrown     without both; the trees are grown in the same way, but nothing is left out
    models      without both; the trees are grown from random convolutions alone, without any model's

    python benchmarks/held_out_families.py grow FOLDER --workers 3      # the trees for `families`; minutes
    python benchmarks/held_out_families.py grow FOLDER --controls       # those for `regrown` and `models` too
    python benchmarks/held_out_families.py judge FOLDER                 # goes on where it was stopped
    python benchmarks/held_out_families.py judge FOLDER --variants shipped guessed --runs FILE

What was measured is in the shipped table, under a hash of each problem. `grow` makes the lists of what to measure
again, from layers of models, random layers and arbitrary ones, and looks them up: what is found was measured. A
convolution belongs to a family if its filter, stride and groups occur in a listed model of the family: at every image
size, batch size, type and layout, and whoever else uses it. From all others five trees of 16,000 leaves are grown for
each direction. The formulas that trees choose among are found in the random convolutions
alone. `grow` needs a C compiler (`cc`) and no GPU.

The layers of models are in `data/model_layers.json.gz`, each at three resolutions: of the first 200 models of
`ullage.research.cudnn_tables.collect`, and of those whose runs are judged, as far as `collect` knows them. `list FILE`
makes such a file; the layers of all models would take hours.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from grown_trees import Grower
from ullage.research.cudnn_tables import collect, table
from ullage.research.cudnn_tables.tasks import TYPES, ConvolutionLayer
from ullage.research.measure import accuracy
from ullage.research.ranking.truth import measured_rows
from ullage.virtual import dispatch
from ullage.virtual.kernels.cudnn import workspaces
from ullage.virtual.kernels.cudnn.formulas import (
    ConvolutionProblem,
)
from ullage.virtual.kernels.cudnn.terms import (
    terms,
)
from ullage.virtual.releases import as_measured

DATA = Path(__file__).parent / "data"
RUNS, LAYERS = DATA / "h200_runs.jsonl.gz", DATA / "model_layers.json.gz"
VARIANTS = ("shipped", "guessed", "families", "regrown", "models")
NOTHING, MODELS = "nothing", "any model"  # that can be left out instead of a family
TREES, LEAVES, TRIED = 5, 16_000, 0.5  # trees, their leaves, and the share of the features tried at a node
_RESOLUTIONS = 3  # of a model, as when layers are listed for measuring
_RANDOM, _ARBITRARY = 6_000, 80_000  # as many as were listed for the shipped table

Filter = tuple[tuple[int, ...], tuple[int, ...], int]
SHIPPED = workspaces.DATA_FOLDER
H200_TREES = workspaces.trees_of(workspaces.MEASURED_CAPABILITY)

# Names of torchvision's and timm's models; the first that matches counts. What matches none is in the last family.
FAMILIES = {
    "plain transformers": r"^(vit_|deit|beit|eva|cait|xcit|swin|aimv2|flexivit|naflex|samvit|volo|tnt|mixer|gmlp|gmixer"
    r"|resmlp|sequencer|test_vit|pit_|hiera|sam2|gemma|crossvit|convit|twins|nest_|gcvit|focalnet)",
    "efficientnets": r"efficientnet|mobilenet|mnasnet|mixnet|tinynet|rexnet|lcnet|ghostnet|fbnet|spnasnet|hardcorenas"
    r"|mobileone|starnet|fasternet",
    "regnets": r"regnet|gernet",
    "convnexts": r"convnext|mambaout|inception_next|convformer|caformer|poolformer|convmixer|edgenext",
    "other CNNs": r"densenet|rdnet|vgg|vovnet|hgnet|dla|hrnet|squeezenet|alexnet|googlenet|inception|xception"
    r"|shufflenet|dpn|nasnet|selecsls",
    "resnets": r"res2?ne|resnest|senet|botne|halo|lambda|bat_|nfnet|darknet|edgenet|byobnet|cspres",
    "hybrids": r"",
}

# Families that are left out together: growing trees takes long.
FOLDS = (("resnets", "regnets"), ("efficientnets", "convnexts"), ("other CNNs", "hybrids", "plain transformers"))


def family_of(model: str) -> str | None:
    """The family of a model of torchvision or timm; `None` for all others.

    >>> family_of("timm:seresnext26d_32x4d"), family_of("tv:vgg11"), family_of("timm:coatnet_3_224"), family_of("mlp:x")
    ('resnets', 'other CNNs', 'hybrids', None)
    """
    source, _, name = model.partition(":")
    if source not in ("tv", "torchvision", "timm"):
        return None
    return next(family for family, pattern in FAMILIES.items() if re.search(pattern, name))


def fold_of(family: str | None) -> str:
    """The names of all families that are left out with one."""
    return next((" and ".join(fold) for fold in FOLDS if family in fold), MODELS)


def use(variant: str, model: str, folder: Path) -> None:
    """What the virtual GPU knows of convolutions from now on."""
    workspaces.use_table = variant == "shipped"
    workspaces.DATA_FOLDER = SHIPPED
    left_out = {"regrown": NOTHING, "families": fold_of(family_of(model)), "models": MODELS}.get(variant)
    if left_out is not None:
        workspaces.DATA_FOLDER = folder / f"without {left_out}"
        if not (workspaces.DATA_FOLDER / H200_TREES).exists():
            raise SystemExit(f"no trees in {workspaces.DATA_FOLDER}: run `grow` first")
    workspaces.workspace.cache_clear()
    dispatch.forget_plans()


def estimate(row: dict[str, Any], variant: str, folder: Path) -> dict[str, Any]:
    """The comparison of one run, and how many convolutions it asked about."""
    use(variant, row["model"], folder)
    result = accuracy.compare(row)
    asked = workspaces.workspace.cache_info()
    return {"convolutions": asked.hits + asked.misses, "result": asdict(result)}


def estimates(rows: list[dict[str, Any]], folder: Path, variant: str, name: str, workers: int) -> list[dict[str, Any]]:
    """The comparisons of all runs. A run without convolutions has the same one in every variant."""
    same = {number: line for number, line in _stored(folder, "shipped", name).items() if not line["convolutions"]}
    done = same | _stored(folder, variant, name)
    missing = [row for row in rows if row["id"] not in done]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool, (folder / f"{name}-{variant}.jsonl").open("a") as file:
        running = pool.map(partial(estimate, variant=variant, folder=folder), missing)
        for line in track(running, f"{variant:10}", total=len(missing), console=Console(stderr=True)):
            print(json.dumps(line), file=file, flush=True)
            done[line["result"]["id"]] = line
    return [done[row["id"]] for row in rows]


def _stored(folder: Path, variant: str, name: str) -> dict[str, dict[str, Any]]:
    path = folder / f"{name}-{variant}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["result"]["id"]: line for line in lines}


def print_results(variant: str, results: list[accuracy.Comparison]) -> None:
    """Errors of each figure and the bound: of all runs, of those with a model of torchvision or timm, and by family."""
    shown = Table("runs", "count", "figure", "exact", "median", "90 %", "99 %", "upper holds", "above", title=variant)
    members = {"all": results, "torchvision and timm": [one for one in results if family_of(one.model)]}
    members |= {family: [one for one in results if family_of(one.model) == family] for family in FAMILIES}
    for name, part in members.items():
        for line in accuracy.table_lines(part):
            shown.add_row(name, *line)
    Console(width=130).print(shown)
    for one in results:
        if one.failed:
            print(f"not estimated: {one.id} {one.model}: {one.failed}")


def filter_of(one: ConvolutionLayer | ConvolutionProblem) -> Filter:
    """What a layer keeps at every size of its input."""
    return one.weight, one.stride, one.groups


def problems_of(
    direction: str, layer: ConvolutionLayer, batch: int, kinds: Iterable[str] = TYPES
) -> Iterator[ConvolutionProblem]:
    """A layer as cuDNN sees it, in every layout."""
    source, out = (batch, *layer.input), (batch, *layer.output())
    if layer.transposed:
        source, out = out, source
    for kind in kinds:
        for channels_last in (False, True):
            rest = layer.stride, layer.padding, layer.dilation, layer.groups, kind, channels_last
            yield ConvolutionProblem(direction, source, layer.weight, out, *rest)


def measured(problems: Iterable[ConvolutionProblem]) -> dict[ConvolutionProblem, int]:
    """Those of the problems that are in the shipped table, and their workspaces."""
    (path,) = workspaces.tables(workspaces.DATA_FOLDER).values()
    known = workspaces.table(path)
    asked = list(problems)
    hashes = np.array([workspaces.hash_of(problem) for problem in asked], dtype=np.uint64)
    places = np.minimum(np.searchsorted(known.hashes, hashes), len(known.hashes) - 1)
    hits = np.flatnonzero(known.hashes[places] == hashes)
    return {asked[hit]: int(known.sizes[places[hit]]) for hit in hits.tolist()}


def measured_layers(direction: str, layers: Iterable[ConvolutionLayer]) -> dict[ConvolutionProblem, int]:
    """What was measured of these layers at the batch sizes that were listed."""
    found: dict[ConvolutionProblem, int] = {}
    for layer in layers:
        found |= measured(one for batch in collect.BATCHES for one in problems_of(direction, layer, batch))
    return found


def random_problems(direction: str) -> dict[ConvolutionProblem, int]:
    """What was measured of layers that belong to no model."""
    found = measured_layers(direction, collect.random_layers(_RANDOM))
    for layer, batch, kind, _ in collect.arbitrary_configurations(_ARBITRARY):
        found |= measured(problems_of(direction, layer, batch, TYPES[kind : kind + 1]))
    return found


def read_layers() -> dict[str, set[ConvolutionLayer]]:
    """The layers of each model that was listed."""
    stored = json.loads(gzip.decompress(LAYERS.read_bytes()))
    made = [
        ConvolutionLayer._make(tuple(field) if isinstance(field, list) else field for field in row)
        for row in stored["layers"]
    ]
    return {name: {made[number] for number in numbers} for name, numbers in stored["models"].items()}


def list_layers(file: Path, count: int) -> None:
    """Write the layers of so many models, and of those whose runs are judged."""
    wanted = set(list(dict.fromkeys(name for name, _, _ in collect.models()))[:count])
    wanted |= {row["model"].partition(":")[2] for row in measured_rows(RUNS) if family_of(row["model"])}
    found: dict[str, set[ConvolutionLayer]] = {}
    for name, members in collect.layers_by_model(_RESOLUTIONS, wanted):
        found.setdefault(name, set()).update(members)
    layers = sorted(set().union(*found.values()))
    numbers = {layer: number for number, layer in enumerate(layers)}
    models = {name: sorted(numbers[layer] for layer in members) for name, members in found.items()}
    file.write_bytes(gzip.compress(json.dumps({"layers": layers, "models": models}).encode(), mtime=0))
    say(f"{len(layers)} layers of {len(models)} models")


def say(message: str) -> None:
    """Tell how far it is."""
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)


def grow_direction(
    direction: str, folder: Path, layers: dict[str, set[ConvolutionLayer]], controls: bool
) -> dict[str, Any]:
    """The trees of a direction without each fold; as controls also without any model, and with all that was found."""
    left_out: dict[str, set[Filter]] = {fold_of(family): set() for family in FAMILIES}
    for name, members in layers.items():
        left_out[fold_of(family_of(f"timm:{name}"))] |= {filter_of(layer) for layer in members}
    drawn = random_problems(direction)
    every = {layer._replace(bias=False) for members in layers.values() for layer in members}
    part = _part(drawn | measured_layers(direction, every))
    say(f"{direction}: {len(part.problems)} measured problems, {len(drawn)} of them of random layers")
    shares = table.find_formulas(_part(drawn))
    labels, formulas = table.label(part, [formula for formula, _ in shares])
    targets = np.array(labels)
    say(f"{direction}: {len(shares)} formulas explain {(targets < len(shares)).mean():.1%}")
    rows = np.array([workspaces.features(problem) for problem in part.problems], dtype=np.int64)
    grower, trees = Grower(folder), {}
    for name in (*left_out, *((MODELS, NOTHING) if controls else ())):
        kept = np.array([filter_of(problem) not in left_out.get(name, ()) for problem in part.problems])
        if name == MODELS:
            kept = np.array([problem in drawn for problem in part.problems])
        grown = table.export(grower.grow(rows[kept], targets[kept], TREES, LEAVES, TRIED))
        trees[name] = {f"{direction}_{column}": values for column, values in grown.items()}
        trees[name][f"{direction}_formulas"] = np.array(formulas, dtype=np.int64)
        say(f"{direction}, without {name}: grown from {kept.sum()} problems, {(~kept).sum()} left out")
    return trees


def _part(rows: dict[ConvolutionProblem, int]) -> table.Measured:
    sizes = np.array(list(rows.values()), dtype=np.int64)
    return table.Measured(list(rows), sizes, [terms(problem) for problem in rows])


def grow_trees(folder: Path, controls: bool, workers: int) -> None:
    """Grow all directions and write the trees of each fold."""
    grow = partial(grow_direction, folder=folder, layers=read_layers(), controls=controls)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        directions = list(pool.map(grow, "fdw"))
    for name in directions[0]:
        target = folder / f"without {name}"
        target.mkdir(exist_ok=True)
        columns = {column: values for trees in directions for column, values in trees[name].items()}
        np.savez_compressed(target / H200_TREES, **columns)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="write layers of models")
    listing.add_argument("file", type=Path)
    listing.add_argument("--models", type=int, default=200, metavar="N", help="of the models that no run is judged of")
    growing = commands.add_parser("grow", help="grow trees without the families")
    growing.add_argument("--controls", action="store_true", help="the trees of `regrown` and `models` too")
    judging = commands.add_parser("judge", help="estimate the runs and print how far off the estimates are")
    judging.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS[:3])
    judging.add_argument("--runs", type=Path, default=RUNS, help="measured runs, on an H200")
    for command in (growing, judging):
        command.add_argument("folder", type=Path, help="for trees and estimates")
        command.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes at once")
    options = parser.parse_args()
    if options.command == "list":
        list_layers(options.file, options.models)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "grow":
        grow_trees(options.folder, options.controls, options.workers)
        return
    rows, name = measured_rows(options.runs), options.runs.name.partition(".")[0]
    for variant in options.variants:
        lines = estimates(rows, options.folder, variant, name, options.workers)
        print_results(variant, [accuracy.Comparison(**line["result"]) for line in lines])


if __name__ == "__main__":
    as_measured()
    main()
