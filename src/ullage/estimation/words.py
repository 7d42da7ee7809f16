"""Descriptions of models, requests and parts of the memory."""

import re
from collections.abc import Sequence
from typing import Any

from ullage.units import format_bytes

BREAKDOWN_WORDS = {
    "parameters": "weights and buffers",
    "copies": "copies of the weights, such as a moving average (EMA)",
    "gradients": "gradients of the weights",
    "optimizer": "the optimizer's state and its temporaries",
    "activations": "inputs, activations and temporaries",
    "workspace": "kept by cuBLAS",
    "fragmentation": "reserved by the allocator beyond what is in use",
    "context": "CUDA context, libraries and kernels",
}

# The colour of each part of the breakdown: the same in a report and on the timeline page.
BREAKDOWN_COLOURS = {
    "parameters": "#3b7dd8",
    "gradients": "#2fa36b",
    "optimizer": "#e8a33d",
    "copies": "#57b5c9",
    "activations": "#8e6bd1",
    "workspace": "#d1637d",
    "fragmentation": "#a3adba",
    "context": "#6f7c8e",
}

AT_THEIR_MAXIMUM = "data-dependent shapes at their maximum"
_COUNTABLE = ("data-dependent shapes", "values", "numbers", "operators")
_TIMES = re.compile(r" \(([0-9]+) times\)$")
_NUMBERS = re.compile(r"\(?[0-9]+(?:, ?[0-9]*)*\)?")


def folded(notes: Sequence[str]) -> list[str]:
    """Fold notes that differ only in their numbers into one."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(_NUMBERS.sub("#", _TIMES.sub("", note)), []).append(note)
    return [alike[0] if len(alike) == 1 else _as_one(alike) for alike in groups.values()]


def _as_one(notes: list[str]) -> str:
    counts = [_TIMES.search(note) for note in notes]
    times = sum(int(count[1]) if count else 1 for count in counts)
    first = _TIMES.sub("", notes[0])
    return f"{first}, and {len(notes) - 1} more like it ({times} times in all; --json lists them)"


def listed(entries: list[dict[str, Any]], counted: bool = True) -> str:
    words = []
    for entry in entries:
        with_count = counted and entry["count"] > 1 and entry["what"].startswith(_COUNTABLE)
        words.append(f"{entry['count']} {entry['what']}" if with_count else entry["what"])
    return ", ".join(words)


def model_words(model: dict[str, Any]) -> str:
    """
    >>> model_words({"name": "Net", "parameters": 2000, "trainable": 10, "bytes": 4096, "types": {"float16": 4096}})
    'Net: 2,000 parameters, 10 trainable, 4.00 KiB of float16'
    """
    count, trainable = model["parameters"], model["trainable"]
    of_them = "all" if trainable == count else f"{trainable:,}" if trainable else "none"
    types = " and ".join(model["types"])
    return f"{model['name']}: {count:,} parameters, {of_them} trainable, {format_bytes(model['bytes'])} of {types}"


def moment(
    operator: str | None, module: str | None, part: str | None, step: int | None, module_class: str | None = None
) -> str | None:
    if operator is None or part is None:
        return None
    if module_class and module and module.rpartition(".")[2] != module_class:
        module = f"{module} ({module_class})"
    places = {
        "forward": f"in the forward pass of {module}",
        "backward": f"in the backward pass of {module}" if module else "in the backward pass",
        "optimizer": f"in {module}",
        "outside": "outside of the model",
    }
    short = operator.removeprefix("aten.").removesuffix(".default")
    return places[part] + (f", step {step}" if step is not None else "") + (f" ({short})" if short else "")


def used_of(used: int, of: int) -> str:
    """Join two sizes; a common unit appears once."""
    first, second = format_bytes(used), format_bytes(of)
    number, unit = first.split()
    return f"{number if second.endswith(unit) else first} of {second}"
