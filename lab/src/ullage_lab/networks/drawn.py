"""Networks that were drawn at random to test estimates on, as factories: `ullage_lab.networks.drawn:unet`.

Files of measured runs name these factories with their arguments, so each must build the same model for ever. Files
older than this module name a script instead; `Model.from_row` maps its factories.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Convolutional networks: channels of the input, widths of the layers, side of the filters.

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def block(inputs: int, outputs: int, kernel: Any, dims: int = 2, **settings: Any) -> nn.Sequential:
    """A convolution that keeps the size, its norm and an activation."""
    dilation = settings.get("dilation", 1)
    sides = kernel if isinstance(kernel, tuple) else (kernel,) * dims
    padding = tuple(dilation * (side - 1) // 2 for side in sides)
    layer = CONVOLUTIONS[dims](inputs, outputs, kernel, padding=padding, bias=False, **settings)
    return nn.Sequential(layer, NORMS[dims](outputs), nn.ReLU())


def headed(body: nn.Module, channels: int, classes: int, dims: int = 2) -> nn.Module:
    pools = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
    return nn.Sequential(body, pools[dims](1), nn.Flatten(), nn.Linear(channels, classes))


class UNet(nn.Module):
    """An encoder and a decoder, with skip connections between equal sizes."""

    def __init__(self, channels: int, widths: list[int], kernel: int) -> None:
        super().__init__()
        pairs = list(zip([channels, *widths], widths, strict=False))
        self.down = nn.ModuleList(nn.Sequential(block(a, b, kernel), block(b, b, kernel)) for a, b in pairs)
        ups = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ups)
        self.join = nn.ModuleList(block(2 * b, b, kernel) for _, b in ups)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        maps: list[torch.Tensor] = []
        for step in self.down:
            image = step(image if not maps else nn.functional.max_pool2d(maps[-1], 2))
            maps.append(image)
        for up, join, other in zip(self.up, self.join, maps[-2::-1], strict=True):
            image = join(torch.cat([up(image), other], 1))
        return image


class Added(nn.Module):
    """A body whose output is added to its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = value + self.body(value)
        return added


def unet(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
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
        parts += [block(inputs, outputs, 3, stride=2), Added(inner)]
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
    """Several bodies on one input, with concatenated outputs."""

    def __init__(self, *bodies: nn.Module) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
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
    """Parallel filters of several sizes, the larger ones after fewer channels."""
    parts: list[nn.Module] = [block(channels, widths[0], 3, stride=2)]
    have = widths[0]
    for width in widths:
        half = max(1, width // 2)
        large = nn.Sequential(block(have, half, 1), block(half, width, kernel))
        parts += [Joined(block(have, width, 1), large, block(have, half, 3)), nn.MaxPool2d(2)]
        have = 2 * width + half
    return headed(nn.Sequential(*parts), have, num_classes)


def atrous(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Dilated convolutions over two dimensions, in parallel at the end."""
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
        parts += [block(inputs, outputs, 3, stride=2), Added(nn.Sequential(*inner))]
    return headed(nn.Sequential(*parts), widths[-1], num_classes)


def sharper(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Residual blocks that keep the size, then pixels made of channels."""
    width = widths[0]
    blocks = (Added(nn.Sequential(block(width, width, kernel), block(width, width, kernel))) for _ in widths)
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
        parts += [Added(nn.Sequential(*once)), nn.MaxPool2d(2)]
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
    """Maps of all sizes with the same channels, each with the information of the smaller ones."""

    def __init__(self, channels: int, widths: list[int], kernel: int) -> None:
        super().__init__()
        common = widths[0]
        pairs = zip([channels, *widths], widths, strict=False)
        self.down = nn.ModuleList(nn.Sequential(block(a, b, kernel, stride=2), block(b, b, kernel)) for a, b in pairs)
        self.beside = nn.ModuleList(nn.Conv2d(width, common, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(common, common, 3, padding=1) for _ in widths)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the sum of all maps, as large as the largest."""
        maps: list[torch.Tensor] = []
        for step in self.down:
            image = step(image)
            maps.append(image)
        size, total, above = maps[0].shape[-2:], torch.zeros((), device=image.device), None
        for map_, beside, smooth in zip(maps[::-1], self.beside[::-1], self.smooth[::-1], strict=True):
            here = beside(map_)
            above = here if above is None else here + nn.functional.interpolate(above, here.shape[-2:])
            total = total + nn.functional.interpolate(smooth(above), size)
        return total


def pyramid(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    return headed(Pyramid(channels, widths, kernel), widths[0], num_classes)


class Hourglass(nn.Module):
    """Halved by pooling and doubled again, with a branch at each half."""

    def __init__(self, width: int, depth: int, kernel: int) -> None:
        super().__init__()
        self.beside, self.before, self.after = (block(width, width, kernel) for _ in range(3))
        self.inner = Hourglass(width, depth - 1, kernel) if depth > 1 else block(width, width, kernel)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        small = self.after(self.inner(self.before(nn.functional.max_pool2d(image, 2))))
        added: torch.Tensor = self.beside(image) + nn.functional.interpolate(small, image.shape[-2:])
        return added


def hourglass(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    width = widths[0]
    glasses = (Hourglass(width, min(3, len(widths)), kernel) for _ in widths[1:])
    return headed(nn.Sequential(block(channels, width, 7, stride=2), *glasses), width, num_classes)


class Squeezed(nn.Module):
    """Channels that are weighted by all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = max(1, channels // 4)
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, few, 1), nn.ReLU(), nn.Conv2d(few, channels, 1), nn.Sigmoid()
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
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
        nn.Sequential(Added(block(width, width, 2 * kernel + 1, groups=width)), block(width, width, 1)) for _ in widths
    )
    stem = nn.Sequential(nn.Conv2d(channels, width, 4, stride=4), nn.GELU(), nn.BatchNorm2d(width))
    return headed(nn.Sequential(stem, *mixed), width, num_classes)


def keywords(channels: int, widths: list[int], kernel: int, num_classes: int) -> nn.Module:
    """Residual blocks over time, of a filter for each channel and one of a single tap."""
    parts: list[nn.Module] = [block(channels, widths[0], 5, 1, stride=2)]
    for inputs, outputs in zip(widths, [*widths[1:], widths[-1]], strict=True):
        own = block(inputs, inputs, kernel, 1, groups=inputs), block(inputs, inputs, 1, 1)
        parts += [Added(nn.Sequential(*own)), block(inputs, outputs, kernel, 1, stride=2)]
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
        parts += [Added(nn.Sequential(*inner)), block(4 * inputs, 4 * outputs, 3, stride=2)]
    return headed(nn.Sequential(*parts), 4 * widths[-1], num_classes)


def tried(family: str, num_classes: int, **settings: Any) -> nn.Module:
    """A network of a family with `cudnn.benchmark` on."""
    torch.backends.cudnn.benchmark = True
    factory: Callable[..., nn.Module] = globals()[family]
    return factory(num_classes=num_classes, **settings)


# Networks over vectors: features of the input, width and number of the blocks.


class Normed(nn.Module):
    """A body on the normalized input, added to the input."""

    def __init__(self, width: int, body: nn.Module, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.body = norm(width), body

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = value + self.body(self.norm(value))
        return added


class Gated(nn.Module):
    """Two products, one of which opens and shuts the other, and a third one."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, middle), nn.Linear(width, middle), nn.Linear(middle, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(value)) * self.up(value))
        return out


class Experts(nn.Module):
    """Several networks side by side, by batched products, weighed by a gate."""

    def __init__(self, width: int, middle: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.first = nn.Parameter(torch.randn(count, width, middle) * width**-0.5)
        self.second = nn.Parameter(torch.randn(count, middle, width) * middle**-0.5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        weights = self.gate(value).softmax(-1).t().unsqueeze(-1)
        inner = torch.bmm(value.expand(len(self.first), *value.shape), self.first)
        summed: torch.Tensor = (weights * torch.bmm(nn.functional.gelu(inner), self.second)).sum(0)
        return summed


def tabular(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """A residual network over columns of a table, with batch norms and dropout."""

    def body() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    blocks = [Normed(width, body(), nn.BatchNorm1d) for _ in range(depth)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, num_classes))


def gated(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Gated blocks with layer norms."""
    blocks = [Normed(width, Gated(width, 8 * width // 3), nn.LayerNorm) for _ in range(depth)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, num_classes))


def autoencoder(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Down to a few numbers and up again, then classes."""
    down = [max(8, width >> place) for place in range(depth)]
    widths = [features, *down, *down[-2::-1], features]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*layers, nn.Linear(features, num_classes))


def experts(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Blocks of four experts each."""
    blocks = [Normed(width, Experts(width, 2 * width, 4), nn.LayerNorm) for _ in range(depth)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, num_classes))


# Networks over time, over images and over vectors: width and number of the blocks.


class Temporal(nn.Module):
    """Two convolutions over time that see the past alone, ever further back."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.behind = 2 * dilation
        self.first, self.second = (nn.Conv1d(width, width, 3, dilation=dilation) for _ in range(2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first(nn.functional.pad(value, (self.behind, 0))))
        return torch.relu(value + self.second(nn.functional.pad(inner, (self.behind, 0))))


class Mean(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.flatten(2).mean(2)


class Crossed(nn.Module):
    """A product of the columns of a table with themselves, as the deep and cross network makes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = pair
        return first, first * self.inner(last) + last


class CrossedTable(nn.Module):
    """Crossed layers in parallel with a plain network."""

    def __init__(self, features: int, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.crossed = nn.Sequential(*(Crossed(features) for _ in range(depth)))
        widths = [features, *[width] * depth]
        self.deep = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:], strict=False))
        )
        self.head = nn.Linear(features + width, num_classes)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.crossed((value, value))[1], self.deep(value)], 1))
        return out


class Sine(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.sin(30 * self.linear(value))


class Highway(nn.Module):
    """A layer that lets its input through as far as a gate is open."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.gate(value))
        return gate * torch.tanh(self.change(value)) + (1 - gate) * value


def temporal(channels: int, width: int, depth: int, num_classes: int) -> nn.Module:
    blocks = [Temporal(width, 2**place) for place in range(depth)]
    return nn.Sequential(nn.Conv1d(channels, width, 1), *blocks, Mean(), nn.Linear(width, num_classes))


def upscaling(channels: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Residual blocks without norms, and then twice as many places, as for super-resolution."""

    def body() -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    blocks = [Normed(width, body(), lambda _: nn.Identity()) for _ in range(depth)]
    larger = [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 16, 3, padding=1)]
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), *blocks, *larger, Mean(), nn.Linear(16, num_classes))


def image_generator(channels: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Transposed convolutions, as those that make images have them."""
    layers: list[nn.Module] = []
    for place in range(depth):
        inner, outer = (max(16, width >> (place + more)) for more in (0, 1))
        layers += [nn.ConvTranspose2d(inner, outer, 4, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(channels, width, 1), *layers, Mean(), nn.Linear(outer, num_classes))


crossed = CrossedTable


def sines(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    layers = [Sine(features, width), *(Sine(width, width) for _ in range(depth))]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def highway(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, width), *(Highway(width) for _ in range(depth)), nn.Linear(width, num_classes)
    )
