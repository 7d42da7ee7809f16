"""The standard training loop for a configuration, the same on a real GPU and on a virtual one."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ullage.errors import InvalidValue
from ullage.jobs.model import Model
from ullage.jobs.optimizers import make_optimizer
from ullage.jobs.parallel import PP, casts_itself, join_ranks, spread
from ullage.jobs.pipeline import cut, microbatches, schedule_of
from ullage.jobs.sources.build import prepare
from ullage.jobs.sources.hub import is_checkpoint
from ullage.jobs.tasks import Task, assume
from ullage.virtual.gpu import current

_ATTENTION_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def train(
    configuration: Model,
    iterations: int = 5,
    device: str = "cuda",
    after_iteration: Callable[[], Any] | None = None,
    prepared: tuple[nn.Module, Task] | None = None,
    parallel: str | None = None,
) -> None:
    """Train for some iterations, or run the forward pass for inference; `after_iteration` is called after each.

    `prepared` is the result of `ullage.jobs.sources.build.prepare`, if the model was built beforehand. `parallel` is
    the strategy over the ranks of which this process is one (`ullage.jobs.parallel`).
    """
    model, task = prepared or prepare(configuration)
    low = low_precision(configuration)
    if low is not None and not _has_its_types(configuration):
        model = model.to(low)
    if parallel not in (None, PP):
        model = spread(_in_layout(model, configuration), parallel, configuration, device)
        configuration = _as_spread(configuration, parallel)
    elif parallel is None:
        model = _in_layout(model.to(device) if configuration.quantize is None else model, configuration)
    loop = _Loop(configuration, model, task, iterations, device, after_iteration or (lambda: None))
    run = loop.train_stage if parallel == PP else loop.infer if configuration.inference else loop.train
    with _switches(configuration):
        run()


def _in_layout(model: nn.Module, configuration: Model) -> nn.Module:
    if not configuration.channels_last:
        return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _as_spread(configuration: Model, parallel: str) -> Model:
    """Return the configuration without autocast if FSDP2 casts weights as it gathers them."""
    ranks = torch.distributed.get_world_size()
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if configuration.types.autocast != "bfloat16" or not casts_itself(parallel, on_node, ranks):
        return configuration
    return replace(configuration, precision="fp32")


def _has_its_types(configuration: Model) -> bool:
    """Return whether a model already has its types, as saved weights and adapters do."""
    return configuration.lora is not None or configuration.source == "hf" and is_checkpoint(configuration.short_name)


def low_precision(configuration: Model) -> torch.dtype | None:
    """Return the type to which weights are cast; `None` if they stay in 32 bits, with autocast or without."""
    weights: torch.dtype = getattr(torch, configuration.types.weights)
    return None if weights is torch.float32 else weights


def autocast_type(configuration: Model) -> torch.dtype | None:
    """Return the type that autocast uses; `None` without autocast."""
    name = configuration.types.autocast
    return None if name is None else getattr(torch, name)


@contextmanager
def _foreseen(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Let a virtual GPU extrapolate repeated iterations. Yields a function to call at the beginning of each."""
    card = current()
    if card is None:
        yield lambda: None
        return
    loop = card.begin_own_loop(model, optimizer)
    try:
        yield loop.begin_iteration
    finally:
        loop.end()


@dataclass(frozen=True)
class _Loop:
    """A model with its task, its device, and the number of iterations."""

    configuration: Model
    model: nn.Module
    task: Task
    iterations: int
    device: str
    after_iteration: Callable[[], Any]

    def train(self) -> None:
        """Train with the same order of operations, and the same live tensors, as the measured loop."""
        configuration, model, task, device = self.configuration, self.model, self.task, self.device
        model.train()
        optimizer = make_optimizer(configuration.optimizer, _trainable(model))
        inputs, targets = _batch(configuration, task)
        cast = autocast_type(configuration)
        scaler = torch.amp.GradScaler("cuda") if configuration.types.grad_scaler else None
        parts = configuration.gradient_accumulation
        with _foreseen(model, optimizer) as begin_iteration:
            for _ in range(self.iterations):
                begin_iteration()
                for part in range(parts):
                    on_device = _moved(inputs, device)
                    wanted = _moved(targets, device)
                    if configuration.channels_last:
                        on_device = _channels_last(on_device)
                    if part == 0:
                        optimizer.zero_grad(set_to_none=True)
                    with torch.autocast("cuda", dtype=cast, enabled=cast is not None):
                        out = task.forward(model, on_device, wanted)  # alive until the backward pass is over
                        loss = task.loss(out, wanted)
                    if parts > 1:
                        loss = loss / parts
                    (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                self.after_iteration()

    def train_stage(self) -> None:
        """Train one stage of a pipeline; the last stage computes the loss."""
        configuration, device = self.configuration, self.device
        if configuration.inference or configuration.types.grad_scaler:
            raise InvalidValue("a pipeline of a named model must train, with a precision other than amp_fp16")
        own = torch.device(device, join_ranks(PP, configuration))
        number, stages = torch.distributed.get_rank(), torch.distributed.get_world_size()
        samples = configuration.batch_size * configuration.gradient_accumulation
        count = microbatches(samples, stages)
        stage = cut(self.model, self.task, number, stages, configuration).to(own).train()
        optimizer = make_optimizer(configuration.optimizer, _trainable(stage))
        inputs, targets = _batch(replace(configuration, batch_size=samples), self.task)
        ids = inputs["input_ids"]
        schedule = schedule_of(stage, ids[: samples // count].to("meta"), number, stages, count, own)
        assume(f"pp: {count} micro-batches of {samples // count} samples")
        with _foreseen(stage, optimizer) as begin_iteration:
            for _ in range(self.iterations):
                begin_iteration()
                optimizer.zero_grad(set_to_none=True)
                given = [ids.to(own)] if stage.is_first else []
                wanted = {**_moved(targets, device), "target": torch.zeros(samples)} if stage.is_last else {}
                schedule.step(*given, **wanted)
                optimizer.step()
                self.after_iteration()

    def infer(self) -> None:
        configuration, model, task, device = self.configuration, self.model, self.task, self.device
        model.eval()
        inputs, targets = _batch(configuration, task)
        cast = autocast_type(configuration)
        for _ in range(self.iterations):
            on_device = _moved(inputs, device)
            wanted = _moved(targets, device)
            if configuration.channels_last:
                on_device = _channels_last(on_device)
            with torch.no_grad(), torch.autocast("cuda", dtype=cast, enabled=cast is not None):
                out = task.predict(model, on_device, wanted)  # noqa: F841  stays alive until the next one exists
            self.after_iteration()


def _trainable(model: nn.Module) -> list[Any]:
    """Return the trained parameters. Sharded and whole weights are in separate groups: an optimizer updates a group at
    once, and no operator accepts both."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kinds.setdefault(hasattr(parameter, "device_mesh"), []).append(parameter)
    groups = list(kinds.values())
    return [{"params": group} for group in groups] if len(groups) > 1 else sum(groups, [])


def _batch(configuration: Model, task: Task) -> tuple[Any, Any]:
    inputs, targets = task.batch(configuration.batch_size)
    low = low_precision(configuration)
    if low is None:
        return inputs, targets
    return _each(inputs, lambda tensor: tensor.to(low) if tensor.is_floating_point() else tensor), targets


def _moved(batch: Any, device: str) -> Any:
    return _each(batch, lambda tensor: tensor.to(device))


def _channels_last(batch: Any) -> Any:
    return _each(batch, lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor)


def _each(batch: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return act(batch)
    if isinstance(batch, dict):
        return {key: _each(value, act) for key, value in batch.items()}
    if isinstance(batch, list):
        return [_each(value, act) for value in batch]
    return batch


@contextmanager
def _switches(configuration: Model) -> Iterator[None]:
    """Set PyTorch's global switches for TensorFloat-32 and attention kernels during the run."""
    with ExitStack() as stack:
        if configuration.types.tensor_float_32:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        if configuration.attention in _ATTENTION_KERNELS:
            stack.enter_context(sdpa_kernel(_ATTENTION_KERNELS[configuration.attention]))
        yield
