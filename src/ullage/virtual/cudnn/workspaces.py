"""The workspace of cuDNN for a convolution, looked up or guessed.

Which formula (`formulas.py`) applies depends on cuDNN's plan, and that on the architecture. For the H200 a table of
measured calls has the answer, and a network guesses the plan of other calls (`network.py`). Decision trees guess for
every other architecture that cuDNN answers for (`ullage measure cudnn`). A table for another GPU in `data/`
serves the GPUs that its header names.
"""

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ullage.hardware.specification import MEASURED_CAPABILITY as MEASURED_CAPABILITY
from ullage.units import round_up
from ullage.virtual.cudnn import plans
from ullage.virtual.cudnn.arrays import HEADER, header_of, needed_numpy, read_arrays, read_header
from ullage.virtual.cudnn.formulas import (
    FOURIER,
    ITEM_BYTES,
    ConvolutionProblem,
    Formula,
    Lengths,
    Terms,
    Trial,
    Workspace,
    all_copies,
    by_median,
    by_shares,
    by_votes,
    evaluate,
    lengths,
    needed_copies,
    terms,
    transform_bytes,
    transforms,
)
from ullage.virtual.cudnn.network import read_network
from ullage.virtual.cudnn.plans import DATA_FOLDER as DATA_FOLDER
from ullage.virtual.cudnn.plans import MULTIPROCESSORS as MULTIPROCESSORS
from ullage.virtual.releases import MEASURED_CUDNN

# The table and the trees. `ullage lab train convolutions` writes them; they are read at the first convolution.

TABLE = f"convolution_table-cudnn{MEASURED_CUDNN}-sm_90.gz"
PLAN_NETWORK = f"plan_network-cudnn{MEASURED_CUDNN}-sm_90.npz"  # cuDNN's plan, and the workspace of a plan
PLAN_TREES = f"plan_trees-cudnn{MEASURED_CUDNN}-sm_90.xz"
TRIAL_TABLE, TRIAL_TREES = "trial_table.gz", "trial_trees.xz"
OTHERS, TRANSFORM = "o", "t"  # the largest plan without Fourier transforms, and whether there is one with them
ASKED = ((7, 5), (8, 0), (8, 6), (8, 9), MEASURED_CAPABILITY, (12, 0))  # cuDNN answers for no other architecture


def trees_of(capability: tuple[int, int] | None) -> str:
    """Return the file of the trees for an architecture. An architecture without cuDNN's answers uses those of the H200,
    which exist only if grown: Ullage ships a network for it."""
    major, minor = capability if capability in ASKED else MEASURED_CAPABILITY
    return f"convolution_trees-cudnn{MEASURED_CUDNN}-sm_{major}{minor}.xz"


# 1 in 17.7 million problems that were never measured has the hash of one of the 996,558 in the table.
HASH_BITS = 44


use_table = True  # False: guesses only, for a benchmark on models that were never measured
COPIED, PARTS = "c", "p"  # questions that the trees of a plan answer: which formula, and how many parts
_LEAST_LIKELY = 0.01  # share of a plan that still counts


class WorkspaceTable(NamedTuple):
    """Sorted hashes of problems and their workspaces; the header names the GPU, driver and libraries."""

    header: dict[str, Any]
    hashes: Any
    sizes: Any


class WorkspaceTrees(NamedTuple):
    """The trees of one direction, joined end to end in depth-first order; a leaf has feature -1."""

    roots: list[int]
    feature: memoryview
    threshold: memoryview
    right: memoryview  # a node's left child follows it; for a leaf, the place of its first vote
    ends: memoryview  # of the votes of a leaf
    labels: memoryview
    shares: memoryview
    formulas: list[Formula]


def hash_of(problem: ConvolutionProblem) -> int:
    """Return a hash that is stable between runs."""
    text = repr(tuple(problem)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - HASH_BITS)


@cache
def tables(folder: Path, kind: str = "convolution") -> dict[tuple[tuple[int, ...], int], Path]:
    """Return the tables in a folder by compute capability and number of multiprocessors; read only headers."""
    paths = sorted(folder.glob(f"{kind}_table*.gz"))
    headers = map(read_header, paths)
    cards = [(tuple(header["compute_capability"]), header["multiprocessors"]) for header in headers]
    return dict(zip(cards, paths, strict=True))


@cache
def table(path: Path) -> WorkspaceTable:
    np, file = needed_numpy(), read_arrays(path)
    hashes = np.cumsum(file["steps"], dtype=np.uint64)
    sizes = np.zeros(len(hashes), dtype=np.uint64)
    sizes[file["nonzero"].view(bool)] = file["sizes"]
    return WorkspaceTable(header_of(file[HEADER]), hashes, sizes)


def measured(
    problem: ConvolutionProblem,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
    kind: str = "convolution",
) -> int | None:
    """Return the measured workspace of this problem on this kind of GPU; of `kind` "trial", the largest plan's."""
    if not use_table or capability is None or multiprocessors is None:
        return None
    path = tables(DATA_FOLDER, kind).get((tuple(capability), multiprocessors))
    if path is None:
        return None
    known, wanted = table(path), needed_numpy().uint64(hash_of(problem))
    place = int(known.hashes.searchsorted(wanted))
    is_known = place < len(known.hashes) and known.hashes[place] == wanted
    return int(known.sizes[place]) if is_known else None


def features(problem: ConvolutionProblem) -> list[int]:
    """Return whole numbers that may decide cuDNN's choice: sizes, alignment, and the matrix product of a call.

    Trees use a feature's place, so names may change and places may not.
    """
    size = lengths(problem)
    batch, inner, outer, groups, item = size.batch, size.inner, size.outer, size.groups, size.item
    rows, source_rows, depth = batch * size.out_pixels, batch * size.pixels, inner * size.taps
    tiles = -(-rows // 128) * -(-outer // 128) * groups
    filter_tiles = -(-outer // 128) * -(-depth // 128) * groups
    data_tiles = -(-source_rows // 128) * -(-inner // 128) * groups
    products = rows * outer * groups * depth
    source_bytes, out_bytes = source_rows * inner * groups * item, rows * outer * groups * item
    weight_bytes = outer * groups * depth * item
    tensors, transform = source_bytes + out_bytes + weight_bytes, transform_bytes(problem)
    product_of_matrices = size.taps == 1 and size.stride[2] == 1 and size.padding[2] == 0
    named = {
        "type": size.kind,
        "channels_last": size.last,
        "batch": batch,
        "group_inputs": inner,  # channels of a group
        "group_outputs": outer,
        "groups": groups,
        "source_height": size.source[1],
        "source_width": size.source[2],
        "source_pixels": size.pixels,
        "out_pixels": size.out_pixels,
        "filter_height": size.filter[1],
        "filter_width": size.filter[2],
        "filter_taps": size.taps,  # elements of the filter in one channel
        "stride": size.stride[2],
        "padding": size.padding[2],
        "dilation": size.dilation[2],
        "dimensions": len(problem.source),
        "group_inputs_mod_8": inner % 8,
        "group_outputs_mod_8": outer % 8,
        "out_pixels_alignment": _multiple(size.out_pixels),
        "group_inputs_alignment": min(inner & -inner, 256),
        "group_outputs_alignment": min(outer & -outer, 256),
        "out_rows": rows,  # rows of the output as a matrix
        "source_rows": source_rows,
        "depth": depth,  # of the forward pass as a matrix product
        "data_depth": outer * size.taps,  # the same of the data gradient
        "forward_tiles_128": tiles,  # tiles of 128 by 128 that cover the result
        "filter_tiles_128": filter_tiles,
        "data_tiles_128": data_tiles,
        "source_bytes": source_bytes,
        "out_bytes": out_bytes,
        "weight_bytes": weight_bytes,
        "products_in_4096s": min(products >> 12, 2**31 - 1),  # multiplications
        "inputs_per_1000_outputs": 1000 * inner // outer,
        "rows_per_100_outputs": 100 * rows // (outer * groups),
        "most_channels": max(inner, outer) * groups,
        "fewest_channels": min(inner, outer) * groups,
        "forward_tiles_256_by_128": -(-rows // 256) * -(-outer // 128) * groups,
        "forward_tiles_64": -(-rows // 64) * -(-outer // 64) * groups,
        "data_tiles_64": -(-source_rows // 64) * -(-inner // 64) * groups,
        "filter_tiles_64": -(-outer // 64) * -(-depth // 64) * groups,
        "source_pixels_alignment": _multiple(size.pixels),
        "channels_alignment": _multiple(inner | outer),  # of both numbers of channels, up to 16
        "all_lengths_alignment": _multiple(inner | outer | size.pixels | size.out_pixels),
        "padded_inputs_per_1000": 1000 * size.wide // inner,  # the cost of padding to 16 bytes
        "padded_outputs_per_1000": 1000 * size.tall // outer,
        "padded_weight_per_1000": 1000 * size.wide * size.tall // (inner * outer),
        "tiles_filled_per_1000": 1000 * tiles // round_up(tiles, MULTIPROCESSORS),  # how well tiles fill an H200
        "products_per_byte": products // tensors,
        "products_per_source_byte": products // source_bytes,
        "products_per_out_byte": products // out_bytes,
        "is_matrix_product": int(product_of_matrices),  # a filter of one tap, without stride and padding
        "group_inputs_times_outputs": inner * outer,
        "group_inputs_plus_outputs": inner + outer,
        "batch_times_height": batch * size.source[1],
        "out_width": size.out[2],
        "transform_kib": transform >> 10,  # by Fourier transforms, see `transform_bytes`
        "transform_per_100_copies": 100 * transform // tensors,
        "source_depth": size.source[0],  # 1 in two dimensions
        "filter_depth": size.filter[0],
        "out_height": size.out[1],
        "forward_tiles_in_wave": tiles % MULTIPROCESSORS,  # of the last wave, with a tile on every multiprocessor
        "data_tiles_in_wave": data_tiles % MULTIPROCESSORS,
        "filter_tiles_in_wave": filter_tiles % MULTIPROCESSORS,
        "needed_kib": needed_copies(problem) >> 10,  # copies that tensor cores need, see `needed_copies`
    }
    return list(named.values())


def _multiple(number: int) -> int:
    """Return the largest power of two, up to 16, that divides the number."""
    return min(number & -number, 16)


@cache
def trees(path: Path) -> dict[str, WorkspaceTrees]:
    """Read the trees in a file by purpose: a direction, and for trials one of their two questions."""
    if not path.exists():
        return {}
    by_purpose, np, file = {}, needed_numpy(), read_arrays(path)
    for direction in [name.removesuffix("_roots") for name in file if name.endswith("_roots")]:
        part = {name: file[f"{direction}_{name}"] for name in ("roots", "feature", "step", "labels", "shares")}
        leaf, step = part["feature"] < 0, part["step"]
        ends = np.cumsum(np.where(leaf, step, 0))
        right = np.where(leaf, ends - step, np.arange(len(step)) + step)
        threshold = np.zeros(len(step), dtype=np.int64)
        threshold[~leaf] = file[f"{direction}_thresholds"][file[f"{direction}_threshold"]]
        formulas = [Formula(*row) for row in file[f"{direction}_formulas"].tolist()]
        columns: dict[str, Any] = {"threshold": threshold, "right": right, "ends": ends}
        columns |= {name: part[name] for name in ("feature", "labels", "shares")}
        views: dict[str, Any] = {name: memoryview(column) for name, column in columns.items()}  # quick to index
        by_purpose[direction] = WorkspaceTrees(roots=part["roots"].tolist(), formulas=formulas, **views)
    return by_purpose


def votes(problem: ConvolutionProblem, file: str, question: str = "") -> list[tuple[Formula, float]]:
    grown = trees(DATA_FOLDER / file).get(problem.direction + question)
    if grown is None:
        return []
    return [(grown.formulas[label], share) for label, share in _walked(grown, features(problem)).items()]


def _walked(grown: WorkspaceTrees, values: Sequence[int]) -> dict[int, float]:
    """Return the labels in the leaves that values reach, with their shares."""
    feature, threshold, right = grown.feature, grown.threshold, grown.right
    shares: dict[int, float] = {}
    for node in grown.roots:
        while (place := feature[node]) >= 0:
            node = node + 1 if values[place] <= threshold[node] else right[node]
        for vote in range(right[node], grown.ends[node]):
            label = grown.labels[vote]
            shares[label] = shares.get(label, 0) + grown.shares[vote] / 255
    return shares


def sizes_by_plans(
    problem: ConvolutionProblem, parts: Terms, tf32: bool = True, deterministic: bool = False
) -> list[tuple[int, float]] | None:
    """Return the workspaces of the plans that the network considers likely, with their shares; `None` without a
    network. The first is that of the likeliest plan."""
    network = read_network(DATA_FOLDER / PLAN_NETWORK, problem.direction)
    if network is None:
        return None
    grown, size = trees(DATA_FOLDER / PLAN_TREES), lengths(problem)
    sizes = list[tuple[int, float]]()
    for plan, likely in network.plans(problem, _LEAST_LIKELY, tf32, deterministic):
        cut = plans.grid(plan, size, problem.channels_last or size.batch == 1)
        name = f"{problem.direction}{plan.engine}"
        if name + COPIED not in grown:
            continue
        for count, share in _parts(plan, grown.get(name + PARTS), size, cut):
            partial = plans.partial_bytes(plan, cut, count)
            values, copied = plans.tree_inputs(plan, size, cut, count), grown[name + COPIED]
            for label, each in _largest_first(_walked(copied, values)):
                formula = copied.formulas[label]
                if formula.buffer != FOURIER or parts.buffers[FOURIER]:
                    sizes.append((partial + evaluate(formula, parts), likely * share * each))
    return sizes


def _parts(
    plan: plans.EnginePlan, grown: WorkspaceTrees | None, size: Lengths, cut: plans.Grid
) -> list[tuple[int, float]]:
    """Return the numbers of parts into which a plan may split its sums, with their shares."""
    if grown is None:
        return [(plans.parts_by(plan, cut, 0), 1.0)]
    if plan.engine in plans.PERSISTENT[plan.direction]:
        values = plans.tree_inputs(plan, size, cut, 0)
    elif plan.engine in plans.PRODUCT[plan.direction]:
        values = [*plans.product_inputs(size, plan.direction), *plans.part_knobs(plan)]
    else:
        values = [*size.row, *plans.part_knobs(plan)]
    shares: dict[int, float] = {}
    for named, share in _walked(grown, values).items():
        count = plans.parts_by(plan, cut, named)
        shares[count] = shares.get(count, 0.0) + share / len(grown.roots)
    return _largest_first(shares)


def _largest_first(shares: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(shares.items(), key=lambda pair: -pair[1])


def guess(
    problem: ConvolutionProblem, capability: tuple[int, int] | None, tf32: bool = True, deterministic: bool = False
) -> Workspace:
    """Guess the workspace of a problem on an architecture: by the network, or else by trees, which do not know excluded
    plans."""
    parts = terms(problem)
    if capability not in ASKED or capability == MEASURED_CAPABILITY:
        named = sizes_by_plans(problem, parts, tf32, deterministic)
        if named:
            return by_shares(_in_all(named), named[0][0], parts)
    return by_votes(votes(problem, trees_of(capability)), parts)


def _in_all(named: list[tuple[int, float]]) -> dict[int, float]:
    """Return shares by size that add up to 1."""
    total, shares = sum(share for _, share in named), dict[int, float]()
    for size, share in named:
        shares[size] = shares.get(size, 0.0) + share / total
    return shares


@lru_cache(maxsize=65536)
def workspace(
    problem: ConvolutionProblem,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
    tf32: bool = True,
    deterministic: bool = False,
) -> Workspace:
    """Return the workspace of a problem: measured for this kind of GPU, or else guessed, also if `allow_tf32=False` or
    `deterministic=True` probably excludes the plan that was measured.

    For an architecture without cuDNN's answers, the larger size allows for copies of all tensors in another
    layout: architectures differ for every second problem. Double precision, which was not measured, is assumed to need
    none.
    """
    if problem.kind not in ITEM_BYTES:
        # Double precision was not measured. A bound allows for copies of all tensors.
        tensors = sum(map(prod, (problem.source, problem.weight, problem.out)))
        return Workspace(0, 0, guessed=True, surprise=tensors * 8 // 2)
    known = measured(problem, capability, multiprocessors)
    if known is not None:
        excludes = deterministic or not tf32
        network = read_network(DATA_FOLDER / PLAN_NETWORK, problem.direction) if excludes else None
        first = None if network is None else network.plans(problem, 1.0)[0][0]
        if first is None or first.allowed(problem.kind, tf32, deterministic):
            return Workspace(known, known)
    guessed = guess(problem, capability, tf32, deterministic)
    if capability in ASKED:
        return guessed
    return guessed._replace(larger=max(guessed.larger, all_copies(terms(problem))))


_SMALL_FILTER = 3  # pixels along a side


def _but_transforms(
    problem: ConvolutionProblem, parts: Terms, first: Workspace, tf32: bool, deterministic: bool
) -> Workspace:
    """Return the first plan, or the likeliest other one if it uses Fourier transforms. Such a plan moves many times the
    tensors, whatever the filter. The others have more to compute with larger filters."""
    by_transforms = parts.buffers[FOURIER]
    if max(problem.weight[2:]) > _SMALL_FILTER or not by_transforms or not _near(first.size, by_transforms):
        return first
    named = sizes_by_plans(problem, parts, tf32, deterministic) or []
    left = [(size, share) for size, share in named if not _near(size, by_transforms)]
    return by_shares(_in_all(left), left[0][0], parts) if left else first


def _near(size: int, other: int) -> bool:
    """Check whether two sizes belong to one plan: its filters may be copied, too."""
    return abs(size - other) <= 0.01 * other


@lru_cache(maxsize=65536)
def trial(
    problem: ConvolutionProblem,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
    tf32: bool,
    deterministic: bool,
) -> Trial:
    """Return the plans that `cudnn.benchmark` tries for a problem: by cuDNN for this kind of GPU, or else by the trees.

    The fastest plan is assumed to be cuDNN's first: its memory was the same for 83% of the measured problems. None of
    57 plans with Fourier transforms was the fastest, with filters of at most 3x3 pixels. The bound allows for a plan
    that copies all tensors. Not covered: switches that exclude the largest plan, which is rare.
    """
    first = workspace(problem, capability, multiprocessors, tf32, deterministic)
    if problem.kind not in ITEM_BYTES:
        return Trial((), first.surprise, first)
    parts = terms(problem)
    fastest = _but_transforms(problem, parts, first, tf32, deterministic)
    winner = fastest._replace(larger=max(fastest.larger, all_copies(parts)), guessed=True)
    known = measured(problem, capability, multiprocessors, "trial")
    others = by_median(votes(problem, TRIAL_TREES, OTHERS), parts)
    transform = by_votes(votes(problem, TRIAL_TREES, TRANSFORM) if transforms(problem) else [], parts)
    guesses = {first.size, others.size, transform.size} - {0}
    if known is not None:
        sizes = {known, *(size for size in guesses if size < known)}
        return Trial(tuple(sorted(sizes, reverse=True)), known, winner, guessed=False)
    return Trial(tuple(sorted(guesses, reverse=True)), max(first.size, others.larger, transform.larger), winner)
