"""Estimate a function that trains on "cuda"."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue
from ullage.estimate.result import Estimate
from ullage.estimate.trace import Trace
from ullage.gpus import GPU
from ullage.gpus import gpu as find_gpu
from ullage.virtual import VirtualGPU
from ullage.virtual.places import Place
from ullage.virtual.settling import Settled, Settling

LONGEST_TIMELINE = 2000  # points kept; the peaks are always among them


def estimate(
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
