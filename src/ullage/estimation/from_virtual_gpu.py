"""Make an estimate from the state of a virtual GPU after a run."""

from typing import Any

from ullage.estimation.result import Estimate
from ullage.virtual import VirtualGPU
from ullage.virtual.memory.allocations import largest_by_kind, live_by_kind
from ullage.virtual.watching.request_origins import RequestOrigin

LONGEST_TIMELINE = 2000  # points kept; the peaks are always among them
_PARTS = ("parameters", "copies", "gradients", "optimizer", "activations", "workspace")


def estimate_from(gpu: VirtualGPU, seconds: float, out_of_memory: str | None = None) -> Estimate:
    """Return the estimate after a run of `seconds`; `out_of_memory` is the error that the real GPU would raise."""
    return Estimate(**figures_of(gpu, seconds, out_of_memory))


def figures_of(gpu: VirtualGPU, seconds: float, out_of_memory: str | None = None) -> dict[str, Any]:
    """Return the arguments of that estimate as plain values, for another process."""
    breakdown = live_by_kind(gpu.memory.spans, gpu.memory.peak_clock)
    parts = {name: breakdown[name] for name in _PARTS if breakdown[name] or name != "copies"}
    parts["fragmentation"] = gpu.peak_reserved - sum(parts.values())
    parts["context"] = gpu.context
    largest, usable = largest_by_kind(list(gpu.memory.spans), gpu.memory.clock), gpu.spec.usable
    memory, progress = gpu.memory, gpu.progress
    return dict(
        gpu=gpu.spec.name,
        gpu_memory=usable,
        peak_allocated=gpu.peak_allocated,
        peak_reserved=gpu.peak_reserved,
        process_memory=gpu.process_memory,
        upper=gpu.upper,
        breakdown=parts,
        fits=out_of_memory is None and gpu.context + gpu.needed_reserved <= usable,
        headroom=usable - gpu.context - gpu.needed_reserved,
        steps=progress.optimizer_steps,
        seconds=seconds,
        out_of_memory=out_of_memory,
        **_moment("peak", gpu.peak_place, progress.step_at(memory.peak_clock)),
        **_moment("reserved", gpu.peak_reserved_place, progress.step_at(memory.peak_reserved_clock)),
        doubtful=gpu.uncertainty.largest_doubt,
        guessed=gpu.uncertainty.guessed(),
        without_trials=_without_trials(gpu),
        assumed=gpu.assumed,
        left_out=gpu.left_out,
        measured=gpu.spec.context_measured,
        largest={name: size for name, size in largest.items() if name in parts},
        pytorch=gpu.release.name,
        attention=sorted(gpu.attention_kernels),
        models=[summary for summary in (model.summary() for model in gpu.origins.models) if summary["parameters"]],
        layers=gpu.origins.layers(),
        notes=gpu.notes,
        timeline=_thinned(gpu.timeline),
    )


def _without_trials(gpu: VirtualGPU) -> dict[str, int] | None:
    if not gpu.libraries.tries_plans:
        return None
    return {
        "peak_allocated": gpu.needed_allocated,
        "peak_reserved": gpu.needed_reserved,
        "process_memory": gpu.context + gpu.needed_reserved,
        "upper": gpu.needed_upper,
    }


def _moment(name: str, place: RequestOrigin | None, step: int | None) -> dict[str, Any]:
    if place is None:
        return {}
    words = {"operator": place.operator, "module": place.module, "class": place.module_class, "pass": place.part}
    return {f"{name}_{key}": value for key, value in {**words, "step": step}.items()}


def _thinned(points: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Keep at most `LONGEST_TIMELINE` points: of each stretch the one with the most allocated memory."""
    if len(points) <= LONGEST_TIMELINE:
        return points
    stretch = -(-len(points) // LONGEST_TIMELINE)
    chunks = (points[start : start + stretch] for start in range(0, len(points), stretch))
    return [max(chunk, key=lambda point: (point[1], point[2])) for chunk in chunks]
