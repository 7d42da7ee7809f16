"""Convolutions as cuDNN is asked about them, of a list of calls or drawn at random, for `ullage measure cudnn`."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ullage.virtual.kernels.cudnn.convolution import backward_plan, forward_plan
from ullage.virtual.kernels.cudnn.formulas import ConvolutionProblem, Workspace
from ullage.virtual.kernels.cudnn.layouts import Operand, settings_of
from ullage_lab.draw.convolutions import arbitrary_configurations, random_layer
from ullage_lab.draw.layers import LAYOUTS, TYPES, ConvolutionLayer, layout_strides, read_tasks

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_LIKE_MODELS = 0.5  # of the random problems; the others have any whole numbers as channels and sides
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)


def problems_of(layer: ConvolutionLayer, batch: int, kind: str, layout: str) -> list[ConvolutionProblem]:
    """What a layer's forward and backward calls give to cuDNN.

    >>> layer = ConvolutionLayer((3, 8, 8), (16, 3, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1, False)
    >>> [problem.direction for problem in problems_of(layer, 4, "f32", "c")]
    ['f', 'd', 'w']
    """
    found: list[ConvolutionProblem] = []

    def ask(problem: ConvolutionProblem) -> Workspace:
        found.append(problem)
        return Workspace(0, 0)

    def operand(size: tuple[int, ...]) -> Operand:
        return Operand(size, layout_strides(size, layout), _DTYPES[kind])

    source, weight, out = map(operand, ((batch, *layer.input), layer.weight, (batch, *layer.output())))
    settings = settings_of(layer[2:8], len(layer.input) - 1)
    forward_plan(source, weight, settings, True, ask)
    backward_plan(out, source, weight, settings, [True, True, False], True, ask)
    return found


def listed_problems(path: Path) -> list[ConvolutionProblem]:
    """Those of a list of calls, in its order."""
    layers, tasks = read_tasks(path)
    calls = dict.fromkeys((task.layer, task.batch, TYPES[task.type], LAYOUTS[task.layout]) for task in tasks)
    found = (problems_of(layers[number], batch, kind, layout) for number, batch, kind, layout in calls)
    return list(dict.fromkeys(problem for several in found for problem in several))


def random_problems(count: int, seed: int) -> list[ConvolutionProblem]:
    """Drawn problems, of layers such as models have and of any others.

    >>> len(random_problems(5, seed=1))
    5
    """
    chance, found = random.Random(seed), dict[ConvolutionProblem, None]()
    arbitrary = arbitrary_configurations(count, seed)
    while len(found) < count:
        if chance.random() < _LIKE_MODELS:
            layer, batch = random_layer(chance), chance.choice(_BATCHES)
            kind, layout = chance.choice(TYPES), chance.choice(LAYOUTS)
        else:
            layer, batch, *numbers = next(arbitrary)
            kind, layout = TYPES[numbers[0]], LAYOUTS[numbers[1]]
        if min(layer.output()) > 0:
            found.update(dict.fromkeys(problems_of(layer, batch, kind, layout)))
    return list(found)[:count]
