"""Draws training runs of generated networks: MLPs, CNNs and Transformers over the ranges of `ranges.py`.

Every row has a source of chance of its own, made of seed, family and number: the same seed gives the same set, and a
larger set begins with the smaller one. Features are drawn uniformly; a design that is not feasible (an image smaller
than the filter, more memory or time than allowed) is drawn again. A share of the rows (`balanced`) is drawn for a
class of memory, each class as often as the others: uniform features alone give mostly small runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.errors import InvalidValue
from ullage.learn.costs import Cost, cnn_cost, mlp_cost, transformer_cost
from ullage.learn.ranges import DEFAULTS
from ullage.learn.shapes import cnn_filters, image_sides, mlp_widths
from ullage.units import GIB, format_bytes

MOST_PARAMETERS = {"mlp": 200_000_000, "cnn": 330_000_000, "transformer": 3_200_000_000}
MOST_SECONDS = 0.12  # of a step
CLASS = {"mlp": GIB, "cnn": 8 * GIB, "transformer": 8 * GIB}
MOST_CLASSES = {"mlp": 4, "cnn": 5, "transformer": 5}
_TRIES = 3000
# Form, optimizer and precision are drawn anew only after so many tries: else rejecting large designs would leave few
# runs in 32 bits; and a class may be out of reach for some of them.
_KEEP = 200


@dataclass(frozen=True)
class Limits:
    """What a run may take at most: bytes of GPU memory and seconds a step, both as `costs.py` counts them."""

    memory: int = 40 * GIB
    seconds: float = MOST_SECONDS


def generate(
    family: str, count: int, seed: int, known: dict[str, Any] | None = None, limits: Limits | None = None
) -> Iterator[dict[str, Any]]:
    """So many rows of a family, in the form of a file of configurations.

    >>> [row["batch"] for row in generate("mlp", 3, 7)] == [row["batch"] for row in generate("mlp", 3, 7)]
    True
    """
    for number in range(count):
        yield draw(family, number, seed, known or DEFAULTS[family], limits or Limits())


def draw(family: str, number: int, seed: int, known: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The row of this number."""
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


def _feasible(family: str, row: dict[str, Any], cost: Cost, process: int, limits: Limits) -> bool:
    return (
        cost.parameters <= MOST_PARAMETERS[family]
        and process <= limits.memory
        and cost.seconds(row["batch"], row["precision"], family == "cnn") <= limits.seconds
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


def _mlp(chance: random.Random, known: dict[str, Any], arch: str, ways: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
    act = chance.choice(known["act"])
    inputs, classes = _whole(chance, known, "inputs"), _whole(chance, known, "classes")
    classes = max(known["classes"][0], min(classes, inputs // 4))  # as the authors: networks narrow towards the output
    widths = mlp_widths(arch, inputs, classes, _whole(chance, known, "hidden"))
    norm, dropout = _happens(chance, known, "with_batch_norm"), _rate(chance, known)
    row = {
        "arch": arch,
        "model": "ullage.learn.families:mlp",
        "batch": _whole(chance, known, "batch"),
        "input": [inputs],
        "classes": classes,
        **ways,
        "settings": {"widths": widths, "act": act, "batch_norm": norm, "dropout": dropout},
    }
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
        "arch": arch, "channels": channels, "filters": filters, "kernels": kernels,
        "down": _halvings(chance, arch, side, kernels), "down_by": chance.choice(known["down_by"]), "act": act,
        "batch_norm": _happens(chance, known, "with_batch_norm"), "dropout": _rate(chance, known),
    }  # fmt: skip
    classes = _whole(chance, known, "classes")
    row = {
        "arch": arch,
        "model": "ullage.learn.families:cnn",
        "batch": _whole(chance, known, "batch"),
        "input": [channels, side, side],
        "classes": classes,
        **ways,
        "settings": settings,
    }
    return row, cnn_cost(settings, side, classes)


def _halvings(chance: random.Random, arch: str, side: int, kernels: list[int]) -> list[int]:
    """Before which convolutions the image is halved: none to five, never below the size of a filter after it."""
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
    step = 8 * heads  # whole heads of a size that tensor cores like
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
    row = {
        "arch": arch,
        "model": "ullage.learn.families:transformer",
        "batch": _whole(chance, known, "batch"),
        "seq": length,
        "classes": classes,
        **ways,
        "settings": settings,
    }
    return row, transformer_cost(settings, length, classes)


_DRAWS = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was drawn: how many of each form, optimizer and precision, and how many in each class of memory.

    >>> summary(list(generate("cnn", 5, 1)))["rows"]
    5
    """
    needs = sorted(row["guess"] for row in rows)
    classes = Counter(row["guess"] // CLASS[row["family"]] for row in rows)
    return {
        "rows": len(rows),
        "smallest": needs[0] if needs else None,
        "median": needs[len(needs) // 2] if needs else None,
        "largest": needs[-1] if needs else None,
        "class_bytes": CLASS[rows[0]["family"]] if rows else None,
        "classes": dict(sorted(classes.items())),
        **{name: dict(Counter(row[name] for row in rows).most_common()) for name in ("arch", "opt", "precision")},
    }
