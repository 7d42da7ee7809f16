"""Draws training runs of generated networks: MLPs, CNNs and Transformers.

Every row has its own random generator, seeded by seed, family and number: the same seed gives the same set, and a
larger set begins with the smaller one. Features are drawn uniformly; a design that is not feasible (an image smaller
than the filter, more memory or time than allowed) is drawn again. A share of the rows (`balanced`) is drawn for classes
of memory, each class equally often, since uniform features give mostly small runs.

The shapes of the networks are lists of sizes, from which their cost is counted without PyTorch.
"""

import random
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.jobs.model import PRECISIONS
from ullage.jobs.optimizers import OPTIMIZERS
from ullage.units import GIB, format_bytes

MLP_FORMS = ("pyramid", "uniform", "bottleneck", "gradual")
CNN_FORMS = ("pyramid", "uniform", "bottleneck", "gradual", "hourglass", "residual", "dense")
TRANSFORMER_FORMS = ("encoder", "decoder", "hybrid")
MOST_PARAMETERS = {"mlp": 200_000_000, "cnn": 330_000_000, "transformer": 3_200_000_000}
MOST_SECONDS = 0.12  # longest step, in seconds
CLASS = {"mlp": GIB, "cnn": 8 * GIB, "transformer": 8 * GIB}
MOST_CLASSES = {"mlp": 4, "cnn": 5, "transformer": 5}
_TRIES = 3000
# Form, optimizer and precision are drawn again only after this many tries, since rejecting large designs would leave
# few runs in 32 bits; and some of them may not reach a class.
_KEEP = 200


def mlp_widths(form: str, inputs: int, outputs: int, hidden: int) -> list[int]:
    """Return the sizes of the input and of every hidden layer.

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
    """Return the number of filters of each convolution; `first` and `last` are the ends of the form's range.

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
    """Return the side of the image at every convolution, halved before those in `down`.

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
# and without PyTorch, thousands of times. It is counted layer by layer from the settings; lab/docs/data.md
# says how far it is from what was measured. Estimators use `ullage_lab.estimators.fast.features`, which
# looks at the model.

_STATES = {"adam": 2, "adamw": 2, "sgdm": 1, "rmsprop": 1, "adagrad": 1}  # numbers a parameter; others keep none
_KEEPS_RESULT = ("relu", "tanh", "sigmoid")  # their derivative needs the output; identity keeps nothing
# Arithmetic and memory traffic of an H200 per second, low on purpose, since sizes are odd and networks small.
_FLOPS = {"fp32": 35e12, "fp32_convolution": 90e12, "half": 150e12}
_BYTES_A_SECOND = 2.5e12
# Means over estimates by the virtual GPU of 60 drawn runs, for the choice of classes only.
CACHED = 1.15
WORKSPACES = 80 << 20
CONTEXT = 740 << 20


@dataclass
class Cost:
    """The cost of a sample: `numbers` kept at the precision of the arithmetic, `bytes` at any precision, `flops`."""

    parameters: int = 0
    numbers: int = 0
    bytes: int = 0
    flops: float = 0.0

    def memory(self, batch: int, optimizer: str, precision: str) -> int:
        """Return the bytes of the training run: weights, gradients, optimizer states and tensors kept for the backward
        pass.

        >>> Cost(parameters=10, numbers=100).memory(2, "adam", "fp32")
        960
        """
        weight = 2 if precision == "bf16" else 4
        states = _STATES.get(optimizer.partition("_")[0], 0)
        fixed = self.parameters * weight * (2 + states)
        if precision.startswith("amp"):
            fixed += 2 * self.parameters  # the cast copy of the weights
        return fixed + batch * (self.numbers * (4 if precision == "fp32" else 2) + self.bytes)

    def process(self, batch: int, optimizer: str, precision: str) -> int:
        """Return the memory of the process: with cached memory, workspaces, and the context of an H200."""
        return round(CACHED * self.memory(batch, optimizer, precision)) + WORKSPACES + CONTEXT

    def seconds(self, batch: int, precision: str, convolutions: bool) -> float:
        """Return a rough time of a step on an H200, in seconds."""
        kind = "half" if precision != "fp32" else "fp32_convolution" if convolutions else "fp32"
        return 3 * self.flops * batch / _FLOPS[kind] + 12 * self.numbers * batch / _BYTES_A_SECOND

    def activated(self, size: int, act: str, batch_norm: bool, dropout: float) -> None:
        """Add norm, activation function and dropout over an output of `size` numbers, up to the next layer's input."""
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
    """Return the cost of a model of the factory `mlp`."""
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
    """Return the cost of a model of the factory `cnn`; `side` is the width of its square images."""
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
            cost.bytes += 8 * width * at * at if by == "max" else 0  # the indices of the maxima
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
            cost.numbers += width * at * at  # concatenated input and output
        else:
            cost.activated(convolve(width, outputs, kernel, at), act, norm, dropout)
            width = outputs
    cost.parameters += width * classes + classes
    cost.numbers += width + 2 * classes
    return cost


def transformer_cost(settings: dict[str, Any], length: int, classes: int) -> Cost:
    """Return the cost of a model of the factory `transformer`."""
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
    # Per token: the stream and its norm, queries, keys, values, and the mixed values (with heads apart and joined).
    numbers = attentions * (2 * size + 3 * size + 2 * size) + layers * (2 * size + middle * (1 if act == "relu" else 2))
    bytes_ = (attentions + layers) * size if dropout else 0
    if settings["eager"]:
        scores = attentions * settings["heads"] * length
        numbers += scores * (2 if dropout else 1) + 3 * attentions * size  # matrix products need contiguous operands
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


# The ranges of a family's features: from the appendix of the GPUMemNet paper, overridden by a TOML file.
#
# [cnn]
# side = [64, 128]                # from, to
# arch = ["residual", "dense"]    # one of these
# optimizer = { adam = 3, sgd = 1 }   # one of these, with weights
#
# A range takes two numbers, a choice a list, a choice with weights a table.

FAMILIES = ("mlp", "cnn", "transformer")
_ACTIVATIONS = ("relu", "elu", "tanh", "gelu", "silu", "selu", "leaky_relu", "prelu", "mish", "softplus", "identity")
_OPTIMIZERS = {
    "adam": 7.0,
    "adamw": 1.0,
    "adamw_fused": 1.0,
    "sgd": 1.0,
    "sgdm": 1.0,
    "rmsprop": 1.0,
    "adagrad": 1.0,
    "adafactor": 1.0,
}
_PRECISIONS = {"fp32": 3.0, "amp_bf16": 1.0, "amp_fp16": 1.0, "bf16": 1.0}
_SHARED: dict[str, Any] = {
    "dropout": (0.1, 0.5),
    "with_dropout": (0.5,),
    "optimizer": _OPTIMIZERS,
    "precision": _PRECISIONS,
}

# A tuple of two numbers is a range, of one number a probability, a list a choice, a dictionary a choice with weights.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mlp": _SHARED
    | {
        "arch": list(MLP_FORMS),
        "act": list(_ACTIVATIONS),
        "inputs": (4, 4096),
        "classes": (1, 1024),
        "hidden": (1, 11),
        "batch": (4, 1024),
        "with_batch_norm": (0.5,),
        "balanced": (0.2,),
    },
    "cnn": _SHARED
    | {
        "arch": list(CNN_FORMS),
        "act": list(_ACTIVATIONS[:-1]),
        "side": (32, 224),
        "channels": [1, 3],
        "classes": (2, 22_000),
        "filters": (16, 512),
        "depth": (1, 29),
        "batch": (2, 62),
        "kernel": [1, 3, 5, 7],
        "mixed_kernels": (0.3,),
        "down_by": ["max", "avg", "stride"],
        "with_batch_norm": (0.5,),
        "balanced": (0.5,),
    },
    "transformer": _SHARED
    | {
        "arch": list(TRANSFORMER_FORMS),
        "act": ["gelu", "relu", "silu"],
        "vocabulary": (50_000, 1_000_000),
        "length": [128, 192, 256, 384, 512, 640, 768, 896, 1024],
        "size": (128, 2048),
        "layers": (2, 39),
        "heads": [2, 4, 8, 12, 16],
        "middle": (2.0, 4.0),
        "classes": (400, 1000),
        "batch": (1, 128),
        "with_dropout": (0.75,),
        "norm_first": (0.6,),
        "conv1d": (0.3,),
        "fused": (0.6,),
        "eager": (0.3,),
        "words": (0.3,),
        "words_vocabulary": (8_000, 64_000),
        "balanced": (0.5,),
    },
}


def ranges(family: str, file: Path | None = None) -> dict[str, Any]:
    """Return the ranges of a family, overridden by the file's table of that name."""
    if family not in DEFAULTS:
        raise UnknownName("family", family, (*FAMILIES, "real"))
    known = dict(DEFAULTS[family])
    if file is None:
        return known
    for name, value in _table(file, family).items():
        if name not in known:
            raise UnknownName(f"setting of [{family}] in {file}", name, known)
        known[name] = _read(f"{file}, [{family}], {name}", name, value, DEFAULTS[family][name])
    return known


def _table(file: Path, family: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} must be TOML: {error}") from None
    for name in content:
        if name not in FAMILIES:
            raise UnknownName(f"table in {file}", name, FAMILIES)
    table = content.get(family, {})
    if not isinstance(table, dict):
        raise InvalidValue(f"{file}: {family} must be a table [{family}], got {table!r}")
    return table


def _read(where: str, name: str, value: Any, default: Any) -> Any:
    if isinstance(default, dict):
        return _weights(where, name, value)
    if isinstance(default, list):
        return _choice(where, name, value, default)
    if len(default) == 1:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise InvalidValue(f"{where} must be a share from 0 to 1, got {value!r}")
        return (float(value),)
    whole = isinstance(default[0], int)
    numbers = isinstance(value, list) and len(value) == 2
    if not numbers or any(isinstance(end, bool) or not isinstance(end, int if whole else int | float) for end in value):
        kind = "whole numbers" if whole else "numbers"
        raise InvalidValue(f"{where} must be two {kind}, [from, to], got {value!r}")
    low, high = value
    if low > high or low < (1 if whole else 0) or (name == "dropout" and high >= 1):
        raise InvalidValue(f"{where} must be a range of positive numbers, the smaller one first, got {value!r}")
    return (low, high) if whole else (float(low), float(high))


def _choice(where: str, name: str, value: Any, default: list[Any]) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidValue(f"{where} must be a list of one or more, got {value!r}")
    for one in value:
        if isinstance(default[0], str):
            if one not in default:
                raise UnknownName(f"{name} ({where})", str(one), default)
        elif not isinstance(one, int) or isinstance(one, bool) or one < 1:
            raise InvalidValue(f"{where} must be whole numbers of at least 1, got {one!r}")
        elif name == "kernel" and one % 2 == 0:
            raise InvalidValue(f"{where} must be odd sizes of filters, which keep the image's size, got {one!r}")
    return value


def _weights(where: str, name: str, value: Any) -> dict[str, float]:
    known = OPTIMIZERS if name == "optimizer" else PRECISIONS
    if isinstance(value, list):
        value = {str(one): 1.0 for one in value}
    if not isinstance(value, dict) or not value:
        raise InvalidValue(f"{where} must be a list or a table of names and weights, got {value!r}")
    for one, weight in value.items():
        if one not in known:
            raise UnknownName(f"{name} ({where})", one, known)
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight <= 0:
            raise InvalidValue(f"{where}: weight of {one} must be above 0, got {weight!r}")
    return value


@dataclass(frozen=True)
class DrawingLimits:
    """Limits of a run: bytes of GPU memory and seconds per step, as `Cost` counts them.

    A step must take `least_seconds`, since small runs wait for the host and show little of the GPU.
    """

    memory: int = 40 * GIB
    seconds: float = MOST_SECONDS
    least_seconds: float = 0.0


def generate(
    family: str, count: int, seed: int, known: dict[str, Any] | None = None, limits: DrawingLimits | None = None
) -> Iterator[dict[str, Any]]:
    """Return N rows of a family in the form of a file of configurations."""
    for number in range(count):
        yield draw(family, number, seed, known or DEFAULTS[family], limits or DrawingLimits())


def draw(family: str, number: int, seed: int, known: dict[str, Any], limits: DrawingLimits) -> dict[str, Any]:
    chance = random.Random(f"ullage {family} {seed} {number}")
    wanted = None
    if chance.random() < known["balanced"][0]:
        classes = min(MOST_CLASSES[family], -(-limits.memory // CLASS[family]))
        wanted = chance.randrange(classes)
    last: dict[str, Any] | None = None
    for tried in range(_TRIES):
        if tried % _KEEP == 0:
            form, ways = chance.choice(known["arch"]), _ways(chance, known)
        row, cost = _DRAWS[family](chance, known, form, ways)
        need = cost.memory(row["batch"], row["opt"], row["precision"])
        process = cost.process(row["batch"], row["opt"], row["precision"])
        if not _feasible(family, row, cost, process, limits):
            continue
        row = {
            "id": f"{family}-{seed}-{number:05d}",
            "family": family,
            **row,
            "parameters": cost.parameters,
            "need": need,
            "guess": process,
        }
        if wanted is None or process // CLASS[family] == wanted:
            return row
        last = last or row
    if last is None:
        raise InvalidValue(
            f"no feasible {family} in {_TRIES} draws: allow more than {format_bytes(limits.memory)} and "
            f"{limits.seconds} s a step, or smaller sizes in --config"
        )
    return last  # the class is out of reach for these ranges


def _feasible(family: str, row: dict[str, Any], cost: Cost, process: int, limits: DrawingLimits) -> bool:
    return (
        cost.parameters <= MOST_PARAMETERS[family]
        and process <= limits.memory
        and limits.least_seconds <= cost.seconds(row["batch"], row["precision"], family == "cnn") <= limits.seconds
    )


def _whole(chance: random.Random, known: dict[str, Any], name: str) -> int:
    return chance.randint(*known[name])


def _happens(chance: random.Random, known: dict[str, Any], name: str) -> bool:
    return chance.random() < float(known[name][0])


def _rate(chance: random.Random, known: dict[str, Any]) -> float:
    return round(chance.uniform(*known["dropout"]), 2) if _happens(chance, known, "with_dropout") else 0.0


def _ways(chance: random.Random, known: dict[str, Any]) -> dict[str, Any]:
    optimizers, precisions = known["optimizer"], known["precision"]
    return {
        "opt": chance.choices(list(optimizers), list(optimizers.values()))[0],
        "precision": chance.choices(list(precisions), list(precisions.values()))[0],
    }


def _row(
    batch: int, model: str, arch: str, ways: dict[str, Any], settings: dict[str, Any], **sizes: Any
) -> dict[str, Any]:
    name = f"ullage_lab.networks.generated:{model}"
    return {"arch": arch, "model": name, "batch": batch, **sizes, **ways, "settings": settings}


def _mlp(chance: random.Random, known: dict[str, Any], arch: str, ways: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
    act = chance.choice(known["act"])
    inputs, classes = _whole(chance, known, "inputs"), _whole(chance, known, "classes")
    classes = max(known["classes"][0], min(classes, inputs // 4))  # as in the paper, networks narrow towards the output
    widths = mlp_widths(arch, inputs, classes, _whole(chance, known, "hidden"))
    norm, dropout = _happens(chance, known, "with_batch_norm"), _rate(chance, known)
    settings = {"widths": widths, "act": act, "batch_norm": norm, "dropout": dropout}
    row = _row(_whole(chance, known, "batch"), "mlp", arch, ways, settings, input=[inputs], classes=classes)
    return row, mlp_cost(widths, classes, act, norm, dropout)


def _cnn(chance: random.Random, known: dict[str, Any], arch: str, ways: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
    act = chance.choice(known["act"])
    side, channels, depth = (
        _whole(chance, known, "side"),
        chance.choice(known["channels"]),
        _whole(chance, known, "depth"),
    )
    filters = cnn_filters(arch, _whole(chance, known, "filters"), _whole(chance, known, "filters"), depth)
    if arch == "dense":
        filters = [max(4, count // 8) for count in filters]  # they add up from layer to layer
    kernel = chance.choice(known["kernel"])
    mixed = _happens(chance, known, "mixed_kernels")
    kernels = [chance.choice(known["kernel"]) if mixed else kernel for _ in range(depth)]
    settings = {
        "arch": arch,
        "channels": channels,
        "filters": filters,
        "kernels": kernels,
        "down": _halvings(chance, arch, side, kernels),
        "down_by": chance.choice(known["down_by"]),
        "act": act,
        "batch_norm": _happens(chance, known, "with_batch_norm"),
        "dropout": _rate(chance, known),
    }
    classes = _whole(chance, known, "classes")
    batch = _whole(chance, known, "batch")
    row = _row(batch, "cnn", arch, ways, settings, input=[channels, side, side], classes=classes)
    return row, cnn_cost(settings, side, classes)


def _halvings(chance: random.Random, arch: str, side: int, kernels: list[int]) -> list[int]:
    """Choose up to five convolutions before which the image is halved, never below the size of a later filter."""
    step = 2 if arch == "residual" else 1
    places = list(range(step, len(kernels), step))
    chosen = sorted(chance.sample(places, min(len(places), chance.randint(0, 5))))
    while chosen and any(
        at < max(kernel, 2) for at, kernel in zip(image_sides(side, len(kernels), chosen), kernels, strict=True)
    ):
        chosen.pop()
    return chosen


def _transformer(
    chance: random.Random, known: dict[str, Any], arch: str, ways: dict[str, Any]
) -> tuple[dict[str, Any], Cost]:
    heads = chance.choice(known["heads"])
    step = 8 * heads  # head sizes that suit tensor cores
    low, high = known["size"]
    size = step * chance.randint(max(1, -(-low // step)), max(1, high // step))
    words = arch == "decoder" and _happens(chance, known, "words")
    layers = _whole(chance, known, "layers")
    length = chance.choice(known["length"])
    settings = {
        "kind": arch,
        "vocabulary": _whole(chance, known, "words_vocabulary" if words else "vocabulary"),
        "length": length,
        "size": size,
        "layers": max(2, layers) if arch == "hybrid" else layers,
        "heads": heads,
        "middle": int(size * chance.uniform(*known["middle"])) // 8 * 8,
        "head": "words" if words else "classes",
        "dropout": _rate(chance, known),
        "act": chance.choice(known["act"]),
        "norm_first": _happens(chance, known, "norm_first"),
        "conv1d": _happens(chance, known, "conv1d"),
        "fused": _happens(chance, known, "fused"),
        "eager": _happens(chance, known, "eager"),
    }
    classes = _whole(chance, known, "classes")
    row = _row(_whole(chance, known, "batch"), "transformer", arch, ways, settings, seq=length, classes=classes)
    return row, transformer_cost(settings, length, classes)


_DRAWS = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of drawn rows of each form, optimizer and precision, and in each class of memory."""
    needs = sorted(row["guess"] for row in rows)
    unit = CLASS.get(rows[0]["family"], 8 * GIB) if rows else None
    classes = Counter(row["guess"] // (unit or 1) for row in rows)
    return {
        "rows": len(rows),
        "smallest": needs[0] if needs else None,
        "median": needs[len(needs) // 2] if needs else None,
        "largest": needs[-1] if needs else None,
        "class_bytes": unit,
        "classes": dict(sorted(classes.items())),
        **{name: dict(Counter(row[name] for row in rows).most_common()) for name in ("arch", "opt", "precision")},
    }
