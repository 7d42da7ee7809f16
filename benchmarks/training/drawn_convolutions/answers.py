"""cuDNN's answers about drawn problems, as what a network and trees learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.units import round_up
from ullage.virtual.cudnn import plans
from ullage.virtual.cudnn.network import NO_PLAN_NAMED
from ullage_lab.train import workspaces as table

UNSURE_SEED = 20_000_000  # from here on, only what the network of before was not sure of was asked
NOT_ASKED, NO_ANSWER = -1, -2  # in place of a plan
SMALL = 4096  # bytes of a workspace that holds no part of a result
MOST_PARTS = 4096
NEAR_BYTES, NEAR_TILES = 48, 1536  # beside the parts of a product, as they are and in whole tiles


Plan = tuple[int, tuple[tuple[int, int], ...]]  # an engine and its knobs
NO_PLAN: Plan = (NO_PLAN_NAMED, ())


def as_plan(engine: int, knobs: Any) -> Plan:
    """A plan as JSON has it."""
    return engine, tuple((int(knob), value) for knob, value in knobs)


def without_parts(name: Any) -> tuple[Plan, int]:
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


class Piece(NamedTuple):
    """Problems of some seeds: their rows, and of each direction the numbers of the plans in a list, the parts of sums,
    and the workspaces."""

    seeds: Any  # of each row
    rows: Any
    plans: list[Plan]
    plan: Any
    parts: Any
    sizes: Any

    def write(self, path: Path) -> None:
        """Write it at once: whoever looks for new files finds whole ones."""
        listed = np.frombuffer(json.dumps(self.plans).encode(), np.uint8)
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **(self._asdict() | {"plans": listed}))
        path.with_suffix(".part").rename(path)


def read_piece(path: Path) -> Piece:
    """A file of `Piece.write`."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in Piece._fields}
    listed = json.loads(bytes(arrays["plans"]))
    return Piece(**(arrays | {"plans": [as_plan(*each) for each in listed]}))


def pieces(folder: Path) -> list[Path]:
    """The files of a folder."""
    return sorted(folder.glob("answers*.npz"))


class Labels:
    """The answers of a direction: the plans, the commonest first, and of each problem that was asked its row, the seed
    it was drawn with, its plan, the parts of its sums, and its workspace."""

    def __init__(self, folder: Path, direction: str) -> None:
        place, known = table.DIRECTIONS.index(direction), dict[Plan, int]()
        pieces_read: list[tuple[Any, ...]] = []
        for path in pieces(folder):
            piece = read_piece(path)
            valid = np.flatnonzero(piece.plan[place] >= 0)
            number = np.array([known.setdefault(plan, len(known)) for plan in piece.plans])[piece.plan[place][valid]]
            pieces_read.append(
                (piece.seeds[valid], piece.rows[valid], number, piece.parts[place][valid], piece.sizes[place][valid])
            )
        self.seeds, self.rows, plan, self.parts, self.sizes = (
            np.concatenate(each) for each in zip(*pieces_read, strict=True)
        )
        counts = np.bincount(plan, minlength=len(known))
        order = np.argsort(-counts, kind="stable")
        places = np.empty(len(known), np.int64)
        places[order] = np.arange(len(order))
        self.plan, self.plans = places[plan], [list(known)[n] for n in order if counts[n]]


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
        (plans.TILED_64, 0),
        (plans.TILED_128, 0),
    ):
        near = NEAR_TILES if unit in (plans.TILED_64, plans.TILED_128) else NEAR_BYTES
        constant = plans.product_bytes(unit, 0, high, across)
        count = np.maximum(sizes - beside - constant, 0) // plans.result_bytes(unit, high, across)
        over = sizes - beside - plans.product_bytes(unit, count, high, across)
        fits = left & (count > 0) & (count < MOST_PARTS) & (over >= 0) & (over < near)
        named[fits] = unit * plans.MOST_UNITS + count[fits]
        left &= ~fits
    return named


def aimed_at(direction: str, rows: Any, named: Any) -> Any:
    """What `product_parts` names, but with how many parts were aimed at where that gives the number: of all that would,
    the one that gives most of the other numbers, too."""
    samples = rows[:, 3] * rows[:, 7:10].prod(1)
    depth, step = plans.matrix(direction, rows[:, 4], rows[:, 5], samples)[2], np.where(rows[:, 1] > 0, 8, 4)
    unit, count = named // plans.MOST_UNITS, np.maximum(named % plans.MOST_UNITS, 2)
    shortest = round_up(-(-depth // count), step)
    longest = (depth - 1) // (count - 1) // step * step
    fits = (unit >= plans.RESULTS) & (named % plans.MOST_UNITS > 1) & (shortest <= longest) & (longest > 0)
    fits &= -(-depth // np.maximum(shortest, 1)) == count
    fewest = -(-depth // np.maximum(longest, 1))
    most = np.where(shortest > step, (depth - 1) // np.maximum(shortest - step, 1), MOST_PARTS)
    most = np.minimum(most, MOST_PARTS)
    fits &= fewest <= most
    aims, left = np.zeros(len(rows), np.int64), fits.copy()
    while left.any():
        ends = np.zeros(MOST_PARTS + 2, np.int64)
        np.add.at(ends, fewest[left], 1)
        np.add.at(ends, most[left] + 1, -1)
        best = int(np.cumsum(ends).argmax())
        served = left & (fewest <= best) & (best <= most)
        aims[served] = best
        left &= ~served
    return np.where(fits, (unit + plans.AIMED) * plans.MOST_UNITS + aims, named)
