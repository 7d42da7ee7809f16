"""Measured convolution calls taken apart: which of the requests of a call are cuDNN's workspaces.

The rule of the virtual GPU says in which order PyTorch asks for outputs and copies, with a gap where cuDNN may ask
for a workspace; what a measured call asked for is laid beside it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ullage.measure.convolution_tasks import layout_strides
from ullage.virtual.kernels.convolution import backward_plan, forward_plan
from ullage.virtual.kernels.convolution_layouts import Operand, settings_of
from ullage.virtual.kernels.cudnn_workspaces import Problem, Workspace
from ullage.virtual.kernels.plan import OUTPUT, TEMPORARY, New, Output

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def read_calls(path: Path) -> Iterator[Any]:
    """The lines of a measured file that are convolutions."""
    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith('[["aten.convolution'):
                yield json.loads(line)


def workspaces_of(row: Any) -> list[tuple[Problem, int]] | None:
    """The problems that a measured call gave to cuDNN, with the bytes of each workspace; `None` if it does not fit.

    >>> call = ["aten.convolution.default", [[[1, 8, 4, 4], "f32", "c"], [[8, 8, 1, 1], "f32", "c"], None,
    ...         [1, 1], [0, 0], [1, 1], False, [0, 0], 1], {}]
    >>> [size for _, size in workspaces_of([call, [512, 400], [512], 2])]
    [400]
    """
    (name, arguments, _), requests, _, count = row
    asked: list[Problem] = []

    def ask(problem: Problem) -> Workspace:
        asked.append(problem)
        return Workspace(-len(asked), -len(asked))

    if name == "aten.convolution.default":
        source, weight = _operand(arguments[0]), _operand(arguments[1])
        plan = forward_plan(source, weight, settings_of(arguments[3:9], len(source.size) - 2), True, ask)
        template = _template(plan.steps or [], plan.outputs)
        sum_follows = False
    else:
        grad, source, weight = (_operand(value) for value in arguments[:3])
        settings, mask = settings_of(arguments[4:10], len(source.size) - 2), arguments[10]
        outputs, run = backward_plan(grad, source, weight, settings, mask, True, ask)
        template = _template(run.steps.steps, outputs)
        sum_follows = bool(mask[2])
        if sum_follows:
            template.append(grad.size[1] * grad.dtype.itemsize)
    if count != len(requests):
        return None
    sizes = _fit(template, requests, sum_follows)
    return None if sizes is None else [(problem, sizes.get(-place - 1, 0)) for place, problem in enumerate(asked)]


def _operand(described: Any) -> Operand:
    size, kind, layout = described
    strides = layout_strides(size, layout) if isinstance(layout, str) else tuple(layout)
    return Operand(tuple(size), strides, _DTYPES[kind])


def _template(steps: Iterable[tuple[int, int]], outputs: Sequence[Output]) -> list[int]:
    """Sizes in order; negative numbers stand for workspaces."""
    sizes = []
    for step, value in steps:
        if step == OUTPUT:
            output = outputs[value]
            assert isinstance(output, New)
            sizes.append(output.nbytes)
        elif step == TEMPORARY:
            sizes.append(value)
    return [size for size in sizes if size]


def _fit(template: Sequence[int], requests: Sequence[int], more: bool) -> dict[int, int] | None:
    """Sizes of the gaps so that the template is the list of requests; a gap may be nothing."""
    if not template:
        return {} if more or not requests else None
    first = template[0]
    if first >= 0:
        return _fit(template[1:], requests[1:], more) if requests and requests[0] == first else None
    without = _fit(template[1:], requests, more)
    if without is not None or not requests:
        return without
    rest = _fit(template[1:], requests[1:], more)
    return None if rest is None else {first: requests[0], **rest}
