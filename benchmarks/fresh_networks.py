"""Random convolutional networks of families that no guess was fitted on, and how well they are estimated.

    python benchmarks/fresh_networks.py draw runs.jsonl --seed 7                 # the list, with the estimates
    ullage measure runs.jsonl --out fresh.jsonl --workers 16 --steps 3           # needs a GPU
    python benchmarks/fresh_networks.py judge fresh.jsonl --live                 # with answers of its own cuDNN
    python benchmarks/fresh_networks.py judge benchmarks/data/h200_fresh_second.jsonl.gz
    python benchmarks/fresh_networks.py judge benchmarks/data/h200_fresh_second.jsonl.gz \
        --answers benchmarks/data/h200_fresh_answers.jsonl.xz                    # with those that an H200 gave

Eight families: U-Nets, generators (transposed convolutions), dilated networks over one dimension, networks over three,
residual ones, inverted bottlenecks (depthwise), towers of oblong filters, and large filters with groups. Half of them
have any whole numbers as channels, the others multiples of 8. From seed 20261121 on there are four more: dense ones,
branches of several filters, dilated ones over two dimensions, and bottlenecks in eight groups. From seed 20261122 on
there are six others instead: super-resolution, fire modules, separable filters, encoders and decoders over one
dimension, filters over space and then time, and feature pyramids. From seed 20261123 on six others again: hourglasses,
weighed channels, patches, keywords over time, scans over three dimensions, and halves of the channels in four groups. A
list that was looked at is used up: draw with another seed. `judge` estimates the runs with the rules of today. Measured
on an H200 and shipped are 296 runs of seed 20261117 (`h200_fresh`), 286 of seed 20261118 (`h200_fresh_second`), 312 of
seed 20261120 (`h200_fresh_third`), 116 of seed 20261121 (`h200_fresh_fourth`: as many as the time was enough for, up to
7 GiB), 112 of seed 20261122 (`h200_fresh_fifth`: the same, up to 8 GiB), 70 of seed 20261123 (`h200_fresh_sixth`: the
same), and 48 of seed 20261119 with `cudnn.benchmark` (`h200_fresh_tried`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from ullage.hardware import gpu
from ullage.research.measure import accuracy
from ullage.research.measure.runs import RunRequest, estimate_here
from ullage.research.ranking.truth import measured_rows
from ullage.virtual.kernels.cudnn import asked
from ullage.virtual.releases import MEASURED, as_measured

SEED = 20261117  # of the first list
MOST_BYTES = 7 << 30  # by the bound of the estimate: sixteen of them fit on an H200
PRECISIONS = ("fp32", "fp32", "amp_bf16", "amp_fp16", "bf16")
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def block(inputs: int, outputs: int, kernel: Any, dims: int = 2, **settings: Any) -> nn.Sequential:
    """A convolution that keeps the size, its norm and an activation."""
    dilation = settings.get("dilation", 1)
    sides = kernel if isinstance(kernel, tuple) else (kernel,) * dims
    padding = tuple(dilation * (side - 1) // 2 for side in sides)
    layer = CONVOLUTIONS[dims](inputs, outputs, kernel, padding=padding, bias=False, **settings)
    return nn.Sequential(layer, NORMS[dims](outputs), nn.ReLU())


def headed(body: nn.Module, channels: int, classes: int, dims: int = 2) -> nn.Module:
    """A network that ends in classes."""
    pools = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
    return nn.Sequential(body, pools[dims](1), nn.Flatten(), nn.Linear(channels, classes))


class UNet(nn.Module):
    """Down and up again, with the steps of the way down beside those up."""

    def __init__(self, channels: int, widths: list[int], kernel: int) -> None:
        super().__init__()
        pairs = list(zip([channels, *widths], widths, strict=False))
        self.down = nn.ModuleList(nn.Sequential(block(a, b, kernel), block(b, b, kernel)) for a, b in pairs)
        ups = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ups)
        self.join = nn.ModuleList(block(2 * b, b, kernel) for _, b in ups)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """As wide as the input, with the first width as channels."""
        kept: list[torch.Tensor] = []
        for step in self.down:
            image = step(image if not kept else nn.functional.max_pool2d(kept[-1], 2))
            kept.append(image)
        for up, join, other in zip(self.up, self.join, kept[-2::-1], strict=True):
            image = join(torch.cat([up(image), other], 1))
        return image


class Residual(nn.Module):
    """What a body adds to its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The sum."""
        added: torch.Tensor = value + self.body(value)
        return added


def unet(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """A U-Net with a head."""
    return headed(UNet(channels, widths, kernel), widths[0], num_classes)


def generator(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Transposed convolutions, each of which doubles the sides."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        parts += [nn.ConvTranspose2d(inputs, outputs, kernel, stride=2, padding=kernel // 2 - 1, bias=False)]
        parts += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def waves(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Dilated convolutions over one dimension."""
    pairs = enumerate(zip([channels, *widths], widths, strict=False))
    body = nn.Sequential(*(block(a, b, kernel, 1, dilation=2 ** (place % 4)) for place, (a, b) in pairs))
    return headed(body, widths[-1], num_classes, 1)


def volumes(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Convolutions over three dimensions, every second one with a stride."""
    pairs = enumerate(zip([channels, *widths], widths, strict=False))
    body = nn.Sequential(*(block(a, b, kernel, 3, stride=1 + place % 2) for place, (a, b) in pairs))
    return headed(body, widths[-1], num_classes, 3)


def residual(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Residual blocks with a bottleneck, and a stride between widths."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        middle = max(1, outputs // 3)
        inner = nn.Sequential(block(outputs, middle, 1), block(middle, middle, kernel), block(middle, outputs, 1))
        parts += [block(inputs, outputs, 3, stride=2), Residual(inner)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def inverted(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Wide depthwise convolutions between narrow layers."""
    parts: list[nn.Module] = [block(channels, widths[0], 3, stride=2)]
    for inputs, outputs in zip(widths, [*widths[1:], widths[-1]], strict=True):
        wide = 4 * inputs
        parts += [block(inputs, wide, 1), block(wide, wide, kernel, groups=wide, stride=2), block(wide, outputs, 1)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def oblong(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Filters that are wide and flat, then high and narrow."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        parts += [block(inputs, outputs, (1, kernel)), block(outputs, outputs, (kernel, 1)), nn.MaxPool2d(2)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def large(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Large filters in two groups, and ones of a single tap."""
    parts: list[nn.Module] = [block(channels, 2 * widths[0], 4, stride=4)]
    for inputs, outputs in zip(widths, [*widths[1:], widths[-1]], strict=True):
        parts += [block(2 * inputs, 2 * inputs, kernel, groups=2), block(2 * inputs, 2 * outputs, 1)]
    return headed(nn.Sequential(*parts), 2 * widths[-1], num_classes)


class Joined(nn.Module):
    """What several bodies make of an input, beside each other."""

    def __init__(self, *bodies: nn.Module) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The channels of all."""
        return torch.cat([body(value) for body in self.bodies], 1)


def dense(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Each layer sees those before it, through a bottleneck of a single tap."""
    parts: list[nn.Module] = [block(channels, widths[0], kernel, stride=2)]
    have = widths[0]
    for width in widths[1:]:
        for _ in range(3):
            parts.append(
                Joined(nn.Identity(), nn.Sequential(block(have, 4 * width, 1), block(4 * width, width, kernel)))
            )
            have += width
        parts += [block(have, have // 2, 1), nn.AvgPool2d(2)]
        have //= 2
    return headed(nn.Sequential(*parts), have, num_classes)


def branches(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Filters of several sizes beside each other, the larger ones behind fewer channels."""
    parts: list[nn.Module] = [block(channels, widths[0], 3, stride=2)]
    have = widths[0]
    for width in widths:
        half = max(1, width // 2)
        large = nn.Sequential(block(have, half, 1), block(half, width, kernel))
        parts += [Joined(block(have, width, 1), large, block(have, half, 3)), nn.MaxPool2d(2)]
        have = 2 * width + half
    return headed(nn.Sequential(*parts), have, num_classes)


def atrous(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Dilated convolutions over two dimensions, beside each other at the end."""
    parts: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip([channels, *widths], widths, strict=False)):
        settings = {"stride": 2} if place < 2 else {"dilation": 2 ** (place - 1)}
        parts.append(block(inputs, outputs, kernel, **settings))
    last = widths[-1]
    parts.append(Joined(block(last, last, 1), *(block(last, last, kernel, dilation=rate) for rate in (6, 12))))
    return headed(nn.Sequential(*parts), 3 * last, num_classes)


def grouped(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Residual blocks with a bottleneck in eight groups."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        middle = 8 * max(1, outputs // 8)
        inner = block(outputs, middle, 1), block(middle, middle, kernel, groups=8), block(middle, outputs, 1)
        parts += [block(inputs, outputs, 3, stride=2), Residual(nn.Sequential(*inner))]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def sharper(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Residual blocks that keep the size, then pixels made of channels."""
    width = widths[0]
    blocks = (Residual(nn.Sequential(block(width, width, kernel), block(width, width, kernel))) for _ in widths)
    last = nn.Sequential(nn.Conv2d(width, 4 * channels, 3, padding=1), nn.PixelShuffle(2))
    return headed(nn.Sequential(block(channels, width, kernel), *blocks, last), channels, num_classes)


def fire(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Few channels in between, and two kinds of filters that make many of them."""
    parts: list[nn.Module] = [block(channels, widths[0], kernel, stride=2)]
    have = widths[0]
    for width in widths:
        few = max(1, width // 4)
        parts += [block(have, few, 1), Joined(block(few, width, 1), block(few, width, kernel)), nn.MaxPool2d(2)]
        have = 2 * width
    return headed(nn.Sequential(*parts), have, num_classes)


def separable(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """A filter for each channel, then one of a single tap; twice, with a sum."""
    parts: list[nn.Module] = [block(channels, widths[0], 3, stride=2)]
    for inputs, outputs in zip(widths, [*widths[1:], widths[-1]], strict=True):
        once = block(outputs, outputs, kernel, groups=outputs), block(outputs, outputs, 1)
        parts += [block(inputs, inputs, kernel, groups=inputs), block(inputs, outputs, 1)]
        parts += [Residual(nn.Sequential(*once)), nn.MaxPool2d(2)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def codec(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Strided convolutions over one dimension, and transposed ones back."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        parts += [block(inputs, inputs, kernel, 1), nn.Conv1d(inputs, outputs, 4, stride=2, padding=1), nn.ELU()]
    for inputs, outputs in zip(widths[::-1], [*widths[-2::-1], channels], strict=True):
        parts += [nn.ConvTranspose1d(inputs, outputs, 4, stride=2, padding=1), block(outputs, outputs, kernel, 1)]
    return headed(nn.Sequential(*parts), channels, num_classes, 1)


def clips(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Filters over space, then over time."""
    parts: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip([channels, *widths], widths, strict=False)):
        parts += [block(inputs, outputs, (1, kernel, kernel), 3, stride=(1, 2, 2) if place % 2 == 0 else 1)]
        parts += [block(outputs, outputs, (3, 1, 1), 3)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes, 3)


class Pyramid(nn.Module):
    """Maps of all sizes with the same channels, each with what the smaller ones say."""

    def __init__(self, channels: int, widths: list[int], kernel: int) -> None:
        super().__init__()
        common = widths[0]
        pairs = zip([channels, *widths], widths, strict=False)
        self.down = nn.ModuleList(nn.Sequential(block(a, b, kernel, stride=2), block(b, b, kernel)) for a, b in pairs)
        self.beside = nn.ModuleList(nn.Conv2d(width, common, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(common, common, 3, padding=1) for _ in widths)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """The sum of all maps, as large as the largest."""
        kept: list[torch.Tensor] = []
        for step in self.down:
            image = step(image)
            kept.append(image)
        size, total, above = kept[0].shape[-2:], torch.zeros((), device=image.device), None
        for map_, beside, smooth in zip(kept[::-1], self.beside[::-1], self.smooth[::-1], strict=True):
            here = beside(map_)
            above = here if above is None else here + nn.functional.interpolate(above, here.shape[-2:])
            total = total + nn.functional.interpolate(smooth(above), size)
        return total


def pyramid(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """A pyramid with a head."""
    return headed(Pyramid(channels, widths, kernel), widths[0], num_classes)


class Hourglass(nn.Module):
    """Halved by pooling and doubled again, with a branch beside each half."""

    def __init__(self, width: int, depth: int, kernel: int) -> None:
        super().__init__()
        self.beside, self.before, self.after = (block(width, width, kernel) for _ in range(3))
        self.inner = Hourglass(width, depth - 1, kernel) if depth > 1 else block(width, width, kernel)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """As wide as the input."""
        small = self.after(self.inner(self.before(nn.functional.max_pool2d(image, 2))))
        added: torch.Tensor = self.beside(image) + nn.functional.interpolate(small, image.shape[-2:])
        return added


def hourglass(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Hourglasses behind a stem."""
    width = widths[0]
    glasses = (Hourglass(width, min(3, len(widths)), kernel) for _ in widths[1:])
    return headed(nn.Sequential(block(channels, width, 7, stride=2), *glasses), width, num_classes)


class Squeezed(nn.Module):
    """Channels that are weighed by what all pixels say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = max(1, channels // 4)
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, few, 1), nn.ReLU(), nn.Conv2d(few, channels, 1), nn.Sigmoid()
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """The weighed channels."""
        weighed: torch.Tensor = image * self.weigh(image)
        return weighed


def squeezed(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Two layers of filters with weighed channels, then a stride."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        parts += [block(inputs, outputs, kernel, stride=2), block(outputs, outputs, kernel), Squeezed(outputs)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def patches(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Patches without overlap, then a large filter for each channel and a mix of channels, again and again."""
    width = widths[0]
    mixed = (
        nn.Sequential(Residual(block(width, width, 2 * kernel + 1, groups=width)), block(width, width, 1))
        for _ in widths
    )
    stem = nn.Sequential(nn.Conv2d(channels, width, 4, stride=4), nn.GELU(), nn.BatchNorm2d(width))
    return headed(nn.Sequential(stem, *mixed), width, num_classes)


def keywords(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Residual blocks over time, of a filter for each channel and one of a single tap."""
    parts: list[nn.Module] = [block(channels, widths[0], 5, 1, stride=2)]
    for inputs, outputs in zip(widths, [*widths[1:], widths[-1]], strict=True):
        own = block(inputs, inputs, kernel, 1, groups=inputs), block(inputs, inputs, 1, 1)
        parts += [Residual(nn.Sequential(*own)), block(inputs, outputs, kernel, 1, stride=2)]
    return headed(nn.Sequential(*parts), widths[-1], num_classes, 1)


def scans(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Over three dimensions: down with strides, up with transposed filters."""
    parts: list[nn.Module] = []
    for inputs, outputs in zip([channels, *widths], widths, strict=False):
        parts += [block(inputs, outputs, kernel, 3), block(outputs, outputs, 3, 3, stride=2)]
    for inputs, outputs in zip(widths[::-1], [*widths[-2::-1], widths[0]], strict=True):
        parts += [nn.ConvTranspose3d(inputs, outputs, 2, stride=2), nn.BatchNorm3d(outputs), nn.ReLU()]
    return headed(nn.Sequential(*parts), widths[0], num_classes, 3)


def halves(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Blocks whose filters see a half of the channels, in four groups, behind one of a single tap."""
    parts: list[nn.Module] = [block(channels, 4 * widths[0], 3, stride=2)]
    for inputs, outputs in zip(widths, [*widths[1:], widths[-1]], strict=True):
        few = max(4, 2 * inputs // 4 * 4)
        inner = block(4 * inputs, few, 1), block(few, few, kernel, groups=4), block(few, 4 * inputs, 1)
        parts += [Residual(nn.Sequential(*inner)), block(4 * inputs, 4 * outputs, 3, stride=2)]
    return headed(nn.Sequential(*parts), 4 * widths[-1], num_classes)


# Each with its filters, how many widths it has, its channels of input, and its sides.
FAMILIES: dict[str, tuple[tuple[int, ...], tuple[int, int], tuple[int, ...], tuple[int, int], int]] = {
    "unet": ((3, 3, 5), (3, 5), (1, 3), (32, 192), 2),
    "generator": ((4,), (3, 5), (64, 100, 128), (2, 6), 2),
    "waves": ((3, 5, 9, 15), (4, 8), (1, 2, 13, 80), (200, 8000), 1),
    "volumes": ((3,), (3, 6), (1, 2, 4), (12, 48), 3),
    "residual": ((3, 3, 5), (3, 5), (1, 3), (48, 224), 2),
    "inverted": ((3, 5, 7), (3, 5), (3,), (64, 224), 2),
    "oblong": ((3, 5, 7), (3, 5), (1, 3), (48, 200), 2),
    "large": ((7, 9), (3, 5), (3,), (64, 224), 2),
}
# Since the fourth list:
MORE_FAMILIES = FAMILIES | {
    "dense": ((3, 3, 5), (3, 5), (1, 3), (48, 192), 2),
    "branches": ((3, 5, 7), (3, 5), (1, 3), (64, 224), 2),
    "atrous": ((3,), (3, 6), (1, 3), (64, 224), 2),
    "grouped": ((3, 5), (3, 5), (3,), (64, 224), 2),
}
# Alone in the fifth list:
LAST_FAMILIES: dict[str, tuple[tuple[int, ...], tuple[int, int], tuple[int, ...], tuple[int, int], int]] = {
    "sharper": ((3, 3, 5), (2, 5), (1, 3), (24, 128), 2),
    "fire": ((3, 3, 5), (3, 5), (1, 3), (64, 224), 2),
    "separable": ((3, 5, 7), (3, 5), (3,), (64, 224), 2),
    "codec": ((3, 7, 9), (3, 5), (1, 2, 8), (500, 16000), 1),
    "clips": ((3, 3, 5), (3, 5), (1, 3), (12, 56), 3),
    "pyramid": ((3, 3, 5), (3, 5), (1, 3), (64, 224), 2),
}
# Alone in the sixth list:
SIXTH_FAMILIES: dict[str, tuple[tuple[int, ...], tuple[int, int], tuple[int, ...], tuple[int, int], int]] = {
    "hourglass": ((3, 3, 5), (3, 4), (1, 3), (48, 192), 2),
    "squeezed": ((3, 3, 5), (3, 5), (1, 3), (64, 224), 2),
    "patches": ((3, 4), (3, 6), (3,), (64, 224), 2),
    "keywords": ((3, 9, 13), (3, 5), (10, 40, 64), (100, 4000), 1),
    "scans": ((3, 3, 5), (2, 3), (1, 2), (16, 64), 3),
    "halves": ((3, 5), (3, 4), (3,), (64, 224), 2),
}
FOURTH_SEED, FIFTH_SEED, SIXTH_SEED = 20261121, 20261122, 20261123
ALL_FAMILIES = MORE_FAMILIES | LAST_FAMILIES | SIXTH_FAMILIES


def tried(family: str, num_classes: int, **settings: Any) -> nn.Module:
    """A network of a family with `cudnn.benchmark` on."""
    torch.backends.cudnn.benchmark = True
    factory: Callable[..., nn.Module] = globals()[family]
    return factory(num_classes=num_classes, **settings)


def drawn(number: int, seed: int = SEED, trials: bool = False) -> dict[str, Any]:
    """One run: every number has a source of chance of its own. With `trials`, `cudnn.benchmark` is on."""
    chance = random.Random(f"{seed}-{number}")
    lists = ((SIXTH_SEED, SIXTH_FAMILIES), (FIFTH_SEED, LAST_FAMILIES), (FOURTH_SEED, MORE_FAMILIES), (0, FAMILIES))
    families = next(each for first, each in lists if seed >= first)
    family = list(families)[number % len(families)]
    kernels, depth, inputs, (least, most), dims = families[family]
    odd = number // len(families) % 2 == 0
    count, step = chance.randint(*depth), 1 if odd else 8
    width = chance.uniform(8, 96)
    growth = chance.choice((1.0, 1.4, 2.0)) if family != "generator" else 0.6
    widths = [max(step, round(min(width * growth**place, 512) / step) * step) for place in range(count)]
    side = round(least * (most / least) ** chance.random())
    side = side // 2 ** (count - 1) * 2 ** (count - 1) or 2 ** (count - 1) if family == "unet" else side
    channels = chance.choice(inputs)
    row = {
        "id": f"{family}-{number:04d}", "family": family, "odd": odd,
        "model": f"benchmarks/fresh_networks.py:{family}",
        "batch": chance.randint(1, 48) if odd else chance.choice((1, 2, 4, 8, 16, 32, 64)),
        "input": [channels, *[side] * dims], "classes": chance.choice((2, 10, 100)),
        "opt": chance.choice(("sgd", "sgdm", "adam", "adamw")), "precision": chance.choice(PRECISIONS),
        "channels_last": dims == 2 and chance.random() < 0.25,
        "settings": {"channels": channels, "widths": widths, "kernel": chance.choice(kernels)},
    }  # fmt: skip
    if trials:
        row |= {"id": f"tried-{row['id']}", "model": "benchmarks/fresh_networks.py:tried"}
        row["settings"] = {"family": family, **row["settings"]}
    return row


def estimated(row: dict[str, Any]) -> dict[str, Any] | None:
    """The run with its estimate; `None` if it cannot be built or is too large."""
    torch.set_num_threads(1)
    try:
        guess = estimate_here(vars(RunRequest(row=row)) | {"gpu": "H200"})
    except (RuntimeError, ValueError):
        return None
    return {**row, "estimate": guess} if guess["upper"] <= MOST_BYTES else None


def draw(out: Path, count: int, workers: int, seed: int, trials: bool) -> None:
    """Write the list, with the estimates as they are today."""
    wanted = [drawn(number, seed, trials) for number in range(count)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(estimated, wanted, chunksize=4)
        rows = [row for row in track(found, total=count, console=Console(stderr=True)) if row is not None]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} runs: {out}")


_inside = ExitStack()  # for the life of a process that estimates
_card = [gpu("H200")]


def _begin(answers: Path | None, live: bool) -> None:
    """In a process that estimates: an H200 whose cuDNN has given these answers, or this machine's card."""
    torch.set_num_threads(1)
    if live:
        _card[0] = gpu("local")
        _inside.enter_context(asked.asking(_card[0]))
    if answers is not None:
        _card[0] = replace(gpu("H200"), uuid=answers.name)
        known = _inside.enter_context(asked.used(asked.Answers(_card[0], cudnn=MEASURED.cudnn)))
        for row in measured_rows(answers):
            known.learn(row)


def _compared(row: dict[str, Any]) -> accuracy.Comparison:
    return accuracy.compare(row, _card[0])


def judge(path: Path, workers: int, answers: Path | None, live: bool, out: Path | None) -> None:
    """Print the errors of all runs, of those with odd channels and of the others, and by family."""
    rows = [row for row in measured_rows(path) if "peak_reserved" in row]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(answers, live)) as pool:
        compared = pool.map(_compared, rows, chunksize=4)
        found = list(track(compared, total=len(rows), console=Console(stderr=True)))
    if out is not None:
        out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))
    groups = {"all": rows, "odd channels": [row for row in rows if row["odd"]]}
    groups |= {"multiples of 8": [row for row in rows if not row["odd"]]}
    groups |= {family: [row for row in rows if row["family"] == family] for family in ALL_FAMILIES}
    groups = {name: members for name, members in groups.items() if members}
    shown = Table("runs", "count", "figure", "exact", "median", "90 %", "99 %", "upper holds", "above")
    for name, members in groups.items():
        wanted = {row["id"] for row in members}
        part = [one for one in found if one.id in wanted]
        for line in accuracy.table_lines(part):
            shown.add_row(name, *line)
    Console(width=120).print(shown)
    for one in found:
        if one.failed:
            print(f"not estimated: {one.id}: {one.failed}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw runs and estimate them")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("--count", type=int, default=416, metavar="N", help="less what is too large")
    drawing.add_argument("--seed", type=int, default=SEED, metavar="N", help="a list that was looked at is used up")
    drawing.add_argument("--trials", action="store_true", help="with cudnn.benchmark")
    judging = commands.add_parser("judge", help="estimate measured runs and print how far off the estimates are")
    judging.add_argument("file", type=Path)
    judging.add_argument("--answers", type=Path, metavar="FILE", help="take what cuDNN answered from here")
    judging.add_argument("--live", action="store_true", help="on this machine's GPU, whose cuDNN is asked")
    judging.add_argument("--out", type=Path, metavar="FILE", help="write a line for each run")
    for command in (drawing, judging):
        command.add_argument("--workers", type=int, default=2, metavar="N", help="so many processes at once")
    options = parser.parse_args()
    if options.command == "draw":
        draw(options.file, options.count, options.workers, options.seed, options.trials)
    else:
        judge(options.file, options.workers, options.answers, options.live, options.out)


if __name__ == "__main__":
    as_measured()
    main()
