"""Cuts a model by name into the stages of a pipeline, each with consecutive blocks.

Layers before the blocks are on the first stage, layers after them on the last. A stage runs the model's own code with
its blocks; missing layers pass their input on. So this works only for models whose code accepts the output of the
previous stage in place of embeddings (`inputs_embeds` of transformers).
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ullage.errors import InvalidValue, ModelLacks
from ullage.jobs.model import Model
from ullage.jobs.tasks import Task, assume

_MOST_IN_A_STAGE = 4  # most micro-batches per stage, for a small bubble


def microbatches(samples: int, stages: int) -> int:
    """Return the number of micro-batches of a step: at least that of stages, which 1F1B needs, and up to four times as
    many, so that the bubble is small.
    """
    even = [count for count in range(stages, samples + 1) if samples % count == 0]
    if not even:
        raise InvalidValue(f"a pipeline of {stages} stages needs at least {stages} samples in a step, got {samples}")
    return max((count for count in even if count <= _MOST_IN_A_STAGE * stages), default=even[0])


def layers_of_stages(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage. Remaining ones go to the stages after the first, which has embeddings."""
    each, more = divmod(layers, stages)
    stage_layers, begin = [], 0
    for number in range(stages):
        end = begin + each + (1 <= number <= more)
        stage_layers.append(range(begin, end))
        begin = end
    return stage_layers


class Stage(nn.Module):
    """A stage of a model: takes ids or the output of the previous stage, and returns its own output or the loss."""

    def __init__(self, model: Any, task: Task, number: int, stages: int, cast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last = number == 0, number == stages - 1
        self._task, self._cast = task, cast

    def forward(self, given: torch.Tensor, **targets: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids" if self.is_first else "inputs_embeds": given}
        with torch.autocast("cuda", dtype=self._cast, enabled=self._cast is not None):
            if self.is_last:
                loss: torch.Tensor = self._task.forward(self.model, inputs, targets)
                return torch.stack([loss.float()])  # no view: PyTorch 2.6 detaches it in place
            out: torch.Tensor = _inner(self.model).base_model(**inputs)[0]
            return out


def cut(model: Any, task: Task, number: int, stages: int, configuration: Model) -> Stage:
    """Return a stage of a model. The model is changed: it loses the layers of the other stages."""
    inner = _inner(model)
    body = getattr(inner, "base_model", None)
    takes = inspect.signature(body.forward).parameters if isinstance(body, nn.Module) else {}
    if not {"input_ids", "inputs_embeds"} <= set(takes) or getattr(inner.config, "is_encoder_decoder", False):
        raise ModelLacks(
            f"{configuration.name}: stages need a model of transformers that takes text (input_ids, inputs_embeds), "
            "not an encoder with a decoder; cut it by hand in a script"
        )
    assert isinstance(body, nn.Module)
    path = _path_to_blocks(body, configuration)
    names = path.split(".")
    blocks = body.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    if len(blocks) < stages:
        raise InvalidValue(f"a pipeline of {stages} stages needs at least {stages} layers, got {len(blocks)}")
    own = layers_of_stages(len(blocks), stages)[number]
    tied = getattr(inner.config, "tie_word_embeddings", False) and 0 < number == stages - 1
    cast = configuration.types.autocast
    made = Stage(model, task, number, stages, None if cast is None else getattr(torch, cast))
    for parent, on_path in _beside(body, names):
        for name, child in parent.named_children():
            if name != on_path and (stand_in := _stand_in(name, child, made)) is not None:
                setattr(parent, name, stand_in)
    if body is not inner and not made.is_last:
        for name, child in inner.named_children():
            if child is not body:
                setattr(inner, name, _Handed())
    parent = body.get_submodule(".".join(names[:-1]))
    setattr(parent, names[-1], nn.ModuleList(blocks[place] for place in own))
    assume(f"pp: layers {own.start} to {own.stop - 1} of {len(blocks)} on this stage, 1F1B")
    if tied:
        assume("pp: the embeddings are on the first and on the last stage; their gradients are not summed")
    return made


def schedule_of(stage: Stage, example: torch.Tensor, number: int, stages: int, count: int, device: Any) -> Any:
    """Return PyTorch's 1F1B schedule with `count` micro-batches; `example` is one of ids on the meta device."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    config, weights = _inner(stage.model).config, next(iter(_floats(stage.model)))
    width = (getattr(config, "text_config", None) or config).hidden_size
    passed = torch.empty(*example.shape, width, dtype=weights.dtype, device="meta", requires_grad=True)
    given = example if stage.is_first else passed
    out = torch.empty(1, device="meta", requires_grad=True) if stage.is_last else passed
    made = PipelineStage(stage, number, stages, device, input_args=given, output_args=out)
    return Schedule1F1B(made, n_microbatches=count, loss_fn=_sum)


def _sum(loss: torch.Tensor, target: Any) -> torch.Tensor:
    return loss.sum()


def _floats(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of the model itself, since adapters may have another type."""
    for name, weights in model.named_parameters():
        if weights.is_floating_point() and "lora_" not in name:
            yield weights


def _inner(model: Any) -> Any:
    """Return the model itself, without adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _path_to_blocks(body: nn.Module, configuration: Model) -> str:
    lists = {name: part for name, part in body.named_modules() if isinstance(part, nn.ModuleList) and name}
    outer = {
        name: sum(weights.numel() for weights in part.parameters())
        for name, part in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    }
    if not outer:
        raise ModelLacks(f"{configuration.name} has no list of layers (nn.ModuleList) to divide into stages")
    longest: str = max(outer, key=lambda name: outer[name])
    return longest


def _beside(body: nn.Module, path: list[str]) -> Iterator[tuple[nn.Module, str]]:
    parent = body
    for name in path:
        yield parent, name
        parent = parent.get_submodule(name)


def _stand_in(name: str, child: nn.Module, stage: Stage) -> nn.Module | None:
    """Return the replacement of a part that another stage has; `None` keeps the part, such as one without weights."""
    if next(child.parameters(), None) is None:
        return None
    embeds = any(isinstance(part, nn.Embedding) for part in child.modules())
    if embeds or "emb" in name or name == "project_in":
        return None if stage.is_first else _Embedded() if embeds else _Handed()
    return None if stage.is_last else _Handed()


class _Handed(nn.Module):
    """Returns its input."""

    def forward(self, given: Any, *others: Any, **options: Any) -> Any:
        return given


class _Embedded(nn.Module):
    """Replaces embeddings that the first stage has added: returns its embedded input, or else zero."""

    def forward(self, *given: Any, **named: Any) -> Any:
        tensors = [value for value in (named.get("inputs_embeds"), *given) if isinstance(value, torch.Tensor)]
        for value in tensors:
            if value.is_floating_point() and value.dim() == 3:
                return value
        return torch.zeros((), device=tensors[0].device if tensors else None)
