"""A training step walked through layer by layer, on the model of PyTorch's allocator: what it would reserve.

It knows of each layer what it puts out, what the backward pass needs of that, and what a convolution takes while it
runs; it knows nothing of operators between layers. That is less than the virtual GPU knows, and needs no run of the
model: the networks learn what it leaves over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.allocator import Block, CachingAllocator
from ullage.units import MIB

# A layer as a walk through a training step takes it, and how wide its numbers are.

FREED, KEPT, SHARED = 0, 1, 2
# Layers that keep their input for the backward pass, and those that keep their output (PyTorch's derivatives.yaml).
KEEP_INPUT = frozenset((
    "linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "attention", "pooling", "leaky_relu", "elu", "selu",
    "gelu", "silu", "mish", "softplus", "prelu", "hardswish",
))  # fmt: skip
KEEP_OUTPUT = frozenset(("relu", "tanh", "sigmoid", "softmax", "attention", "relu6"))
PRODUCTS = frozenset(("linear", "conv1d", "conv2d"))
# Layers that autocast runs in 32 bits, and those whose 32 bits come from their weights.
IN_32_BITS = frozenset(("layer_norm", "softmax", "softplus", "embedding"))


@dataclass(slots=True)
class WalkedLayer:
    """One layer: its name; numbers read and put out by the whole batch; weights; what the backward pass needs.

    `output` is FREED after the next layer, KEPT, or SHARED with a tensor that was there before; `beside` are numbers
    kept beside it and `masks` bytes; `workspaces` are bytes that are taken while the layer runs, and while the gradient
    of its input and that of its weights are made. `width` is the bytes of a number put out, `beside_width` of one kept
    beside, and `cast` whether its input is cast to 16 bits.
    """

    name: str
    inputs: float
    outputs: float
    weights: float
    output: int = KEPT
    beside: float = 0.0
    masks: float = 0.0
    workspaces: tuple[int, int, int] = (0, 0, 0)
    width: int = 4
    beside_width: int = 4
    cast: bool = False


def typed(layers: Sequence[WalkedLayer], precision: str) -> None:
    """Say of each layer how wide its numbers are, as autocast or the model's own type make them."""
    low, amp = precision in ("bf16", "fp16"), precision.startswith("amp")
    wide = any(layer.name == "layer_norm" for layer in layers)  # then sums between layers are in 32 bits
    before = source = 4  # the width of what was put out last, and of what the last product read
    for place, layer in enumerate(layers):
        if not amp:
            layer.width = layer.beside_width = 2 if low else 4
            continue
        if layer.name in PRODUCTS:
            source = source if wide and _beside_another(layers, place) else before
            layer.cast = source == 4
        layer.beside_width = 4 if wide and layer.name in ("layer_norm", "linear", "conv1d") else 2
        narrow = layer.name in PRODUCTS or layer.name == "attention"
        before = layer.width = 2 if narrow else 4 if layer.name in IN_32_BITS else before
    if amp:
        _cast(layers)
    for place, layer in enumerate(layers[:-1]):
        reader = _read_by(layers, place)
        if reader is not None:
            _scores(layer, layers[place + 1], reader, amp)


def _beside_another(layers: Sequence[WalkedLayer], place: int) -> bool:
    """Whether a product reads what the product before it read: queries, keys and values, each of which casts it."""
    before = layers[place - 1]
    return place > 0 and before.name in PRODUCTS and before.inputs == layers[place].inputs


def _read_by(layers: Sequence[WalkedLayer], place: int) -> WalkedLayer | None:
    """The product after attention that is made of single operators: it puts out probabilities, and not what the product
    reads; `None` for any other layer."""
    layer, after = layers[place], layers[place + 1]
    if layer.name != "attention" or layer.weights or after.name != "dropout" or after.outputs != layer.outputs:
        return None
    reader = next((one for one in layers[place + 2 :] if one.name in PRODUCTS), None)
    return None if reader is None or reader.inputs == layer.outputs else reader


def _scores(attention: WalkedLayer, dropout: WalkedLayer, reader: WalkedLayer, amp: bool) -> None:
    """Scores beside probabilities on the way; on the way back gradients of both and what softmax multiplies them to.
    Autocast makes probabilities in 32 bits and keeps a copy in 16 of what is dropped out; what is read is in 16."""
    if amp:
        attention.width = dropout.width = 4
        dropout.output, dropout.beside, dropout.beside_width = FREED, dropout.outputs, 2
        reader.beside_width, reader.cast = 2, False
    size = int(attention.outputs * attention.width)
    passes = dropout.output == SHARED  # then the gradient of the probabilities is not made in its turn
    attention.workspaces, dropout.workspaces = (size, 2 * size if passes else size, 0), (0, size, 0)


def _cast(layers: Sequence[WalkedLayer]) -> None:
    """Under autocast a layer that casts its input keeps the copy, so what it was copied from need not stay."""
    for layer, after in zip(layers, layers[1:], strict=False):
        if layer.output != KEPT or layer.name in KEEP_OUTPUT:
            continue
        if (layer.width == 4 and after.name in PRODUCTS) or (layer.width == 2 and after.name == "softplus"):
            layer.output = FREED


WORKSPACE = 32 * MIB  # cuBLAS on compute capability 9, once for each pass
STEPS = 3  # the optimizer's states come in the first, the allocator's cache has settled in the third
WITHOUT_LIMIT = 1 << 46


@dataclass(frozen=True)
class Ways:
    """How a run trains: the bytes of a weight, of the input batch, and the optimizer's copies of the weights.

    `temporaries` are made all at once while it steps; without them one weight after the other gets one.
    """

    weight: int
    entry: float
    states: int
    temporaries: int | None
    amp: bool


class AllocatorWalk:
    """Some training steps over the layers.

    >>> ways = Ways(weight=4, entry=4e6, states=2, temporaries=1, amp=False)
    >>> walk = AllocatorWalk([WalkedLayer("linear", 1e6, 1e6, 1e6)], 0.0, ways)
    >>> walk.run() >> 20, walk.allocator.peak_allocated >> 20
    (104, 95)
    """

    def __init__(self, layers: Sequence[WalkedLayer], others: float, ways: Ways) -> None:
        """`others` are weights that belong to no layer."""
        self.layers, self.ways = layers, ways
        self.sizes = [layer.weights * ways.weight for layer in layers] + [others * ways.weight]
        self.allocator = CachingAllocator(WITHOUT_LIMIT)
        self._entry: Block | None = None
        self._answer: Block | None = None
        self._stream: Block | None = None  # what joined tensors are made of, and on the way back its gradient
        self._residual: Block | None = None  # on the way back: the gradient of the sums that branches were added to
        self._libraries: set[str] = set()

    def run(self) -> int:
        """The bytes that the allocator holds in the end."""
        for size in self.sizes:
            self._take(size)
        gradients: list[Block | None] = []
        for step in range(STEPS):
            entry = self._take(self.ways.entry)  # the batch before lives until the next one is there
            self._give(self._entry)
            self._entry = entry
            for block in gradients:
                self._give(block)
            gradients = self._backward(*self._forward())
            self._optimize(first=step == 0)
        return self.allocator.reserved

    def _forward(self) -> tuple[list[Block | None], list[list[Block | None]]]:
        outputs: list[Block | None] = []
        beside: list[list[Block | None]] = []
        for place, layer in enumerate(self.layers):
            held = [self._join(place), self._take(layer.beside * layer.beside_width)]
            if self.ways.amp and layer.name in PRODUCTS:
                held.append(self._take(layer.weights * 2))
            if layer.cast or (self.ways.amp and layer.name == "softplus" and place and self._width(place - 1) == 2):
                held.append(self._take(layer.inputs * (2 if layer.cast else 4)))
            first = layer.name == "dropout"  # makes its mask, then its output; pooling the other way round
            if first:
                held.append(self._take(layer.masks))
            outputs.append(self._take(layer.outputs * layer.width) if layer.output != SHARED else None)
            if not first:
                held.append(self._take(layer.masks))
            self._give(self._take(layer.workspaces[0]))
            if place and self.layers[place - 1].output == FREED:
                self._give(outputs[place - 1])
                outputs[place - 1] = None
            beside.append(held)
            self._library(layer, "forward")
        if outputs[-1] is not None:  # the answer of the step before lives until there is a new one
            self._give(self._answer)
            self._answer, outputs[-1] = outputs[-1], None
        self._give(self._stream)
        self._stream = None
        return outputs, beside

    def _backward(self, outputs: list[Block | None], beside: list[list[Block | None]]) -> list[Block | None]:
        arriving = self._loss(self.layers[-1].outputs)
        gradients: list[Block | None] = []
        released = self._released()
        for place in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[place]
            if self._skipped(place):
                for block in beside[place]:
                    self._give(block)
                continue
            self._library(layer, "backward")
            back = place > 0 and layer.name != "embedding"
            leaving = self._take(layer.inputs * self._width_back(place)) if back else None
            if place:
                self._give(self._take(layer.workspaces[1]))
            gradients.append(self._weight_gradient(place))
            for block in (arriving, *(outputs[own] for own in released[place]), *beside[place]):
                self._give(block)
            if self._after_sum(place):
                self._add(leaving)
                arriving = None
            else:
                arriving = self._divide(place, leaving)
        for block in (arriving, self._stream, self._residual):
            self._give(block)
        self._stream = self._residual = None
        gradients.append(self._take(self.sizes[-1]))
        return gradients

    def _after_sum(self, place: int) -> bool:
        """Whether a layer norm reads a sum: it keeps an input that no layer put out."""
        layer = self.layers[place]
        return layer.name == "layer_norm" and place > 0 and layer.beside >= layer.inputs

    def _add(self, gradient: Block | None) -> None:
        """The gradient of a sum goes on to both of its parts, so it stays while the branch is gone through; what comes
        out of the branch is added to it in place."""
        if self._residual is None:
            self._residual = gradient
        else:
            self._give(gradient)

    def _joined(self, place: int) -> bool:
        """Whether a layer reads tensors that were put one behind the other: more than the layer before put out."""
        layer = self.layers[place]
        if not place or layer.name not in PRODUCTS or layer.beside * 2 <= self.layers[place - 1].outputs:
            return False
        return layer.inputs == layer.beside > self.layers[place - 1].outputs

    def _divide(self, place: int, gradient: Block | None) -> Block | None:
        """The gradient of a joined tensor: added to what came for the same tensor from above, which makes a new one;
        the layers that made its last part read theirs from a view of it."""
        if gradient is None or not self._joined(place):
            return gradient
        width = 4 if self.ways.amp else self.layers[place].width
        if self.ways.amp:
            wide = self._take(self.layers[place].inputs * width)
            self._give(gradient)
            gradient = wide
        if self._stream is not None:
            together = self._take(self.layers[place].inputs * width)
            self._give(self._stream)
            self._give(gradient)
            gradient = together
        self._stream = gradient
        return None

    def _join(self, place: int) -> Block | None:
        """Under autocast the joined tensor has the 32 bits of its first part; it lives until the next one is made, and
        what the backward pass keeps is its copy in 16."""
        if not (self.ways.amp and self._joined(place)):
            return None
        made = self._take(self.layers[place].inputs * 4)
        self._give(self._stream)
        self._stream = made
        return None

    def _released(self) -> list[list[int]]:
        """For every layer the outputs that nobody needs after its backward pass: a layer that keeps its input gives it
        back when it is done, before the layer that made it begins."""
        found: list[list[int]] = [[] for _ in self.layers]
        for place, layer in enumerate(self.layers):
            user = place
            if layer.output == KEPT and layer.name not in KEEP_OUTPUT:
                later = range(place + 1, len(self.layers))
                user = next((one for one in later if not self._skipped(one)), place)
            found[place if self._skipped(user) else user].append(place)
        return found

    def _skipped(self, place: int) -> bool:
        """A view has no backward pass of its own."""
        return self.layers[place].output == SHARED and not self.layers[place].weights

    def _loss(self, numbers: float) -> Block | None:
        """Logarithms of probabilities, their gradient, the gradient of the scores; autocast computes it in 32 bits."""
        width = self.ways.weight
        logarithms = self._take(numbers * width)
        inner = self._take(numbers * width)
        arriving = self._take(numbers * (2 if self.ways.amp else width))
        self._give(inner)
        self._give(logarithms)
        return arriving

    def _weight_gradient(self, place: int) -> Block | None:
        layer = self.layers[place]
        narrow = self._take(layer.weights * 2) if self.ways.amp and layer.name in PRODUCTS else None
        made = None if narrow is not None else self._take(self.sizes[place])
        self._give(self._take(layer.workspaces[2]))
        if narrow is not None:
            made = self._take(self.sizes[place])
            self._give(narrow)
        return made

    def _optimize(self, first: bool) -> None:
        if first:
            for size in self.sizes:
                for _ in range(self.ways.states):
                    self._take(size)
        if self.ways.temporaries is None:
            for size in self.sizes:
                self._give(self._take(size))
            return
        made = [self._take(size) for _ in range(self.ways.temporaries) for size in self.sizes]
        for block in made:
            self._give(block)

    def _library(self, layer: WalkedLayer, direction: str) -> None:
        """cuBLAS takes its workspace at the first matrix product of a pass, and keeps it."""
        if layer.name in ("linear", "conv1d") and direction not in self._libraries:
            self._libraries.add(direction)
            self._take(WORKSPACE)

    def _width_back(self, place: int) -> int:
        """The bytes of a number of the gradient that a layer passes on; autocast leaves sums in 32 bits."""
        return 4 if self.ways.amp and self._after_sum(place) else self._width(place - 1)

    def _width(self, place: int) -> int:
        return self.layers[place].width if place >= 0 else 2

    def _take(self, size: float) -> Block | None:
        return self.allocator.malloc(int(size)) if size >= 1 else None

    def _give(self, block: Block | None) -> None:
        if block is not None:
            self.allocator.free(block)
