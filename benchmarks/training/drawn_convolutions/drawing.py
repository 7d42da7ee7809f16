"""Convolutions drawn at random, the same for the same seed: over one, two and three dimensions, any numbers of
channels, groups, strides, dilations, three types, two layouts. From a seed on, half of them are like layers of
networks: lengths that are halved on the way, channels that stay or double, filters that keep the length. They are rows
of whole numbers, as `Lengths.row` is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ullage.virtual.cudnn.formulas import KINDS, ConvolutionProblem, Lengths
from ullage.virtual.cudnn.network import network_inputs

CHUNK = 1000  # problems of a seed
WIDER_SEED = 9_000_000  # from here on: more channels in a group, and more products of matrices
PRODUCTS = 0.12  # of the wider ones
LAYERS_SEED = 10_000_000  # from here on: half of them like layers of networks
MORE_LAYERS_SEED = 40_000_000  # from here on: three quarters of them
ITEM = np.array([4, 2, 2])
MOST_BYTES = 6 << 30
SIDES = np.array([4, 7, 8, 14, 16, 28, 32, 56, 64, 96, 112, 128, 160, 192, 224, 256])


def _log(r: Any, n: int, least: int, most: int) -> Any:
    return np.floor(np.exp(r.uniform(np.log(least), np.log(most + 1), n))).astype(np.int64)


def _pick(r: Any, n: int, values: list[int], weights: list[float]) -> Any:
    shares = np.array(weights, float)
    return np.array(values)[r.choice(len(values), n, p=shares / shares.sum())]


def _channels(r: Any, n: int, most: int = 2048) -> Any:
    any_ = _log(r, n, 1, min(most, 1200))
    eights = np.maximum(8, _log(r, n, 8, most) // 8 * 8)
    twos = 2 ** r.integers(0, int(np.log2(most)) + 1, n)
    even = np.maximum(2, _log(r, n, 2, most) // 2 * 2)
    return np.choose(r.choice(4, n, p=[0.42, 0.3, 0.18, 0.1]), [any_, eights, twos, even])


def _rows(r: Any, n: int, wider: bool) -> Any:
    dims = _pick(r, n, [2, 1, 3], [0.66, 0.14, 0.2])
    kind = _pick(r, n, [0, 1, 2], [0.5, 0.25, 0.25])
    last = (r.random(n) < 0.3).astype(np.int64)
    last[dims == 1] = 0
    batch = np.where(r.random(n) < 0.5, 2 ** r.integers(0, 9, n), _log(r, n, 1, 256))
    inner, outer = _channels(r, n), _channels(r, n)
    few = r.random(n) < 0.08
    inner = np.where(few, r.integers(1, 5, n), inner)
    outer = np.where(r.random(n) < 0.3, inner, outer)
    grouped = r.random(n)
    depthwise, several = grouped < 0.12, (grouped >= 0.12) & (grouped < 0.25)
    groups = np.where(depthwise, _channels(r, n), np.ones(n, np.int64))
    inner = np.where(depthwise, 1, inner)
    outer = np.where(depthwise, np.where(r.random(n) < 0.85, 1, r.integers(2, 5, n)), outer)
    most_groups, most_channels = (8, 1024) if wider and r.random() < 0.5 else (64, 256)
    groups = np.where(several, _log(r, n, 2, most_groups), groups)
    inner = np.where(several, _channels(r, n, most_channels), inner)
    outer = np.where(several, np.where(r.random(n) < 0.7, inner, _channels(r, n, most_channels)), outer)
    common = r.random(n) < 0.4
    side = np.where(common, r.choice(SIDES, n), _log(r, n, 1, 320))
    other = np.where(r.random(n) < 0.75, side, _log(r, n, 1, 320))
    source = np.stack([np.ones(n, np.int64), side, other], 1)
    one, three = dims == 1, dims == 3
    lines, boxes = one.sum(), three.sum()
    source[one] = np.stack([np.ones(lines), np.ones(lines), _log(r, lines, 8, 16000)], 1)
    cube = _log(r, boxes, 2, 96)
    source[three] = np.stack(
        [
            np.where(r.random(boxes) < 0.65, cube, _log(r, boxes, 1, 64)),
            cube,
            np.where(r.random(boxes) < 0.8, cube, _log(r, boxes, 2, 128)),
        ],
        1,
    )
    weights = [0.28, 0.38, 0.1, 0.06, 0.04, 0.05, 0.02, 0.015, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.005]
    taps = _pick(r, n, [1, 3, 5, 7, 2, 4, 9, 11, 6, 8, 13, 15, 16, 21, 31], weights)
    way = r.random(n)
    long = _pick(r, n, [2, 3, 4, 5, 7, 9, 11, 15, 31], [0.05, 0.35, 0.05, 0.2, 0.15, 0.08, 0.05, 0.05, 0.02])
    high = np.where(way < 0.06, 1, np.where(way < 0.12, long, taps))
    wide = np.where(way < 0.06, long, np.where(way < 0.12, 1, np.where(way < 0.15, long, taps)))
    filters = np.stack([np.ones(n, np.int64), high, wide], 1)
    weights = [0.2, 0.25, 0.12, 0.1, 0.06, 0.05, 0.03, 0.03, 0.05, 0.03, 0.02, 0.02, 0.02, 0.01, 0.01]
    flat = _pick(r, lines, [1, 3, 5, 7, 9, 15, 31, 2, 4, 8, 10, 16, 25, 41, 64], weights)
    filters[one] = np.stack([np.ones(lines), np.ones(lines), flat], 1)
    taps = _pick(r, boxes, [1, 3, 5, 7, 2, 4, 6, 9], [0.18, 0.55, 0.07, 0.04, 0.07, 0.06, 0.01, 0.02])
    way = r.random(boxes)
    deep = np.where(way < 0.15, _pick(r, boxes, [2, 3, 5, 7], [0.2, 0.5, 0.2, 0.1]), taps)
    thin = (way > 0.1) & (way < 0.15)
    filters[three] = np.stack([np.where(way < 0.1, 1, deep), np.where(thin, 1, taps), np.where(thin, 1, taps)], 1)
    stride = _pick(r, n, [1, 2, 3, 4, 8, 16], [0.7, 0.22, 0.03, 0.03, 0.01, 0.01])
    stride = np.where(r.random(n) < 0.04, filters[:, 2], stride)
    weights = [0.4, 0.1, 0.2, 0.06, 0.1, 0.04, 0.05, 0.03, 0.02]
    dilation = np.where(r.random(n) < 0.87, 1, _pick(r, n, [2, 3, 4, 6, 8, 12, 16, 32, 64], weights))
    dilation = np.where((filters.max(1) > 1) & (stride == 1), dilation, 1)
    way = r.random(n)[:, None]
    free = np.stack([r.integers(0, np.maximum(filters[:, i], 1) + 1) for i in range(3)], 1)
    strides, dilations = np.stack([stride] * 3, 1), np.stack([dilation] * 3, 1)
    strides[r.random(n) < 0.06, 1] = 1
    strides[three & (r.random(n) < 0.15), 0] = 1
    missing = np.stack([dims < 3, dims < 2, np.zeros(n, bool)], 1)
    strides[missing], dilations[missing] = 1, 1
    paddings = np.where(way < 0.76, dilations * (filters - 1) // 2, np.where(way < 0.9, 0, free))
    paddings[missing] = 0
    if wider:
        alone = (r.random(n) < PRODUCTS) & (groups == 1)
        filters[alone], strides[alone], dilations[alone], paddings[alone] = 1, 1, 1, 0
        last[alone & (dims > 1) & (r.random(n) < 0.8)] = 1
        batch[alone & (last == 0)] = 1
    head = np.stack([dims, kind, last, batch, inner, outer, groups], 1)
    return np.concatenate([head, source, filters, strides, paddings, dilations], 1).astype(np.int64)


def _layers(r: Any, n: int) -> Any:
    """Draw rows like layers of networks."""
    dims = _pick(r, n, [2, 1, 3], [0.82, 0.09, 0.09])
    flat, line, box = dims == 2, dims == 1, dims == 3
    kind = _pick(r, n, [0, 1, 2], [0.4, 0.3, 0.3])
    last = ((r.random(n) < 0.3) & ~line).astype(np.int64)
    batch = np.where(r.random(n) < 0.6, r.integers(1, 65, n), 2 ** r.integers(0, 9, n))
    step = np.where(r.random(n) < 0.45, 8, 1)
    inner, other = (np.maximum(step, _log(r, n, 4, 1024) // step * step) for _ in range(2))
    ratio = r.choice(9, n, p=[0.36, 0.13, 0.13, 0.05, 0.05, 0.04, 0.04, 0.05, 0.15])
    related = [inner, 2 * inner, inner // 2, 4 * inner, inner // 4, 3 * inner, inner // 3, (3 * inner) // 2, other]
    outer = np.maximum(1, np.choose(ratio, related))
    image = r.random(n) < 0.08
    inner = np.where(image, r.integers(1, 5, n), inner)
    way = r.random(n)
    depthwise, several = way < 0.08, (way >= 0.08) & (way < 0.18)
    count = _pick(r, n, [2, 4, 8, 16, 32], [0.3, 0.2, 0.25, 0.1, 0.15])
    groups = np.where(depthwise, np.maximum(2, inner), np.where(several, count, 1))
    inner, outer = (np.where(depthwise, 1, np.where(several, -(-each // count), each)) for each in (inner, outer))
    taps = _pick(r, n, [3, 1, 5, 7, 2, 4, 9, 11, 15], [0.47, 0.27, 0.08, 0.06, 0.03, 0.04, 0.03, 0.01, 0.01])
    stride = _pick(r, n, [1, 2, 4], [0.77, 0.2, 0.03])
    even = taps % 2 == 0
    stride = np.where(even, np.where(r.random(n) < 0.9, np.where(r.random(n) < 0.8, 2, taps), 1), stride)
    rates = _pick(r, n, [2, 3, 4, 6, 8, 12, 18], [0.4, 0.05, 0.25, 0.1, 0.1, 0.07, 0.03])
    dilation = np.where((taps > 1) & (stride == 1) & ~even & (r.random(n) < 0.12), rates, 1)
    halved = 2 ** r.integers(0, 6, n)
    side = np.maximum(1, _log(r, n, 24, 320) // halved)
    beside = np.where(r.random(n) < 0.85, side, np.maximum(1, _log(r, n, 24, 320) // halved))
    one = np.ones(n, np.int64)
    long, cube = np.maximum(8, _log(r, n, 100, 20000) // halved), np.maximum(1, _log(r, n, 8, 96) // (halved % 7 + 1))
    depth = np.where(r.random(n) < 0.75, cube, np.maximum(1, _log(r, n, 4, 64)))
    source = np.where(flat[:, None], np.stack([one, side, beside], 1), np.stack([depth, cube, cube], 1))
    source = np.where(line[:, None], np.stack([one, one, long], 1), source)
    oblong = r.random(n) * flat
    high = np.where((oblong > 0) & (oblong < 0.05), 1, taps)
    wide = np.where((oblong >= 0.05) & (oblong < 0.1), 1, taps)
    missing = np.stack([~box, line, np.zeros(n, bool)], 1)
    filters = np.where(missing, 1, np.stack([taps, high, wide], 1))
    filters[box & (r.random(n) < 0.15), 0] = 1
    strides, dilations = (np.where(missing, 1, np.stack([each] * 3, 1)) for each in (stride, dilation))
    strides[box & (r.random(n) < 0.15), 0] = 1
    same_size = np.where(even[:, None], (filters - 1) // 2, dilations * (filters - 1) // 2)
    paddings = np.where((r.random(n) < 0.9)[:, None] & ~missing, same_size, 0)
    head = np.stack([dims, kind, last, batch, inner, outer, groups], 1)
    return np.concatenate([head, source, filters, strides, paddings, dilations], 1).astype(np.int64)


def outputs(rows: Any) -> Any:
    """Return the lengths of the outputs."""
    return np.stack(Lengths(rows.T).out, 1)


def draw(seed: int, count: int = CHUNK) -> Any:
    """Rows of problems that PyTorch would give to cuDNN."""
    r, parts, have = np.random.default_rng(seed), [], 0
    while have < count:
        rows = _rows(r, 2 * count, seed >= WIDER_SEED)
        if seed >= LAYERS_SEED:
            layers = count if seed < MORE_LAYERS_SEED else 3 * count // 2
            rows = r.permutation(np.concatenate([rows[: 2 * count - layers], _layers(r, layers)]))
        out = outputs(rows)
        batch, inner, outer, groups = rows[:, 3], rows[:, 4], rows[:, 5], rows[:, 6]
        taps = rows[:, 10:13].prod(1)
        source = batch * inner * groups * rows[:, 7:10].prod(1)
        result = batch * outer * groups * np.maximum(out, 0).prod(1)
        total = (source + inner * outer * groups * taps + result) * ITEM[rows[:, 1]]
        work = result * inner * taps
        native = (inner == 1) & (groups > 1) & (rows[:, 2] == 0) & (rows[:, 1] != 1) & (rows[:, 0] < 3)
        rows[native, 1] = 1  # PyTorch has kernels of its own for other types
        good = (out.min(1) > 0) & (total < MOST_BYTES) & (np.maximum(source, result) < 2**31) & (work < 2e13)
        good &= (inner * groups < 8192) & (outer * groups < 8192)
        small = (total < 1 << 20) & (r.random(len(rows)) < 0.7)
        rows = rows[good & ~small]
        parts.append(rows)
        have += len(rows)
    rows = np.concatenate(parts)[:count]
    rows[(rows[:, 0] == 2) & (rows[:, 8] == 1) & (rows[:, 11] == 1), 0] = 1  # as PyTorch gives one dimension to cuDNN
    return rows


def inputs_of(rows: Any, direction: str) -> Any:
    """Return the network's inputs for drawn rows."""
    columns = network_inputs(Lengths(rows.T), direction, lambda values: np.log2(np.maximum(values, 1)), np.minimum)
    return np.stack([np.asarray(column, np.float32) for column in columns], 1)


def problems_of(rows: Any, direction: str) -> list[ConvolutionProblem]:
    """Return drawn rows as problems."""
    problems = []
    for row, out in zip(rows.tolist(), outputs(rows).tolist(), strict=True):
        dims, kind, last, batch, inner, outer, groups = row[:7]
        n = 3 if dims == 3 else 2
        source, taps, stride, padding, dilation = (tuple(row[7 + 3 * i : 10 + 3 * i][-n:]) for i in range(5))
        sizes = (batch, inner * groups, *source), (outer * groups, inner, *taps), (batch, outer * groups, *out[-n:])
        settings = stride, padding, dilation, groups, KINDS[kind], bool(last)
        problems.append(ConvolutionProblem(direction, *sizes, *settings))
    return problems
