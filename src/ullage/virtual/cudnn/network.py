"""A network that guesses cuDNN's plan for a convolution on an H200, trained on cuDNN's own answers
(`benchmarks/training/plan_network.py`): it gives every plan a probability. Needs NumPy."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ullage.units import round_up
from ullage.virtual.cudnn.arrays import needed_numpy
from ullage.virtual.cudnn.formulas import DATA, FILTER, FORWARD, ConvolutionProblem, Lengths, lengths
from ullage.virtual.cudnn.plans import MULTIPROCESSORS, EnginePlan, fallback

DOUBT = 2.0  # divides scores: then less confident than accurate on problems held out of training (1.4: equally)
_MOST_LIKELY = 12  # plans that are considered
NO_PLAN_NAMED = -1  # in place of an engine, in the list of plans: cuDNN's heuristics name none

_TILE_SHAPES = (
    *((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64)),
    *((64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 32)),
)


def log2_or_zero(number: float) -> float:
    return math.log2(number) if number > 1 else 0.0


def network_inputs(
    size: Lengths, direction: str, log2: Callable[[Any], Any] = log2_or_zero, least: Callable[..., Any] = min
) -> list[Any]:
    """Return the network's inputs for a problem: logarithms of lengths, their divisors, and how tiles fill the GPU.

    With columns of many problems and NumPy's functions it returns columns. It uses only operators that both have.
    """
    batch, inner, outer, groups, item = size.batch, size.inner, size.outer, size.groups, size.item
    s, k, o, t, p, d = size.source, size.filter, size.out, size.stride, size.padding, size.dilation
    pixels, out_pixels, taps, wide, tall = size.pixels, size.out_pixels, size.taps, size.wide, size.tall
    each = range(3)
    inputs: list[Any] = []

    def logs(*values: Any) -> None:
        inputs.extend(log2(value) for value in values)

    def equal(value: Any, *numbers: int) -> None:
        inputs.extend(value == number for number in numbers)

    def multiples(value: Any, *units: int) -> None:
        inputs.extend(value % unit == 0 for unit in units)

    def every(flags: list[Any]) -> Any:
        return flags[0] & flags[1] & flags[2]

    logs(batch, inner, outer, groups, *s, *k, *o, *t, *d, *(length + 1 for length in p))
    equal(size.kind, 0, 1, 2)
    inputs.append(size.last)
    equal(size.dims, 1, 2, 3)
    equal(k[1], 1, 2, 3, 4, 5, 7)
    equal(k[2], 1, 2, 3, 4, 5, 7)
    equal(k[0], 1, 3)
    equal(t[2], 1, 2, 3, 4)
    unstrided, undilated = every([t[i] == 1 for i in each]), every([d[i] == 1 for i in each])
    unpadded, same = every([p[i] == 0 for i in each]), every([p[i] == d[i] * (k[i] - 1) // 2 for i in each])
    inputs += [unstrided, undilated, same, unpadded, (taps == 1) & unstrided & unpadded]
    inputs += [every([t[i] == k[i] for i in each]), s[1] == s[2], k[1] == k[2]]
    for channels in (inner, outer, groups):
        multiples(channels, 2, 4, 8, 16, 32, 64, 128)
        equal(channels, 1, 2, 3, 4)
    logs(wide / inner, tall / outer)
    for number in (pixels, out_pixels, batch, batch * out_pixels):
        multiples(number, 2, 4, 8, 16, 32)
    for number in (s[2], o[2]):
        multiples(number, 2, 4, 8)
    turned = size.last == 0
    source_copied = (wide > inner) | (turned & (pixels > 1) & (inner * groups > 1))
    out_copied = (tall > outer) | (turned & (out_pixels > 1) & (outer * groups > 1))
    inputs += [source_copied, out_copied, (wide > inner) | (tall > outer) | (turned & (taps > 1) & (inner > 1))]
    source, out = batch * groups * inner * pixels, batch * groups * outer * out_pixels
    weight = groups * inner * outer * taps
    logs(source * item, out * item, weight * item, pixels, out_pixels, taps, inner * groups, outer * groups)
    logs(1 + (source // inner * wide * source_copied + out // outer * tall * out_copied) * item)
    high, across, depth = {
        FORWARD: (batch * out_pixels, outer, inner * taps),
        DATA: (batch * pixels, inner, outer * taps),
        FILTER: (outer, inner * taps, batch * out_pixels),
    }[direction]
    work = 1.0 * high * across * depth * groups
    logs(high, across, depth, work, -(-depth // 32), -(-depth // 64))
    per_byte = work / ((source + out + weight) * item)
    inputs.append(log2(per_byte) - log2(1 / per_byte))
    multiples(depth, 8, 16, 32, 64)
    multiples(across, 8, 16, 32, 64)
    for unit in (32, 64, 128, 256):
        inputs += [high / round_up(high, unit), across / round_up(across, unit)]
    for rows, columns in _TILE_SHAPES:
        tiles = -(-high // rows) * -(-across // columns) * groups
        inputs += [log2(tiles), tiles / round_up(tiles, MULTIPROCESSORS), least(tiles / MULTIPROCESSORS, 6)]
    return inputs


class PlanNetwork:
    """The network of one direction. Its weights are stored in 4 bits (between hidden layers), 8 (the last layer) and
    16 bits (the first)."""

    def __init__(self, values: dict[str, Any], np: Any, direction: str) -> None:
        self._np = np
        self._last: tuple[ConvolutionProblem, Any] | None = None
        self.mean, self.scale = values["mean"], 1 / values["std"]
        layers = int(values["layers"])
        self.layers = [(_from_whole_numbers(values, "first", np), values["first_bias"])]
        self.layers += [(_from_half_bytes(values, f"layer{n}", np), values[f"layer{n}_bias"]) for n in range(layers)]
        self.head = _from_whole_numbers(values, "head", np), values["head_bias"]
        listed = json.loads(bytes(values["plans"]).decode())
        self.listed = [
            fallback(direction) if engine == NO_PLAN_NAMED else EnginePlan(direction, engine, dict(knobs))
            for engine, knobs in listed
        ]

    def plans(
        self, problem: ConvolutionProblem, least: float, tf32: bool = True, deterministic: bool = False
    ) -> list[tuple[EnginePlan, float]]:
        """Return the allowed plans with at least this share, the likeliest first."""
        np, scores = self._np, self._scores(problem).copy()
        if deterministic or not tf32:
            scores[[not plan.allowed(problem.kind, tf32, deterministic) for plan in self.listed]] = -np.inf
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        order = np.argsort(-shares)[:_MOST_LIKELY].tolist()
        return [
            (self.listed[place], float(shares[place])) for place in order if shares[place] >= least or place == order[0]
        ]

    def _scores(self, problem: ConvolutionProblem) -> Any:
        """Return the scores of all plans. Those of the last problem are cached: with a switch that excludes plans, they
        are needed twice."""
        if self._last is None or self._last[0] != problem:
            np = self._np
            inputs = network_inputs(lengths(problem), problem.direction)
            hidden = (np.array(inputs, dtype=np.float32) - self.mean) * self.scale
            for number, (weights, bias) in enumerate(self.layers):
                added = np.maximum(_times(weights, hidden) + bias, 0)
                hidden = added if number == 0 else hidden + added
            self._last = problem, (_times(self.head[0], hidden) + self.head[1]) / DOUBT
        return self._last[1]


def _times(weights: Any, vector: Any) -> Any:
    """Multiply a matrix by a vector, row by row: for the whole, BLAS starts threads, which wait for each other on
    a busy machine."""
    return (weights[:, None] @ vector)[:, 0]


def _from_whole_numbers(values: dict[str, Any], name: str, np: Any) -> Any:
    return values[name].astype(np.float32) * values[f"{name}_scale"][:, None].astype(np.float32)


GROUP = 16  # weights that share a scale


def _from_half_bytes(values: dict[str, Any], name: str, np: Any) -> Any:
    packed = values[name]
    weights = np.empty((packed.shape[0], 2 * packed.shape[1]), dtype=np.float32)
    weights[:, 0::2] = (packed & 15).astype(np.float32) - 8
    weights[:, 1::2] = (packed >> 4).astype(np.float32) - 8
    scales = values[f"{name}_scale"].astype(np.float32)
    return (weights.reshape(len(weights), -1, GROUP) * scales[:, :, None]).reshape(weights.shape)


@cache
def read_network(path: Path, direction: str) -> PlanNetwork | None:
    """Return the network of a direction in a file, or `None` without such a file."""
    if not path.exists():
        return None
    np = needed_numpy()
    with np.load(path) as file:
        prefix = f"{direction}_"
        values = {name.removeprefix(prefix): file[name] for name in file if name.startswith(prefix)}
    return PlanNetwork(values, np, direction)
