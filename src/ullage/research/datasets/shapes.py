"""The forms of generated networks, as lists of sizes. Pure arithmetic: PyTorch is not needed to draw a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MLP_FORMS = ("pyramid", "uniform", "bottleneck", "gradual")
CNN_FORMS = ("pyramid", "uniform", "bottleneck", "gradual", "hourglass", "residual", "dense")
TRANSFORMER_FORMS = ("encoder", "decoder", "hybrid")


def mlp_widths(form: str, inputs: int, outputs: int, hidden: int) -> list[int]:
    """The size of the input and of every hidden layer.

    "pyramid" halves from layer to layer, down to the size of the output; "uniform" keeps the size of the input;
    "bottleneck" halves up to the middle and doubles again; "gradual" goes to the output's size in equal steps.

    >>> mlp_widths("pyramid", 64, 10, 3), mlp_widths("gradual", 64, 10, 2)
    ([64, 32, 16, 10], [64, 46, 28])
    """
    floor = max(1, min(outputs, inputs))
    rules: dict[str, Callable[[int], int]] = {
        "pyramid": lambda place: max(floor, inputs >> place),
        "uniform": lambda place: inputs,
        "bottleneck": lambda place: max(floor, inputs >> min(place, hidden + 1 - place)),
        "gradual": lambda place: inputs + (outputs - inputs) * place // (hidden + 1),
    }
    return [inputs, *(max(1, rules[form](place)) for place in range(1, hidden + 1))]


def cnn_filters(form: str, first: int, last: int, depth: int) -> list[int]:
    """How many filters each convolution has; `first` and `last` are the ends of the range that the form spans.

    "pyramid" and "residual" multiply by a constant, residual ones by pairs; "gradual" adds one; "bottleneck" goes
    from the larger number to the smaller one in the middle and back, "hourglass" the other way round; "uniform" and
    "dense" keep the first.

    >>> cnn_filters("gradual", 16, 48, 3), cnn_filters("hourglass", 16, 64, 5)
    ([16, 32, 48], [16, 32, 64, 32, 16])
    """
    low, high = min(first, last), max(first, last)
    filters = []
    for place in range(depth):
        along = place / (depth - 1) if depth > 1 else 0.0
        middle = 1 - abs(2 * along - 1)  # 0 at both ends, 1 in the middle
        share = {
            "pyramid": along,
            "residual": (place // 2) / max(1, (depth - 1) // 2),
            "hourglass": middle,
            "bottleneck": 1 - middle,
        }.get(form)
        if share is not None:
            filters.append(round(low * (high / low) ** share))
        else:
            filters.append(round(low + (high - low) * along) if form == "gradual" else first)
    return filters


def image_sides(side: int, depth: int, down: list[int]) -> list[int]:
    """The side of the image at every convolution, halved before those in `down`.

    >>> image_sides(32, 3, [1])
    [32, 16, 16]
    """
    sides = []
    for place in range(depth):
        side = side // 2 if place in down else side
        sides.append(side)
    return sides


# What a drawn network will roughly take, by counting: parameters, bytes kept for the backward pass, arithmetic.
#
# Drawing keeps only feasible designs, and a run is started where the GPU has room for it: both need a number at once
# and without PyTorch, thousands of times. It is counted layer by layer from the settings; docs/dataset.md says how far
# it is from what was measured. Estimators use `ullage.estimation.estimators.walknet.features`, which looks at the
# model.

_STATES = {"adam": 2, "adamw": 2, "sgdm": 1, "rmsprop": 1, "adagrad": 1}  # numbers a parameter; others keep none
_KEEPS_RESULT = ("relu", "tanh", "sigmoid")  # their derivative needs the output; identity keeps nothing
# Arithmetic and memory traffic that an H200 does in a second, low on purpose: sizes are odd, networks small.
_FLOPS = {"fp32": 35e12, "fp32_convolution": 90e12, "half": 150e12}
_BYTES_A_SECOND = 2.5e12
# Means over estimates by the virtual GPU of 60 drawn runs, for the choice of classes only.
CACHED = 1.15
WORKSPACES = 80 << 20
CONTEXT = 740 << 20


@dataclass
class Cost:
    """For one sample: `numbers` kept at the precision of the arithmetic, `bytes` kept whatever it is, `flops`."""

    parameters: int = 0
    numbers: int = 0
    bytes: int = 0
    flops: float = 0.0

    def memory(self, batch: int, optimizer: str, precision: str) -> int:
        """Bytes of the training run: weights, gradients, optimizer states and what the backward pass needs.

        >>> Cost(parameters=10, numbers=100).memory(2, "adam", "fp32")
        960
        """
        weight = 2 if precision == "bf16" else 4
        states = _STATES.get(optimizer.partition("_")[0], 0)
        fixed = self.parameters * weight * (2 + states)
        if precision.startswith("amp"):
            fixed += 2 * self.parameters  # the weights once more, cast
        return fixed + batch * (self.numbers * (4 if precision == "fp32" else 2) + self.bytes)

    def process(self, batch: int, optimizer: str, precision: str) -> int:
        """Bytes that the process will show: with cached memory and workspaces, and the context of an H200."""
        return round(CACHED * self.memory(batch, optimizer, precision)) + WORKSPACES + CONTEXT

    def seconds(self, batch: int, precision: str, convolutions: bool) -> float:
        """A guess of the time of a step on an H200."""
        kind = "half" if precision != "fp32" else "fp32_convolution" if convolutions else "fp32"
        return 3 * self.flops * batch / _FLOPS[kind] + 12 * self.numbers * batch / _BYTES_A_SECOND

    def activated(self, size: int, act: str, batch_norm: bool, dropout: float) -> None:
        """Norm, activation function and dropout over an output of `size` numbers, up to the next layer's input."""
        keeps_input = act not in (*_KEEPS_RESULT, "identity")
        self.parameters += act == "prelu"  # one for all channels
        if batch_norm:
            self.numbers += size
        if keeps_input or (act == "identity" and not batch_norm and not dropout):
            self.numbers += size
        if act != "identity" and (not dropout or act in _KEEPS_RESULT):
            self.numbers += size
        if dropout:
            self.numbers += size
            self.bytes += size


def mlp_cost(widths: list[int], classes: int, act: str, batch_norm: bool, dropout: float) -> Cost:
    """Of the factory `mlp` with these settings."""
    cost = Cost(numbers=widths[0])
    for inputs, outputs in zip(widths, [*widths[1:], classes], strict=True):
        cost.parameters += inputs * outputs + outputs
        cost.flops += 2 * inputs * outputs
    for size in widths[1:]:
        cost.parameters += 2 * size if batch_norm else 0
        cost.activated(size, act, batch_norm, dropout)
    cost.numbers += 2 * classes
    return cost


def cnn_cost(settings: dict[str, Any], side: int, classes: int) -> Cost:
    """Of the factory `cnn` with these settings, for images of this side."""
    cost = Cost()
    filters, kernels, arch = settings["filters"], settings["kernels"], settings["arch"]
    act, norm, dropout = settings["act"], settings["batch_norm"], settings["dropout"]
    down, by = settings["down"], settings["down_by"]
    width = settings["channels"]
    cost.numbers += width * side * side

    def convolve(inputs: int, outputs: int, kernel: int, at: int) -> int:
        cost.parameters += inputs * outputs * kernel * kernel + outputs * (3 if norm else 1)
        cost.flops += 2 * inputs * outputs * kernel * kernel * at * at
        return outputs * at * at

    for place, at in enumerate(image_sides(side, len(filters), down)):
        outputs, kernel = filters[place], kernels[place]
        if place in down and by != "stride":
            cost.numbers += width * at * at
            cost.bytes += 8 * width * at * at if by == "max" else 0  # the places of the maxima
        if arch == "residual" and place + 1 < len(filters) + place % 2:
            size = convolve(width, outputs, kernel, at)
            first = place % 2 == 0
            cost.activated(size, act, norm, dropout if first else 0.0)
            if first and (width != outputs or (place in down and by == "stride")):
                beside = convolve(width, outputs, 1, at)
                cost.numbers += beside if norm else 0
            width = outputs
        elif arch == "dense" and not (place in down and by == "stride"):
            if place in down:
                cost.parameters += width * (width // 2) + width // 2
                cost.numbers += (width // 2) * at * at * 4
                width //= 2
            size = convolve(width, outputs, kernel, at)
            cost.activated(size, act, norm, dropout)
            width += outputs
            cost.numbers += width * at * at  # input and output once more, side by side
        else:
            cost.activated(convolve(width, outputs, kernel, at), act, norm, dropout)
            width = outputs
    cost.parameters += width * classes + classes
    cost.numbers += width + 2 * classes
    return cost


def transformer_cost(settings: dict[str, Any], length: int, classes: int) -> Cost:
    """Of the factory `transformer` with these settings."""
    size, middle, layers = settings["size"], settings["middle"], settings["layers"]
    dropout, act = settings["dropout"], settings["act"]
    words, vocabulary = settings["head"] == "words", settings["vocabulary"]
    crossed = layers - layers // 2 if settings["kind"] == "hybrid" else 0
    attentions = layers + crossed
    cost = Cost()
    cost.parameters += vocabulary * size + settings["length"] * size
    cost.parameters += attentions * (4 * size * size + 4 * size) + layers * (2 * size * middle + size + middle)
    cost.parameters += 2 * size * (attentions + layers + (1 if settings["norm_first"] else 0))
    outputs = vocabulary if words else classes
    cost.parameters += size * outputs + (0 if words else outputs)
    # A token: the stream and its norm, queries, keys, values, what was mixed (twice: heads apart and together).
    numbers = attentions * (2 * size + 3 * size + 2 * size) + layers * (2 * size + middle * (1 if act == "relu" else 2))
    bytes_ = (attentions + layers) * size if dropout else 0
    if settings["eager"]:
        scores = attentions * settings["heads"] * length
        numbers += scores * (2 if dropout else 1) + 3 * attentions * size  # products want their sides in one piece
        bytes_ += scores if dropout else 0
    if settings["kind"] == "hybrid" and settings["fused"]:
        numbers += crossed * 3 * size  # all three are projected from both sides
    if words:
        numbers += 4 * vocabulary  # scores, their logarithms, and the gradients of both
    cost.numbers = length * (numbers + 3 * size)
    cost.bytes = length * bytes_
    products = attentions * (4 * size * size + 2 * length * size) + layers * 2 * size * middle
    cost.flops = 2.0 * length * (products + (size * vocabulary if words else 0))
    return cost
