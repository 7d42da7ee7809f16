"""Estimate a function that trains on "cuda"."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.estimation.result import Estimate
from ullage.estimation.timeline.trace import Trace
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.virtual import VirtualGPU
from ullage.virtual.tracking.convergence import Settled, Settling
from ullage.virtual.tracking.places import Place
from ullage.workloads.configuration import OPTION_FIELDS, Configuration

LONGEST_TIMELINE = 2000  # points kept; the peaks are always among them


def estimate_function(
    source: Callable[[], Any],
    *,
    gpu: str | GPU = "H200",
    steps: int | None = 3,
    config: AllocatorConfig | None = None,
    trace: Trace | None = None,
) -> Estimate:
    """How much memory a function that trains on "cuda" will take on `gpu`, found without a GPU.

    The function runs on a virtual GPU. It is stopped after `steps` optimizer steps, as soon as an iteration asks for
    the same memory as the one before (after 30 steps at the latest); `steps=None` lets it run to its end. If it runs
    out of memory, it is run once more on a card without limit to say how much it would need. An empty `trace` is
    filled with every request of the run.

    >>> def train():
    ...     model = torch.nn.Linear(1024, 1024).cuda()
    ...     optimizer = torch.optim.Adam(model.parameters())
    ...     for _ in range(3):
    ...         model(torch.randn(64, 1024, device="cuda")).sum().backward()
    ...         optimizer.step()
    >>> estimate(train, gpu="H200").fits
    True

    Not covered: code after the step at which it is stopped (validation, a second phase): use `steps=None`.
    """
    if not callable(source):
        raise InvalidValue(
            f"needed a function without arguments that trains on 'cuda'; found {source!r}. "
            "Wrap the call: ullage.estimate(lambda: train(model, data), gpu=...)"
        )
    spec = find_gpu(gpu)
    begin = time.perf_counter()
    card, message = _run(source, VirtualGPU(spec, config), steps, trace)
    if message is not None:
        unlimited = VirtualGPU(spec, config, limited=False)
        unlimited.note("memory", "ran out of memory; the figures are those of a card without limit")
        card, _ = _run(source, unlimited, steps, trace)
    if trace is not None:
        trace.fill(card)
    return summarize(card, time.perf_counter() - begin, message)


def _run(
    function: Callable[[], Any], card: VirtualGPU, steps: int | None, trace: Trace | None
) -> tuple[VirtualGPU, str | None]:
    if trace is not None:
        trace.watch(card)
    with card:
        if steps is not None:
            card.progress.on_step = Settling(card, steps).after_step
        try:
            function()
        except Settled:
            pass
        except torch.OutOfMemoryError as error:
            return card, str(error)
    return card, None


def summarize(card: VirtualGPU, seconds: float, out_of_memory: str | None = None) -> Estimate:
    """The estimate that a virtual GPU's run gives."""
    breakdown = card.memory.live_at_peak()
    order = ("parameters", "gradients", "optimizer", "activations", "workspace")
    parts = {name: breakdown[name] for name in order}
    parts["fragmentation"] = card.peak_reserved - sum(parts.values())
    parts["context"] = card.context
    usable = card.spec.usable
    memory, progress = card.memory, card.progress
    return Estimate(
        gpu=card.spec.name,
        gpu_memory=usable,
        peak_allocated=card.peak_allocated,
        peak_reserved=card.peak_reserved,
        process_memory=card.process_memory,
        upper=card.upper,
        breakdown=parts,
        fits=out_of_memory is None and card.process_memory <= usable,
        headroom=usable - card.process_memory,
        steps=card.progress.optimizer_steps,
        seconds=seconds,
        out_of_memory=out_of_memory,
        **_moment("peak", card.peak_place, progress.step_at(memory.peak_clock)),
        **_moment("reserved", card.peak_reserved_place, progress.step_at(memory.peak_reserved_clock)),
        doubtful=card.uncertain,
        measured=card.spec.context_measured,
        notes=card.notes,
        timeline=_thinned(card.timeline),
    )


def _moment(name: str, place: Place | None, step: int | None) -> dict[str, Any]:
    if place is None:
        return {}
    words = {"operator": place.operator, "module": place.module, "pass": place.part, "step": step}
    return {f"{name}_{key}": value for key, value in words.items()}


def _thinned(points: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """At most `LONGEST_TIMELINE` points: of each stretch the one with the most allocated, so that no peak is lost."""
    if len(points) <= LONGEST_TIMELINE:
        return points
    stretch = -(-len(points) // LONGEST_TIMELINE)
    chunks = (points[start : start + stretch] for start in range(0, len(points), stretch))
    return [max(chunk, key=lambda point: (point[1], point[2])) for chunk in chunks]


# `ullage.estimate`: a name, a function and a script go to the right place.

MODEL, FUNCTION, SCRIPT = "model", "function", "script"
_SCRIPT_OPTIONS = ("args", "module", "timeout", "trace_file", "show_output")
_ITERATIONS = 5  # of the standard loop; three are watched, two more are there if the requests have not settled


def estimate_on_virtual_gpu(
    source: str | Path | Callable[[], Any], *, gpu: str | GPU = "H200", **options: Any
) -> Estimate:
    """How much memory a training job will take on `gpu`, found without a GPU.

    `source` is a model's name (`"torchvision:resnet50"`, `"timm:NAME"`, `"hf:CLASS"`, `"package.module:factory"`), a
    function without arguments that trains on "cuda", or the path of a script (with `module=True` the name of a
    module). For all: `steps`, `config` (allocator settings). For names: `batch_size`, `input_shape`,
    `sequence_length`, `num_classes`, `optimizer`, `precision`, `gradient_accumulation`, `checkpointing`, `attention`,
    `channels_last`, `freeze`, `lora_rank`, `inference`, `set` and `config` (a model's config: a file or a dict). For
    functions: `trace`. For scripts: `args`, `module`, `timeout`, `trace_file`, `show_output`.

    >>> estimate("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64], gpu="A100-40GB").fits
    True

    Not covered: more than one GPU.
    """
    kind = kind_of(source, bool(options.get("module")))
    check_options(kind, options)
    if kind == FUNCTION:
        return estimate_function(source, gpu=gpu, **options)  # type: ignore[arg-type]
    if kind == SCRIPT:
        return _estimate_script(source, gpu, options)
    chosen, settings = split_options(options)
    configuration = Configuration.from_options(str(source), **chosen)
    return estimate_configuration(configuration, gpu=gpu, source=str(source), **settings)


def kind_of(source: Any, module: bool = False) -> str:
    """Whether a source is a model's name, a function or a script.

    >>> kind_of("timm:resnet50"), kind_of(print), kind_of("package.train", module=True)
    ('model', 'function', 'script')
    """
    if callable(source):
        return FUNCTION
    if not isinstance(source, str | Path) or not str(source):
        raise InvalidValue(
            "needed a model's name such as torchvision:resnet50, a function that trains on 'cuda', or the path of a "
            f"script; found {source!r}"
        )
    if module or str(source).endswith(".py") or Path(source).is_file():
        return SCRIPT
    return MODEL


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a model, and those of the run: `config` is either, by what it is."""
    chosen = {name: value for name, value in options.items() if name in OPTION_FIELDS}
    rest = {name: value for name, value in options.items() if name not in OPTION_FIELDS}
    if isinstance(chosen.get("config"), AllocatorConfig):
        rest["config"] = chosen.pop("config")
    return chosen, rest


def estimate_configuration(
    configuration: Configuration,
    *,
    gpu: str | GPU = "H200",
    source: str | None = None,
    steps: int | None = 3,
    **run: Any,
) -> Estimate:
    """The estimate of a configuration; what the model does not accept is one clear message.

    >>> estimate_configuration(Configuration(model="mlp:x", widths=[8, 4], batch_size=2), gpu="T4").fits
    True
    """
    from ullage.workloads.training import train

    iterations = max(_ITERATIONS, steps or 0)
    try:
        answer = estimate_function(lambda: train(configuration, iterations), gpu=gpu, steps=steps, **run)
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise InvalidValue(
            f"{configuration.model} does not run with {_said(configuration)}: {type(error).__name__}: {lines[0]}"
        ) from error
    return named(answer, source or configuration.model)


def named(answer: Estimate, source: str) -> Estimate:
    """The same estimate with the name of what was estimated."""
    return dataclasses.replace(answer, source=source)


def _said(configuration: Configuration) -> str:
    """What was asked for, in the words of the options."""
    spec = {field.name: field for field in dataclasses.fields(configuration)}
    said = []
    for option, name in OPTION_FIELDS.items():
        value = getattr(configuration, name)
        if name == "batch_size" or value != spec[name].default and value not in ({}, (), None):
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            said.append(f"{option.replace('_', ' ')} {text}")
    return ", ".join(said)


def check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse options that this kind of source does not have."""
    of_function = set(inspect.signature(estimate_function).parameters) - {"source", "function", "gpu"}
    valid = {
        MODEL: {*OPTION_FIELDS, *of_function},
        FUNCTION: of_function,
        SCRIPT: {*_SCRIPT_OPTIONS, "steps", "config"},
    }
    for name in options:
        if name in valid[kind]:
            continue
        others = [other for other, names in valid.items() if name in names]
        if others:
            raise InvalidValue(f"{name!r} is an option for a {others[0]}; this is a {kind}. " + _advice(kind))
        raise UnknownName("option", name, valid[kind])


def _advice(kind: str) -> str:
    if kind == SCRIPT:
        return "A script takes its own arguments: args=['--batch-size', '64'], or after -- on the command line"
    if kind == FUNCTION:
        return "Wrap the call: ullage.estimate(lambda: train(batch_size=64), gpu=...)"
    return "A script's path ends in .py"


def _estimate_script(source: Any, gpu: str | GPU, options: dict[str, Any]) -> Estimate:
    from ullage.estimation.scripts.parent import estimate_script

    path, args = str(source), [str(word) for word in options.pop("args", ())]
    answer: Estimate = functools.partial(estimate_script, path, args, gpu=gpu)(**options)
    return answer
