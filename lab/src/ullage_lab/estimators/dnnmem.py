"""`dnnmem`: the computation graph and the framework's allocator, after Gao et al. 2020.

Weights, gradients of weights, optimizer states, inputs and outputs of operators, ephemeral tensors (workspaces),
resident buffers (the CUDA context) and the allocator's rounding and segments. The forward pass goes over the graph in
order, the backward pass against it: an operator's backward makes the gradients of what it read, then the gradient and
the value of what it made are freed. The code was never published, and the paper's full text was not available: this
follows its published outline, and the details are our choices.
"""

import time

import torch

from ullage.allocator import CachingAllocator
from ullage.allocator.blocks import NO_LIMIT, Block
from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.answer import answer, supports_names
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.summary import moved
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.jobs.optimizers import OPTIMIZER_ALIASES
from ullage.jobs.sources.build import prepare
from ullage.jobs.training import autocast_type, low_precision
from ullage.sandbox.protocol import error_text
from ullage.virtual import VirtualGPU
from ullage_lab.estimators.graph import ComputationGraph, GraphRecorder, Operator


def record(configuration: Model, gpu: GPU) -> ComputationGraph:
    """Record the graph of one forward pass with its loss."""
    low = low_precision(configuration)
    cast = autocast_type(configuration)
    try:
        with VirtualGPU(gpu, limited=False) as virtual:
            model, task = prepare(configuration)
            model = (model if low is None else model.to(low)).to("cuda").train()
            inputs, targets = (moved(part) for part in task.batch(configuration.batch_size))
            if low is not None and isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
                inputs = inputs.to(low)
            recorder = GraphRecorder(virtual.memory.allocator)
            recorder.add_weights(model)
            recorder.add_inputs((inputs, targets))
            with recorder, torch.autocast("cuda", dtype=cast, enabled=cast is not None):
                task.loss(task.forward(model, inputs, targets), targets)
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} has no graph: {error_text(error)}") from error
    return recorder.graph


STEPS = 2  # the first step creates the optimizer's states; the peak is in the second
# Values of the optimizer's state per parameter; an unlisted optimizer counts as Adam.
STATES = {"SGD": 0, "sgd": 0, "sgdm": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


class TrainingWalk:
    """A training run over the graph, on the allocator."""

    def __init__(self, graph: ComputationGraph) -> None:
        self.graph = graph
        self.allocator = CachingAllocator(NO_LIMIT)
        self.peak: dict[str, int] = {}
        self._now = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0)
        self._highest = 0
        self._last_read = {number: place for place, operator in enumerate(graph.operators) for number in operator.reads}
        self._needs_gradient = _reached(graph)

    def run(self, states: int, training: bool = True) -> None:
        """Allocate weights, then run some steps; `states` is the number of the optimizer's values per parameter."""
        graph = self.graph
        for number in sorted(graph.weights):
            self._take(number, "parameters")
        for step in range(STEPS if training else 1):
            values = {number: self._take(number, "activations") for number in sorted(graph.inputs)}
            self._forward(values, training)
            gradients = self._backward(values) if training else {}
            if step == 0 and training:
                for number in sorted(graph.trained):
                    for _ in range(states):
                        self._take(number, "optimizer")
            for number, block in gradients.items():
                self._give(number, block, "gradients")
            for number, block in values.items():
                self._give(number, block, "activations")

    def _forward(self, values: dict[int, Block], training: bool) -> None:
        for place, operator in enumerate(self.graph.operators):
            for number in operator.makes:
                values[number] = self._take(number, "activations")
            self._pass_through(operator.ephemeral)
            done = [] if training else [n for n in operator.reads if self._last_read[n] == place and n in values]
            for number in done:
                self._give(number, values.pop(number), "activations")

    def _backward(self, values: dict[int, Block]) -> dict[int, Block]:
        gradients: dict[int, Block] = {}  # of values between the operators
        of_weights: dict[int, Block] = {}
        for operator in reversed(self.graph.operators):
            if any(number in self._needs_gradient for number in operator.makes):
                self._operator_backward(operator, gradients, of_weights)
            for number in operator.makes:
                if number in gradients:
                    self._give(number, gradients.pop(number), "activations")
                if number in values:
                    self._give(number, values.pop(number), "activations")
        for number, block in gradients.items():
            self._give(number, block, "activations")
        return of_weights

    def _operator_backward(self, operator: Operator, gradients: dict[int, Block], of_weights: dict[int, Block]) -> None:
        self._pass_through(operator.ephemeral)
        for number in operator.reads:
            if number not in self._needs_gradient:
                continue
            trained = number in self.graph.trained
            held = of_weights if trained else gradients
            if number in held:
                self._pass_through(self.graph.sizes[number])  # a second gradient, added to the first
            else:
                held[number] = self._take(number, "gradients" if trained else "activations")

    def _take(self, number: int, kind: str) -> Block:
        block = self.allocator.malloc(self.graph.sizes[number])
        self._now[kind] += block.size
        if self.allocator.allocated > self._highest:
            self._highest, self.peak = self.allocator.allocated, dict(self._now)
        return block

    def _give(self, number: int, block: Block, kind: str) -> None:
        self._now[kind] -= block.size
        if block.size:
            self.allocator.free(block)

    def _pass_through(self, size: int) -> None:
        if size:
            block = self.allocator.malloc(size)
            if self.allocator.allocated > self._highest:
                self._highest = self.allocator.allocated
                self.peak = self._now | {"activations": self._now["activations"] + block.size}
            self.allocator.free(block)


def _reached(graph: ComputationGraph) -> set[int]:
    """Return the storages that depend on a trained weight, which have gradients."""
    reached = set(graph.trained)
    for operator in graph.operators:
        if any(number in reached for number in operator.reads):
            reached.update(number for number in operator.makes if number in graph.floating)
    return reached


def states_of(optimizer: str) -> int:
    """Return the number of values that an optimizer keeps per parameter.

    >>> states_of("adamw_fused"), states_of("momentum")
    (2, 1)
    """
    name = OPTIMIZER_ALIASES.get(optimizer, optimizer)
    for form in ("_fused", "_foreach", "_single"):
        name = name.removesuffix(form)
    return STATES.get(name, STATES.get(name.casefold(), 2))


@estimator(
    "dnnmem",
    title="the computation graph on the caching allocator",
    source="Gao et al., Estimating GPU Memory Consumption of Deep Learning Models, ESEC/FSE 2020",
    needs="the model's computation graph",
    supports=supports_names,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate over the graph: the process's memory, or reserved memory if the context is unknown."""
    begin = time.perf_counter()
    assert request.model is not None
    configuration = request.model
    walk = TrainingWalk(record(configuration, gpu))
    walk.run(states_of(configuration.optimizer), training=not configuration.inference)
    reserved = walk.allocator.peak_reserved
    parts = {name: size for name, size in walk.peak.items() if size}
    parts["fragmentation"] = reserved - sum(parts.values())
    known: dict[str, int | None] = {"peak_allocated": walk.allocator.peak_allocated, "peak_reserved": reserved}
    notes = [
        "every value of the forward pass is kept until its operator's backward pass, also where PyTorch keeps less",
        "workspaces of the forward pass follow this project's rules for cuDNN; those of the backward pass count alike",
    ]
    if gpu.context is None:
        notes.append(f"the context of {gpu.name} is not known: the figure is reserved memory")
    else:
        parts["context"] = gpu.context
    kind = "reserved" if gpu.context is None else "process"
    return answer("dnnmem", gpu, kind, parts, seconds=time.perf_counter() - begin, notes=notes, known=known)
