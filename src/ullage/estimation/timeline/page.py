"""The memory of a run as one HTML page that needs no network: by kind or by module, at every moment.

timeline.html has the page's text and drawing; this file packs a trace into it.
"""

import base64
import json
from bisect import bisect_left
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ullage.errors import InvalidValue
from ullage.estimation.result import Estimate
from ullage.estimation.timeline.trace import Array, Trace
from ullage.estimation.words import folded

MOST_BLOCKS = 120_000  # more of them would make the page slow to open: then only the step of the peak is shown
MOST_GROUPS = 18
DOMINANT = 0.5  # a group with more than this share of the memory is shown by its parts
UNIT = 512  # every block is a multiple of it
_MARK = "/*DATA*/"


def write(trace: Trace, estimate: Estimate, path: str | Path) -> None:
    """Write the page of a run. The horizontal axis is the run's allocator calls, not time."""
    text = page(trace, estimate)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write the timeline to {path}: {error.strerror}") from None


def page(trace: Trace, estimate: Estimate) -> str:
    template = files("ullage.estimation.timeline").joinpath("timeline.html").read_text(encoding="utf-8")
    data = json.dumps(_data(trace, estimate), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace(_MARK, data)


def _data(trace: Trace, estimate: Estimate) -> dict[str, Any]:
    first, last = _window(trace)
    visible = (trace.begin <= last) & ((trace.end == -1) | (trace.end > first))
    begin = np.maximum(trace.begin[visible] - first, 0)
    end = np.where(trace.end[visible] == -1, last - first + 1, np.minimum(trace.end[visible] - first, last - first + 1))
    places = trace.places
    module = np.where(trace.owner[visible] >= 0, trace.owner[visible], places[trace.place[visible], 1])
    names, group_of = module_groups(trace)
    reserved = trace.reserved[(trace.reserved[:, 0] <= last)]
    before = reserved[reserved[:, 0] <= first][-1:, 1].tolist() or [0]
    inside = reserved[reserved[:, 0] > first]
    return {
        "title": estimate.source or "Training run",
        "verdict": estimate.verdict,
        "fits": estimate.fits,
        "gpu": estimate.gpu,
        "capacity": estimate.gpu_memory - trace.context,
        "context": trace.context,
        "process": estimate.figure,
        "calls": int(last - first),
        "first": int(first),
        "wholeRun": bool(first == 0 and last == _calls(trace)),
        "steps": [int(step - first) for step in trace.steps if first < step <= last],
        "firstStep": int(bisect_left(trace.steps.tolist(), first + 1)) + 1,
        "peak": int(trace.peaks[0] - first),
        "peakWords": estimate.peak_words,
        "certainty": estimate.certainty,
        "notes": folded(estimate.notes),
        "kinds": list(trace.kinds),
        "groups": names,
        "operators": [name.removeprefix("aten.").removesuffix(".default") for name in trace.operators],
        "modules": trace.modules,
        "classes": trace.classes,
        "passes": list(trace.passes),
        "begin": _packed(begin, np.int32),
        "end": _packed(end, np.int32),
        "size": _packed(trace.size[visible] // UNIT, np.uint32),
        "kind": _packed(trace.kind[visible], np.uint8),
        "module": _packed(module, np.uint32),
        "operator": _packed(places[trace.place[visible], 0], np.uint32),
        "pass": _packed(places[trace.place[visible], 2], np.uint8),
        "group": _packed(group_of[module], np.uint8),
        "reserved": [[0, before[0]], *([int(call - first), int(size)] for call, size in inside)],
    }


def _calls(trace: Trace) -> int:
    return int(max(trace.begin.max(initial=0), trace.end.max(initial=0)))


def _window(trace: Trace) -> tuple[int, int]:
    """Return the calls to show: all of them, or those of the step with the peak."""
    last = _calls(trace)
    if len(trace) <= MOST_BLOCKS or not len(trace.steps):
        return 0, last
    steps = [0, *trace.steps.tolist(), last]
    place = bisect_left(steps, int(trace.peaks[0]))
    return steps[place - 1], steps[min(place, len(steps) - 1)]


def _packed(values: Array, kind: Any) -> str:
    return base64.b64encode(values.astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def module_groups(trace: Trace) -> tuple[list[str], Array]:
    """Return the names of at most `MOST_GROUPS` groups of modules, and the group of each module.

    The beginning of a path names its group. A group with most of the memory at the peak is split, so that a model whose
    layers lie in one container still shows them.
    """
    weights = _weights(trace)
    prefixes = {_first(name, 1) for name in trace.modules if name}
    for _ in range(4):
        assigned = [_prefix(name, prefixes) for name in trace.modules]
        totals = _totals(assigned, weights)
        heavy = max(totals, key=lambda name: totals[name], default=None)
        if heavy is None or totals[heavy] <= DOMINANT * max(1, sum(totals.values())):
            break
        parts = {_first(name, heavy.count(".") + 2) for name in trace.modules if name and name.startswith(f"{heavy}.")}
        if not parts or len(prefixes) + len(parts) > 8 * MOST_GROUPS:
            break
        prefixes |= parts
    assigned = [_prefix(name, prefixes) for name in trace.modules]
    totals = _totals(assigned, weights)
    largest = set(sorted(totals, key=lambda name: -totals[name])[: MOST_GROUPS - 2])
    names = ["outside of the model", *(name for name in dict.fromkeys(assigned) if name in largest)]
    if len(totals) > len(largest):
        names.append("other modules")
    numbers = {name: number for number, name in enumerate(names)}
    other = len(names) - 1
    return names, np.array([0 if name is None else numbers.get(name, other) for name in assigned], np.uint8)


def _weights(trace: Trace) -> Array:
    peak = trace.peaks[0]
    alive = (trace.begin <= peak) & ((trace.end == -1) | (trace.end > peak))
    module = np.where(trace.owner >= 0, trace.owner, trace.places[trace.place, 1] if len(trace) else 0)
    return np.bincount(module[alive], weights=trace.size[alive], minlength=len(trace.modules))


def _totals(assigned: list[str | None], weights: Array) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, weight in zip(assigned, weights.tolist(), strict=True):
        if name is not None:
            totals[name] = totals.get(name, 0) + weight
    return totals


def _first(name: str, parts: int) -> str:
    return ".".join(_parts(name)[:parts])


def _parts(name: str) -> list[str]:
    return [name] if name.endswith("()") else name.split(".")  # AdamW.step() is no path


def _prefix(name: str | None, prefixes: set[str]) -> str | None:
    """Return the longest of `prefixes` that a path begins with."""
    if name is None:
        return None
    parts = _parts(name)
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in candidates if prefix in prefixes), parts[0])
