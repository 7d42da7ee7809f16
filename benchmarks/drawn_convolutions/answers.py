"""cuDNN's answers about drawn problems, as what a network and trees learn."""

from __future__ import annotations

import io
import json
import lzma
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

from drawn_convolutions.drawing import CHUNK, draw
from ullage.research.cudnn_tables import table
from ullage.virtual.kernels.cudnn import plans

UNSURE_SEED = 8_000_000  # from here on, only what the network of before was not sure of was asked
SMALL = 4096  # bytes of a workspace that holds no part of a result
MOST_PARTS = 4096
NEAR_BYTES = 48  # beside the parts of a product


def answers(folder: Path) -> tuple[Any, list[Any], Any, Any]:
    """Seeds, names, and of each direction the number of the name and the workspace."""
    names, seeds, numbers, sizes = dict[Any, int](), [], [], []
    for path in sorted(folder.glob("answers*.npz.xz")):
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
            listed = [(engine, tuple(map(tuple, knobs))) for engine, knobs in json.loads(bytes(file["names"]))]
            places = np.array([*(names.setdefault(name, len(names)) for name in listed), -1])
            seeds.append(file["seeds"])
            numbers.append(places[file["name"]])
            sizes.append(file["size"])
    return np.concatenate(seeds), list(names), np.concatenate(numbers, 1), np.concatenate(sizes, 1)


def without_parts(name: Any) -> tuple[tuple[int, tuple[tuple[int, int], ...]], int]:
    """A name without the number of parts of a sum, and that number."""
    engine, knobs = name
    left, parts = dict(knobs), 0
    if plans.SPLIT_K in left:
        parts = left.pop(plans.SPLIT_K)
    if plans.SLICES in left:
        parts = left.pop(plans.SLICES)
    if plans.SPLIT_K_BUFFERS in left:
        parts = max(left[plans.SPLIT_K_BUFFERS], 1)
        left[plans.SPLIT_K_BUFFERS] = int(left[plans.SPLIT_K_BUFFERS] >= 0)
    return (engine, tuple(sorted(left.items()))), parts


class Labels:
    """The answers of a direction: the plans, the commonest first, and of each problem that was asked its row, the seed
    it was drawn with, its plan, the parts of its sums, and its workspace."""

    def __init__(self, folder: Path, direction: str, workers: int) -> None:
        seeds, names, numbers, sizes = answers(folder)
        place = table.DIRECTIONS.index(direction)
        asked = numbers[place] >= 0
        number, self.sizes = numbers[place][asked], sizes[place][asked]
        self.seeds, self.rows = np.repeat(seeds, CHUNK)[asked], drawn(seeds, asked, workers)
        cut = [without_parts(name) for name in names]
        self.parts = np.array([parts for _, parts in cut])[number]
        known = {plan: n for n, plan in enumerate(dict.fromkeys(plan for plan, _ in cut))}
        self.plan = np.array([known[plan] for plan, _ in cut])[number]
        counts = np.bincount(self.plan, minlength=len(known))
        order = np.argsort(-counts, kind="stable")
        places = np.empty(len(known), np.int64)
        places[order] = np.arange(len(order))
        self.plan, self.plans = places[self.plan], [list(known)[n] for n in order if counts[n]]


def unanswered(folder: Path, direction: str, workers: int) -> tuple[Any, Any]:
    """Rows of problems in 16 bits, of the seeds that were asked whole, and whether cuDNN's heuristics named no plan."""
    seeds, _, numbers, _ = answers(folder)
    whole = np.repeat(seeds < UNSURE_SEED, CHUNK)
    rows = drawn(seeds, whole, workers)
    half = rows[:, 1] > 0
    return rows[half], numbers[table.DIRECTIONS.index(direction)][whole][half] < 0


def product_parts(direction: str, rows: Any, sizes: Any) -> Any:
    """What workspaces of products of matrices have room for, as the trees name it (`plans.partial_bytes`). Where tensor
    cores cannot write the result, a copy of that comes on top."""
    inner, outer, samples = rows[:, 4], rows[:, 5], rows[:, 3] * rows[:, 7:10].prod(1)
    high, across, _ = plans.matrix(direction, inner, outer, samples)
    copy = high * across * np.where(rows[:, 1] > 0, 2, 4)
    small = sizes < SMALL
    named, left = np.where(small, plans.PIECES * plans.MOST_UNITS + -(-sizes // 16), 0), ~small
    named = np.where(left, plans.KIBS * plans.MOST_UNITS + sizes // 1024, named)
    for unit, beside in (
        (plans.RESULTS, 0),
        (plans.BARE_RESULTS, 0),
        (plans.RESULTS, copy),
        (plans.TALL_RESULTS, 0),
        (plans.WIDE_RESULTS, 0),
    ):
        constant = plans.product_bytes(unit, 0, high, across)
        count = np.maximum(sizes - beside - constant, 0) // plans.result_bytes(unit, high, across)
        over = sizes - beside - plans.product_bytes(unit, count, high, across)
        found = left & (count > 0) & (count < MOST_PARTS) & (over >= 0) & (over < NEAR_BYTES)
        named[found] = unit * plans.MOST_UNITS + count[found]
        left &= ~found
    return named


def drawn(seeds: Any, asked: Any, workers: int) -> Any:
    """The rows of the problems that were asked."""
    tasks = list(zip(seeds.tolist(), asked.reshape(-1, CHUNK), strict=True))
    if workers == 1:
        return np.concatenate([_drawn(task) for task in tasks])
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return np.concatenate(pool.map(_drawn, tasks, chunksize=50))


def _drawn(task: tuple[int, Any]) -> Any:
    seed, asked = task
    return draw(seed)[asked].astype(np.int32)
