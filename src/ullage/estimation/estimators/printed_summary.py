"""A model summary, read from a text: a table of torchsummary or torchinfo, or the printed modules of a language model,
each with its number of parameters."""

import math
import re
from typing import NamedTuple

from torch import nn

from ullage.errors import InvalidValue

_NUMBER = re.compile(r"-?\d+")
_LARGEST, _DIGITS = 1 << 50, 20  # of a number; more digits say no more
_TORCHSUMMARY = re.compile(r"^\s*([A-Za-z_]\w*)-\d+\s+(\[.*\])\s+([\d,]+)\s*$")
_TORCHINFO = re.compile(r"^([\s│├└─|+]*)([A-Za-z_]\w*)(?: \([^)]*\))?(?:: [\d-]+)?$")
_TITLE = re.compile(r"\S+(?: \S+)*")  # of a column
_PRINTED = re.compile(r"^(\s*)(?:\(\w+\): )?([A-Za-z_]\w*)\((.*?)(?:\)(?:, ([\d,]+) params)?)?$")
_WIDTH = re.compile(r"out_features=(\d+)|^\(?\d+, (\d+)|^\((\d+),\)")  # Linear, Embedding, LayerNorm
_TOTAL = re.compile(r"^\s*Total params:\s*([\d,]+)", re.MULTILINE)
LAYERS = {name: value for name, value in vars(nn).items() if isinstance(value, type)}
_NAMES = {name.casefold(): name for name in LAYERS}
FUNCTION = re.compile(r".*(ReLU|ELU|GELU|SiLU|Swish|Mish|Tanh|Sigmoid|Softplus|Hardswish).*")


class SummaryLayer(NamedTuple):
    """A layer: its class, the number of output values for one sample, and its own parameters."""

    kind: str
    outputs: int
    parameters: int


class ModelSummary(NamedTuple):
    """The layers of a model in the order of the forward pass, the number of all parameters, the batch size if it is
    known, what the summary lacks, and the activation function if no layer shows it."""

    layers: tuple[SummaryLayer, ...]
    parameters: int
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    activation_function: str | None = None


def read_summary(text: str, sequence_length: int | None = None) -> ModelSummary:
    """Read a text. Printed modules have no output shapes; a language model's follow from the length of a sequence."""
    lines = text.splitlines()
    table = [row for row in map(_TORCHSUMMARY.match, lines) if row]
    tabled = [(row[1], _first_shape(row[2]), _whole(row[3])) for row in table] or _torchinfo_rows(lines)
    rows = tabled or _printed_rows(lines, sequence_length)
    if not rows and any(row[2] in LAYERS for row in map(_PRINTED.match, lines) if row):
        raise InvalidValue(
            "a summary must have the parameters of each layer, and what print(model) shows has none: print it with "
            "torchinfo, as in summary(model, input_size=(1, 3, 224, 224), depth=99)"
        )
    if not rows:
        raise InvalidValue(
            "a summary must be the text that torchsummary or torchinfo print, with the columns layer, output shape "
            "and parameters; no layers found"
        )
    total, parameters, notes = _TOTAL.search(text), sum(own for _, _, own in rows), list[str]()
    batches = {shape[0] for _, shape, _ in rows if len(shape) > 1 and shape[0] > 0}
    kinds = [_NAMES.get(kind.casefold(), kind) for kind, _, _ in rows]
    outputs = [math.prod(shape[1:]) if shape else 0 for _, shape, _ in rows]
    if max(parameters, *map(abs, outputs)) > _LARGEST:
        raise InvalidValue(f"a summary must have layers of at most {_LARGEST:,} values, got a larger one")
    if total is None:
        notes.append("the text has no line with its total, so it may have been cut off: its parameters are a sum")
    elif tabled and (whole := _whole(total[1])) != parameters:
        if "(recursive)" not in text:
            raise InvalidValue(
                f"the layers of a summary must add up to its total, {whole:,} parameters, but they have "
                f"{parameters:,}; print all of them, with torchinfo: depth=99"
            )
        notes.append(f"{whole - parameters:,} of {whole:,} parameters are in modules that the text does not show")
        parameters = whole
    if closed := sorted({kind for kind, (_, _, own) in zip(kinds, rows, strict=True) if own and kind not in LAYERS}):
        notes.append(f"the text does not show what is inside {', '.join(closed)}: print it with torchinfo, depth=99")
    layers = [  # without modules that only hold others
        SummaryLayer(kind, output, own)
        for kind, output, (_, _, own) in zip(kinds, outputs, rows, strict=True)
        if own or kind in LAYERS or FUNCTION.fullmatch(kind)
    ]
    return ModelSummary(tuple(layers), parameters, batches.pop() if len(batches) == 1 else None, tuple(notes))


def _torchinfo_rows(lines: list[str]) -> list[tuple[str, list[int], int]]:
    """Read the rows, except those of modules that contain others (deeper rows follow) and only their parameters."""
    head = next((place for place, line in enumerate(lines) if line.casefold().startswith("layer (type")), 0)
    starts = {title[0].casefold(): title.start() for title in _TITLE.finditer(lines[head] if lines else "")}
    if not {"output shape", "param #"} <= starts.keys():
        return []
    ends = dict(zip(starts.values(), [*list(starts.values())[1:], None], strict=True))
    tables = [
        (row, [line[start : ends[start]].strip() for start in (starts["output shape"], starts["param #"])])
        for line in lines[head + 1 :]
        if (row := _TORCHINFO.match(line[: ends[0]].rstrip())) and len(line) > starts["param #"]
    ]
    depths = [len(row[1]) for row, _ in tables] + [0]
    return [
        (row[2], _first_shape(shape), own)
        for place, (row, (shape, number)) in enumerate(tables)
        if (own := _whole(number)) or depths[place + 1] <= depths[place]
    ]


def _printed_rows(lines: list[str], sequence_length: int | None) -> list[tuple[str, list[int], int]]:
    """Read modules as PyTorch prints them, with `, N params` after each. A layer that does not print its width has the
    one that its parameters tell (transformers' Conv1D), or that of the layer before it."""
    matches = [row for row in map(_PRINTED.match, lines) if row and row[4]]
    if matches and sequence_length is None:
        raise InvalidValue(
            "a summary must have output shapes, and this one has none: give the length of its sequences, as in "
            "--sequence-length 512, or print it with torchinfo"
        )
    rows, width, norm = list[tuple[str, list[int], int]](), 0, 0
    for row in matches:
        own, printed = _whole(row[4]), _WIDTH.search(row[3])
        if printed:
            width = int(next(filter(None, printed.groups())))
        elif own:
            width = next((own // (inputs + 1) for inputs in (norm, width) if inputs and own % (inputs + 1) == 0), width)
        norm = width if "norm" in row[2].casefold() else norm
        rows.append((row[2], [-1, sequence_length or 0, width], own))
    return rows


def _first_shape(text: str) -> list[int]:
    """Return the first shape, if a layer has several outputs."""
    return [int(number[:_DIGITS]) for number in _NUMBER.findall(text.split("]")[0])]


def _whole(text: str) -> int:
    digits = text.replace(",", "")
    return int(digits[:_DIGITS]) if digits.isdecimal() else 0
