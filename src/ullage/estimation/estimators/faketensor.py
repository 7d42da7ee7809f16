"""`faketensor`: PyTorch's symbolic shape propagation, summing the tensors that are alive.

As arXiv 2602.17817 evaluates it on timm models: the model's own weights are real, so they are not counted (but for
those that an operator makes a view of, as linear layers do); the input, its copy on the GPU and every operator's result
are, up to the end of `output.sum().backward()`.
No optimizer, no allocator, no kernels' temporaries, no context.
"""

import time
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.answer import answer, supports_names
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.jobs.sources.build import prepare
from ullage.jobs.tasks import Task
from ullage.jobs.training import autocast_type, low_precision
from ullage.sandbox.protocol import error_text
from ullage.virtual import VirtualGPU

MARGIN = 4 << 30  # the paper's "+4 GB"
_SOURCE = "PyTorch FakeTensor, as evaluated in arXiv 2602.17817 (itu-rad/GPUMemNet, Test_Pipeline)"


class Meter:
    """Counts the bytes of living tensors."""

    def __init__(self) -> None:
        self.most = 0
        self._sizes: dict[int, int] = {}
        self.bytes = 0

    def show(self, tensor: torch.Tensor) -> None:
        """Count the memory behind a tensor until it is freed."""
        memory = tensor.untyped_storage()
        number = memory._cdata
        if number not in self._sizes:
            self._sizes[number] = memory.nbytes()
            self.bytes += self._sizes[number]
            self.most = max(self.most, self.bytes)
            weakref.finalize(memory, self._forget, number)

    def _forget(self, number: int) -> None:
        self.bytes -= self._sizes.pop(number)


class EveryResult(TorchDispatchMode):
    """Passes the result of every operator to a meter."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(FakeTensor, self._shown, func(*args, **(kwargs or {})))

    def _shown(self, tensor: FakeTensor) -> FakeTensor:
        self.meter.show(tensor)
        return tensor


def propagate(configuration: Model, gpu: GPU) -> tuple[int, int]:
    """Return the peak of the living bytes after the forward pass, and after the backward pass."""
    with VirtualGPU(gpu, limited=False):  # weights that nothing reads take no memory there
        model, task = prepare(configuration)
        for weight in model.parameters():  # nor afterwards: their initial values would be filled in on leaving
            weight.data = torch.empty_like(weight)
    low = low_precision(configuration)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
            model = model.to(low) if low is not None else model
            inputs, targets = task.batch(configuration.batch_size)
            meter = stack.enter_context(EveryResult(Meter())).meter
            cast = autocast_type(configuration)
            stack.enter_context(torch.autocast("cpu", dtype=cast, enabled=cast is not None))
            return _step(model.train(), task, inputs, targets, meter, low)
    except (UllageError, MemoryError):
        raise
    except Exception as error:  # whatever an operator without shape propagation raises
        raise InvalidValue(f"FakeTensor cannot follow {configuration.name}: {error_text(error)}") from error


def _step(
    model: torch.nn.Module, task: Task, inputs: Any, targets: Any, meter: Meter, low: torch.dtype | None
) -> tuple[int, int]:
    fed = _copied(inputs, meter, low)
    out = task.forward(model, fed, targets)
    after_forward = meter.most
    loss = out.sum() if isinstance(out, torch.Tensor) else task.loss(out, targets)
    loss.backward()
    return after_forward, meter.most


def _copied(batch: Any, meter: Meter, low: torch.dtype | None) -> Any:
    """Copy a batch to the GPU; the one on the CPU counts too, as FakeTensor makes no difference between devices."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            tensor = tensor.to(low) if low is not None else tensor
            tensor.requires_grad_()
        meter.show(tensor)
        return tensor.clone()

    return tree_map_only(torch.Tensor, copied, batch)


def _estimate(name: str, request: JobRequest, gpu: GPU, margin: int) -> Estimate:
    begin = time.perf_counter()
    assert request.model is not None
    if request.model.inference:
        raise InvalidValue(f"the estimator {name} was evaluated for training; this is inference")
    _, peak = propagate(request.model, gpu)
    parts = {"activations": peak} | ({"fragmentation": margin} if margin else {})
    notes = [
        "tensors that operators gave, inputs and gradients among them; weights, optimizer, temporaries, allocator and "
        "context are not counted",
        "shapes are propagated on the CPU: attention may take another kernel than on a GPU",
    ]
    if margin:
        notes.append(f"with a margin of {margin >> 30} GiB for all that is not counted, as the paper proposes")
    kind = "process" if margin else "allocated"
    return answer(name, gpu, kind, parts, seconds=time.perf_counter() - begin, notes=notes)


def _register(name: str, title: str, source: str, margin: int) -> None:
    @estimator(name, title=title, source=source, needs="the model and an input shape", supports=supports_names)
    def run(request: JobRequest, gpu: GPU) -> Estimate:
        return _estimate(name, request, gpu, margin)


_register("faketensor", "symbolic shapes, the tensors alive", _SOURCE, 0)
_register("faketensor+margin", "symbolic shapes, the tensors alive, and 4 GiB", f"{_SOURCE} (safety margin)", MARGIN)
