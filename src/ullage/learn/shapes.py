"""The forms of generated networks, as lists of sizes. Pure arithmetic: PyTorch is not needed to draw a data set."""

from __future__ import annotations

from collections.abc import Callable

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
