"""How much of the accuracy on measured runs rests on having measured the convolutions of the same models?

The virtual GPU looks a convolution up in a table of measured ones, and asks decision trees for all others. Most models
whose runs are judged here had their layers measured for that table. So the same runs are estimated several times:

    shipped     with the table and the trees that are shipped
    trees       without the table
    regrown     without the table; the trees are grown anew, as below, but nothing is left out
    families    without the table; the trees are grown anew without the convolutions of the run's family of models and
                of those in the same fold (`FOLDS`)
    models      without the table; the trees are grown from random convolutions alone, without any model's

    python benchmarks/held_out_trees.py FOLDER          # grows the trees; for the first two variants not needed
    python benchmarks/held_out_families.py FOLDER       # estimates and prints; goes on where it was stopped
    python benchmarks/held_out_families.py FOLDER --variants shipped trees --runs benchmarks/data/h200_cnns.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ullage.measure import accuracy
from ullage.measure.truth import measured_rows
from ullage.virtual.kernels import cudnn_choice

RUNS = Path(__file__).parent / "data" / "h200_runs.jsonl.gz"
VARIANTS = ("shipped", "trees", "regrown", "families", "models")
NOTHING, MODELS = "nothing", "any model"  # that can be left out instead of a family
SHIPPED = cudnn_choice.DATA_FOLDER

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
    cudnn_choice.use_table = variant == "shipped"
    cudnn_choice.DATA_FOLDER = SHIPPED
    left_out = {"regrown": NOTHING, "families": fold_of(family_of(model)), "models": MODELS}.get(variant)
    if left_out is not None:
        cudnn_choice.DATA_FOLDER = folder / f"without {left_out}"
        if not (cudnn_choice.DATA_FOLDER / cudnn_choice.TREES).exists():
            raise SystemExit(f"no trees in {cudnn_choice.DATA_FOLDER}: run `grow` first")
    cudnn_choice.workspace.cache_clear()


def estimate(row: dict[str, Any], variant: str, folder: Path) -> dict[str, Any]:
    """The comparison of one run, and how many convolutions it asked about."""
    use(variant, row["model"], folder)
    result = accuracy.compare(row)
    asked = cudnn_choice.workspace.cache_info()
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
        limits = accuracy.bound(part)
        for line in accuracy.summarize(part):
            if line.group == "all":
                errors = (f"{line.exact:.1%}", f"{line.median:.2%}", f"{line.p90:.2%}", f"{line.p99:.2%}")
                above = (f"{limits['holds']:.1%}", f"{limits['above']:.2%}") if line.figure == "process" else ("", "")
                shown.add_row(name, str(line.given), line.figure, *errors, *above)
    Console(width=130).print(shown)
    for one in results:
        if one.failed:
            print(f"not estimated: {one.id} {one.model}: {one.failed}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of `held_out_trees.py`; estimates are kept here too")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--runs", type=Path, default=RUNS, help="measured runs, on an H200")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes at once")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, name = measured_rows(options.runs), options.runs.name.partition(".")[0]
    for variant in options.variants:
        lines = estimates(rows, options.folder, variant, name, options.workers)
        print_results(variant, [accuracy.Comparison(**line["result"]) for line in lines])


if __name__ == "__main__":
    main()
