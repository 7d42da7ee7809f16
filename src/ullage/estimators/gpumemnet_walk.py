"""A training step walked through on paper: what is alive after each layer, and what the allocator reserves for it.

From the sequence of layers alone (kind, numbers put out, parameters): which outputs the backward pass needs follows
from the kind of a layer and of the one after it. Branches are not known, so layers count as a chain; the networks learn
what that leaves over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.allocator import Block, CachingAllocator
from ullage.units import MIB

# Layers that keep their input for the backward pass, and those that keep their output (PyTorch's derivatives.yaml).
KEEP_INPUT = frozenset((
    "linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "attention", "pooling", "leaky_relu", "elu", "selu",
    "gelu", "silu", "mish", "softplus", "prelu", "hardswish",
))  # fmt: skip
KEEP_OUTPUT = frozenset(("relu", "tanh", "sigmoid", "softmax", "attention", "relu6"))
WORKSPACE = 32 * MIB  # cuBLAS on compute capability 9, once for each pass
STEPS = 3  # the optimizer's states come in the first, the allocator's cache has settled in the third
WITHOUT_LIMIT = 1 << 46


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the walk: its name and kind, bytes put out, bytes kept beside (a mask), bytes of its weights."""

    name: str
    kind: str
    output: float
    aside: float
    weights: float


@dataclass(frozen=True, slots=True)
class Peak:
    """What is alive at the highest place of the walk, in bytes, apart from weights and the optimizer's state.

    `kept` was saved for the backward pass, `passing` is put out or is a gradient of it just then, `gradients` are
    those of weights so far.
    """

    kept: float
    passing: float
    gradients: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.kept + self.passing + self.gradients


def is_kept(layers: Sequence[Layer], place: int) -> bool:
    """Whether the output of a layer stays until the backward pass: the layer keeps it, or the one after it does."""
    after = layers[place + 1].name if place + 1 < len(layers) else "softmax"
    return layers[place].name in KEEP_OUTPUT or after in KEEP_INPUT


def walk(layers: Sequence[Layer], entry: float) -> Peak:
    """The highest place of a step over these layers; `entry` is the size of the input batch in bytes.

    >>> two = [Layer("linear", "linear", 10.0, 0.0, 4.0), Layer("relu", "activation", 10.0, 0.0, 0.0)]
    >>> walk(two, 6.0)
    Peak(kept=16.0, passing=20.0, gradients=0.0)
    """
    before = [entry, *(layer.output for layer in layers)]
    kept = [layer.aside + (layer.output if is_kept(layers, place) else 0.0) for place, layer in enumerate(layers)]
    best, saved, gradients = Peak(entry, 0.0, 0.0), entry, 0.0
    for place, layer in enumerate(layers):
        loose = before[place] if place and not is_kept(layers, place - 1) else 0.0
        if saved + layer.output + layer.aside + loose > best.total:
            best = Peak(saved, layer.output + layer.aside + loose, 0.0)
        saved += kept[place]
    for place in range(len(layers) - 1, -1, -1):
        passing = layers[place].output + (before[place] if place else 0.0)  # the input batch needs no gradient
        if saved + passing + gradients > best.total:
            best = Peak(saved, passing, gradients)
        gradients += layers[place].weights
        saved -= kept[place]
    return best


class Replay:
    """Training steps over a chain of layers, on the model of PyTorch's allocator.

    `states` copies of the weights are kept by the optimizer and `temporaries` made while it steps; a convolution takes
    `copies` times its input and output while it runs, as libraries that change the layout do.

    >>> Replay([Layer("linear", "linear", 4e6, 0.0, 4e6)], 4e6, states=2, temporaries=1, copies=0.0).run() >> 20
    104
    """

    def __init__(
        self, layers: Sequence[Layer], entry: float, *, states: float, temporaries: float, copies: float
    ) -> None:
        self.layers, self.entry, self.copies = layers, entry, copies
        self.states, self.temporaries = states, temporaries
        self.kept = [is_kept(layers, place) for place in range(len(layers))]
        self.allocator = CachingAllocator(WITHOUT_LIMIT)

    def run(self) -> int:
        """The bytes that the allocator holds in the end."""
        for layer in self.layers:
            self._take(layer.weights)
        gradients: list[Block | None] = []
        for step in range(STEPS):
            entry = self._take(self.entry)
            for block in gradients:
                self._give(block)
            outputs = self._forward(first=step == 0)
            gradients = self._backward(outputs, first=step == 0)
            self._give(entry)
            self._optimize(first=step == 0)
        return self.allocator.reserved

    def _forward(self, first: bool) -> list[list[Block | None]]:
        if first:
            self._take(WORKSPACE)
        outputs: list[list[Block | None]] = []
        for place, layer in enumerate(self.layers):
            outputs.append([self._take(layer.output), self._take(layer.aside)])
            self._copy(place)
            if place and not self.kept[place - 1]:
                self._give(outputs[place - 1][0])
                outputs[place - 1][0] = None
        return outputs

    def _backward(self, outputs: list[list[Block | None]], first: bool) -> list[Block | None]:
        if first:
            self._take(WORKSPACE)
        gradients = []
        arriving = self._take(self.layers[-1].output)
        for place in range(len(self.layers) - 1, -1, -1):
            leaving = self._take(self.layers[place - 1].output) if place else None
            if place:
                self._copy(place)
            gradients.append(self._take(self.layers[place].weights))
            self._copy(place)
            for block in (arriving, *outputs[place]):
                self._give(block)
            arriving = leaving
        return gradients

    def _optimize(self, first: bool) -> None:
        if first:
            for layer in self.layers:
                for _ in range(int(self.states)):
                    self._take(layer.weights)
        made = [self._take(layer.weights) for layer in self.layers for _ in range(int(self.temporaries))]
        for block in made:
            self._give(block)

    def _copy(self, place: int) -> None:
        if self.copies and self.layers[place].kind == "conv2d":
            entry = self.layers[place - 1].output if place else self.entry
            self._give(self._take(self.copies * (entry + self.layers[place].output)))

    def _take(self, size: float) -> Block | None:
        return self.allocator.malloc(int(size)) if size >= 1 else None

    def _give(self, block: Block | None) -> None:
        if block is not None:
            self.allocator.free(block)
