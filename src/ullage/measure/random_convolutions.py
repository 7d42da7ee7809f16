"""Random convolutions, for rules that must hold for more than the layers of known models.

`random_layers` are like models' layers, of more kinds. In `arbitrary_configurations` channel counts, sides and batch
sizes are any whole numbers. Layers of known models mostly have channels that are multiples of 8; cuDNN's engines read
16 bytes at once, so it treats all other counts differently: copies padded to the next multiple, or another engine. A
rule that has seen round numbers only knows nothing of that. Every configuration is drawn by itself, so that any
beginning of the list is a fair sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ullage.measure.convolution_tasks import LAYOUTS, TYPES, Layer, native, operations, tensor_bytes

_KERNELS, _KERNEL_WEIGHTS = (1, 3, 5, 7, 2, 4), (48, 26, 12, 10, 2, 2)
_TYPE_WEIGHTS = {"f32": 44, "f16": 25, "bf16": 31}
_CHANNELS_LAST = 0.12
_LARGE = 0.15  # of the configurations; for the limits on bytes of the tensors and on operations
_SMALL_BYTES, _SMALL_KEPT = 3_000_000, 0.4  # most draws within the limits are small, most workspaces that matter not
_BYTES, _LARGE_BYTES = 500_000_000, 1_200_000_000
_OPERATIONS, _LARGE_OPERATIONS = 60e9, 160e9
_LARGEST_SIDE = 230


def random_layers(count: int) -> Iterator[Layer]:
    """Layers of no model: any channels, sizes, strides, groups, dilations; some transposed."""
    chance = random.Random(3)
    made = 0
    while made < count:
        layer = _random_layer(chance)
        if min(layer.output()) > 0:
            made += 1
            yield layer


def _random_layer(chance: random.Random) -> Layer:
    def channels() -> int:
        step = chance.choice((1, 2, 4, 8, 8, 16, 16, 32, 32, 64, 64))
        return max(1, round(2 ** chance.uniform(1.5, 11) / step)) * step

    kernel = chance.choice((1, 1, 1, 2, 3, 3, 3, 3, 4, 5, 7, 9, 11))
    high = kernel if chance.random() < 0.92 else chance.choice((1, 3, 5, 7))
    stride = chance.choice((1, 1, 1, 2, 2, 3, 4, kernel))
    dilation = chance.choice((1, 1, 1, 1, 1, 1, 2, 3)) if kernel > 1 else 1
    padding = chance.choice((dilation * (kernel - 1) // 2,) * 4 + (0,))
    upright = padding if high == kernel else dilation * (high - 1) // 2
    side = max(1, round(2 ** chance.uniform(0, 8.2)))
    wide = side if chance.random() < 0.85 else max(1, round(2 ** chance.uniform(0, 8.2)))
    entering, leaving = channels(), channels()
    groups = 1
    if chance.random() < 0.12:
        groups = chance.choice((2, 4, 8, 16, 32, 64))
        entering, leaving = -(-entering // groups) * groups, -(-leaving // groups) * groups
    elif chance.random() < 0.06:
        groups = leaving = entering
    transposed = groups == 1 and chance.random() < 0.06
    outer, inner = (entering, leaving) if transposed else (leaving, entering)
    return Layer(
        (entering, side, wide),
        (outer, inner // groups, high, kernel),
        (stride, stride),
        (upright, padding),
        (dilation, dilation),
        transposed,
        (0, 0),
        groups,
        False,
    )


def arbitrary_configurations(count: int, seed: int = 5) -> Iterator[tuple[Layer, int, int, int]]:
    """Layers with a batch size and the numbers of a type and a layout.

    >>> layer, batch, kind, layout = next(arbitrary_configurations(1))
    >>> min(layer.output()) > 0 and batch > 0
    True
    """
    chance = random.Random(seed)
    made = 0
    while made < count:
        layer, batch = _layer(chance), _batch(chance)
        kind = chance.choices(TYPES, list(_TYPE_WEIGHTS.values()))[0]
        layout = "cl" if chance.random() < _CHANNELS_LAST else "c"
        large = chance.random() < _LARGE
        if min(layer.output()) < 1 or native(layer, kind, layout):
            continue
        size = tensor_bytes(layer, batch, kind)
        if size > (_LARGE_BYTES if large else _BYTES) or (size < _SMALL_BYTES and chance.random() > _SMALL_KEPT):
            continue
        if operations(layer, batch) > (_LARGE_OPERATIONS if large else _OPERATIONS):
            continue
        made += 1
        yield layer, batch, TYPES.index(kind), LAYOUTS.index(layout)


def _log_uniform(chance: random.Random, least: int, most: int) -> int:
    return min(most, int(least * ((most + 1) / least) ** chance.random()))


def _batch(chance: random.Random) -> int:
    return chance.randint(2, 64) if chance.random() < 0.5 else _log_uniform(chance, 1, 256)


def _channels(chance: random.Random) -> int:
    part = chance.random()
    if part < 0.6:
        return chance.randint(1, 512)
    if part < 0.8:
        return _log_uniform(chance, 1, 2048)
    step = chance.choice((2, 4, 8, 8, 8, 16, 32))
    return step * chance.randint(1, 512 // step)


def _side(chance: random.Random) -> int:
    return chance.randint(1, _LARGEST_SIDE) if chance.random() < 0.5 else _log_uniform(chance, 1, _LARGEST_SIDE)


def _layer(chance: random.Random) -> Layer:
    kernel = chance.choices(_KERNELS, _KERNEL_WEIGHTS)[0]
    stride = 2 if chance.random() < 0.18 else 1
    padding = kernel // 2 if chance.random() < 0.9 else 0
    side = _side(chance)
    wide = side if chance.random() < 0.95 else _side(chance)
    entering, leaving, groups = _channels(chance), _channels(chance), 1
    shape = chance.random()
    if shape < 0.08:
        entering = chance.choice((1, 3))  # pictures
    elif shape < 0.12:
        leaving = entering
    elif shape < 0.15:
        groups = chance.randint(2, 16)
        entering, leaving = -(-entering // groups) * groups, -(-leaving // groups) * groups
    elif shape < 0.17:
        groups = entering
        leaving = entering
    transposed = groups == 1 and chance.random() < 0.03
    outer, inner = (entering, leaving) if transposed else (leaving, entering)
    weight = (outer, inner // groups, kernel, kernel)
    pair = (stride, stride), (padding, padding), (1, 1)
    return Layer((entering, side, wide), weight, *pair, transposed, (0, 0), groups, False)
