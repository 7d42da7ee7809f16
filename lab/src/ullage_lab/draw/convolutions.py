"""Convolutions to ask cuDNN about, without a GPU: drawn at random, or those of torchvision's and timm's models.

A model is built and run at some resolutions on PyTorch's "meta" device, where tensors have shapes but no data; every
convolution that it dispatches is a layer, and the batch size is added afterwards. Their order is random, weighted by
how common a layer, a batch size, a type and a layout are, so that any beginning is a fair sample. Models that cannot
run on "meta" at a resolution are skipped.
"""

import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.virtual.cudnn.formulas import ConvolutionProblem
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable
from ullage_lab.draw.layers import (
    LAYOUTS,
    TYPES,
    Configuration,
    ConvolutionLayer,
    native,
    operations,
    problems_of,
    tensor_bytes,
)

# Random convolutions, for rules that must hold for more than the layers of known models.
#
# `random_layer` is like models' layers, of more kinds. In `arbitrary_configurations` channel counts, sides and batch
# sizes are any whole numbers. Layers of known models mostly have channels that are multiples of 8; cuDNN's engines read
# 16 bytes at once, so it treats all other counts differently: copies padded to the next multiple, or another engine. A
# rule that has seen round numbers only knows nothing of that. Every configuration is drawn by itself, so that any
# beginning of the list is a fair sample.

_KERNELS, _KERNEL_WEIGHTS = (1, 3, 5, 7, 2, 4), (48, 26, 12, 10, 2, 2)
_RANDOM_TYPE_WEIGHTS = {"f32": 44, "f16": 25, "bf16": 31}
_CHANNELS_LAST = 0.12
_LARGE = 0.15  # of the configurations; for the limits on bytes of the tensors and on operations
_SMALL_BYTES, _SMALL_KEPT = 3_000_000, 0.4  # most draws within the limits are small, most workspaces that matter not
_BYTES, _LARGE_BYTES = 500_000_000, 1_200_000_000
_OPERATIONS, _LARGE_OPERATIONS = 60e9, 160e9
_LARGEST_SIDE = 230
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
_BATCH = 2  # an input length of 2 in front marks the batch dimension
BATCHES = {1: 2, 2: 3, 4: 5, 8: 7, 16: 9, 24: 2, 32: 10, 48: 3, 64: 9, 96: 3, 100: 1, 128: 7, 192: 1, 256: 4}
_TYPE_WEIGHTS = {"f32": 1.0, "f16": 0.6, "bf16": 0.8}
_LAYOUT_WEIGHTS = {"c": 1.0, "cl": 0.5}
_RESOLUTIONS = (224, 256, 128, 192, 384, 160, 288, 96, 320, 64, 32, 512)
_MOST_BYTES = 1_200_000_000
_MOST_OPERATIONS = 300e9
# Families of timm with no convolution but the first one.
_PLAIN = re.compile(r"^(vit_|deit|beit|eva|mixer|gmlp|gmixer|resmlp|cait|xcit|swin|flexivit|naflex|samvit|test_|aimv2)")
_EVERY_PLAIN = 12  # one in this many of those
_VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")
_DENSE = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
Build = Callable[[], torch.nn.Module]
_LIKE_MODELS = 0.5  # of the random problems; the others have any whole numbers as channels and sides


def random_layer(chance: random.Random) -> ConvolutionLayer:
    """Draw a layer like those of models, with any channels; it may be too small to have an output."""

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
    return ConvolutionLayer(
        (entering, side, wide),
        (outer, inner // groups, high, kernel),
        (stride, stride),
        (upright, padding),
        (dilation, dilation),
        transposed,
        (0, 0),
        groups,
    )


def arbitrary_configurations(count: int, seed: int = 5) -> Iterator[Configuration]:
    """Draw layers of any whole numbers, each with a batch size, a type and a layout."""
    chance = random.Random(seed)
    made = 0
    while made < count:
        layer, batch = _drawn_layer(chance), _batch(chance)
        kind = chance.choices(list(TYPES), list(_RANDOM_TYPE_WEIGHTS.values()))[0]
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
        yield Configuration(layer, batch, kind, layout)


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


def _drawn_layer(chance: random.Random) -> ConvolutionLayer:
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
    return ConvolutionLayer((entering, side, wide), weight, *pair, transposed, (0, 0), groups)


class ConvolutionRecorder(TorchDispatchMode):
    """Records the layers that a model's forward call dispatches."""

    def __init__(self, layers: set[ConvolutionLayer]) -> None:
        super().__init__()
        self._layers = layers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and args[0].shape[0] == _BATCH:
            self._layers.add(_layer(args))
        return func(*args, **(kwargs or {}))


def _layer(args: Sequence[Any]) -> ConvolutionLayer:
    source, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    rank = source.dim() - 2

    def full(value: Sequence[int]) -> tuple[int, ...]:
        return tuple(value) * (rank if len(value) == 1 else 1)

    return ConvolutionLayer(
        tuple(source.shape[1:]),
        tuple(weight.shape),
        full(stride),
        full(padding),
        full(dilation),
        transposed,
        full(output_padding),
        groups,
    )


def models() -> Iterator[tuple[str, Build, tuple[tuple[int, ...], ...]]]:
    """Yield names, constructors and input shapes of torchvision's models, then of timm's, families in turn."""
    make_torchvision_importable()  # timm imports it too
    import timm
    import torchvision

    square = tuple((3, side, side) for side in _RESOLUTIONS)
    for name in torchvision.models.list_models(module=torchvision.models):
        yield name, partial(torchvision.models.get_model, name), square
    for name in _VIDEO:
        yield name, partial(torchvision.models.get_model, name), ((3, 16, 112, 112), (3, 8, 128, 128))
    for name in _DENSE:
        build = partial(torchvision.models.get_model, name, weights_backbone=None)
        yield name, build, ((3, 224, 224), (3, 512, 512))
    plain = [name for name in timm.list_models() if _PLAIN.match(name)]
    others = [name for name in timm.list_models() if not _PLAIN.match(name)]
    for name in _by_family(others) + plain[::_EVERY_PLAIN]:
        yield name, partial(timm.create_model, name), square


def _by_family(names: Sequence[str]) -> list[str]:
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.split(r"[\d_]", name)[0], []).append(name)
    for members in families.values():
        random.Random(0).shuffle(members)
    rounds = max(len(members) for members in families.values())
    return [members[turn] for turn in range(rounds) for members in families.values() if turn < len(members)]


def collect(seconds: float, resolutions: int = 3) -> Counter[ConvolutionLayer]:
    """Collect layers of models until the time is over, each counted once per model and resolution."""
    total: Counter[ConvolutionLayer] = Counter()
    chance, end = random.Random(1), time.monotonic() + seconds
    for done, (name, build, shapes) in enumerate(models(), 1):
        others = chance.sample(shapes[1:], len(shapes) - 1)
        model = _on_meta(build)
        if model is None:
            print(f"{name}: not built", file=sys.stderr, flush=True)
            continue
        settings = getattr(model, "default_cfg", None) or getattr(model, "pretrained_cfg", None)
        usual = [tuple(settings["input_size"])] if settings else []
        for shape in list(dict.fromkeys([*usual, *shapes[:1], *others]))[:resolutions]:
            total.update(_run(model, shape))
        if done % 50 == 0:
            print(f"{done} models, {len(total)} layers", file=sys.stderr, flush=True)
        if time.monotonic() > end:
            break
    return total


def _on_meta(build: Build) -> torch.nn.Module | None:
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # some constructors read values, and are built on the CPU
        try:
            return build().to("meta")
        except Exception:
            return None


def _run(model: torch.nn.Module, shape: tuple[int, ...]) -> set[ConvolutionLayer]:
    layers: set[ConvolutionLayer] = set()
    try:
        with torch.no_grad(), ConvolutionRecorder(layers):
            model(torch.empty(_BATCH, *shape, device="meta"))
    except Exception:  # what was dispatched before the failure counts
        pass
    return layers


def arrange(counts: Counter[ConvolutionLayer], configurations: int) -> Iterator[Configuration]:
    """Put configurations in a random order, common ones earlier (Efraimidis and Spirakis, 2006)."""
    chance = random.Random(4)
    keyed = []
    for layer, count in counts.items():
        for batch, batch_weight in BATCHES.items():
            if operations(layer, batch) > _MOST_OPERATIONS:
                continue
            for kind in TYPES:
                if tensor_bytes(layer, batch, kind) > _MOST_BYTES:
                    continue
                for layout in LAYOUTS:
                    if layout == "cl" and len(layer.input) < 3:
                        continue
                    weight = math.sqrt(count) * batch_weight * _TYPE_WEIGHTS[kind] * _LAYOUT_WEIGHTS[layout]
                    if native(layer, kind, layout):
                        weight *= 0.02
                    key = math.log(1.0 - chance.random()) / weight
                    keyed.append((key, Configuration(layer, batch, kind, layout)))
    keyed.sort(key=lambda row: -row[0])
    yield from (configuration for _, configuration in keyed[:configurations])


def problems_of_models(seconds: float, configurations: int) -> list[ConvolutionProblem]:
    """Return the convolution problems of models' layers, collected for a limited time and number of configurations."""
    groups = (problems_of(*one) for one in arrange(collect(seconds), configurations))
    return list(dict.fromkeys(problem for several in groups for problem in several))


def random_problems(count: int, seed: int) -> list[ConvolutionProblem]:
    """Draw problems of layers like those of models and of any others."""
    chance, problems = random.Random(seed), dict[ConvolutionProblem, None]()
    arbitrary = arbitrary_configurations(count, seed)
    while len(problems) < count:
        if chance.random() < _LIKE_MODELS:
            layer, batch = random_layer(chance), chance.choice(_BATCHES)
            one = Configuration(layer, batch, chance.choice(list(TYPES)), chance.choice(LAYOUTS))
        else:
            one = next(arbitrary)
        if min(one.layer.output()) > 0:
            problems.update(dict.fromkeys(problems_of(*one)))
    return list(problems)[:count]
