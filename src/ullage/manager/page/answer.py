"""An estimate as cards: what the memory is for, how it goes over the run, how fast a step is, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui

from ullage.errors import InvalidValue
from ullage.estimation.result import Estimate
from ullage.estimation.words import BREAKDOWN_COLOURS, folded, model_words
from ullage.manager.page.elements import box, scrolled, set_width, words
from ullage.performance.result import Utilization, percent
from ullage.text import plain_values
from ullage.units import GIB, format_bytes, format_duration

_MARKS = {"✓": "good", "?": "doubtful", "✗": "bad"}
_MOST_POINTS = 800  # of a curve
_GREY = "#7d8a93"  # readable on light and on dark
_GIB_LABEL = "value => value + ' GiB'"


def read_estimates(answer: dict[str, Any]) -> list[Estimate]:
    """The estimates of an answer. They come from a process of the user, who may have it say anything."""
    try:
        found = [Estimate.from_dict(plain_values(each)) for each in answer["estimates"]]
        for each in found:
            _ = str(each), each.certainty, each.needed <= each.gpu_memory, each.bound <= each.gpu_memory
            _ = [(int(allocated), int(reserved)) for _, allocated, reserved in each.timeline]
    except (InvalidValue, AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise InvalidValue("the answer of the estimate makes no sense") from None
    return found


def show_answer(estimates: Sequence[Estimate], advice: dict[str, Any] | None) -> None:
    """Build the cards. Of several GPUs the first is shown in full, and all in a table."""
    first = estimates[0]
    _show_memory(first)
    if advice is not None:
        _show_advice(advice)
    if len(estimates) > 1:
        _show_gpus(estimates)
    if len(first.timeline) > 1:
        _show_timeline(first)
    if first.utilization is not None and first.fits:
        _show_speed(first.utilization)
    if first.notes:
        with box("section", "card"):
            words("h2", "Assumed on the way")
            _listed(folded(first.notes))


def _show_memory(found: Estimate) -> None:
    with box("section", "card answer"):
        if found.source:
            words("p", found.source, "figures source")
        words("h2", f"{found.mark} {found.verdict}", f"verdict {_MARKS[found.mark]}")
        whole = max(found.gpu_memory, found.figure, 1)
        with show_bands(found.breakdown, whole, found.gpu_memory):
            if found.figure > found.gpu_memory:
                edge = box("div", "edge")
                edge.style(f"left: {100 * found.gpu_memory / whole:.2f}%")
                edge.props["title"] = f"{found.gpu} has {format_bytes(found.gpu_memory)}"
        if found.breakdown:
            words("p", f"At the peak{found.peak_moment}:", "figures")
        show_parts(found.breakdown, found.part_words)
        with box("dl", "facts"):
            for name, text in _facts(found):
                words("dt", name)
                words("dd", text)


def show_bands(parts: dict[str, int], whole: int, of: int) -> ui.element:
    """The parts of an estimate side by side, each as wide as its share of the whole."""
    with box("div", "bands") as bands:
        for name, size in parts.items():
            set_width(_coloured(box("div", "band part"), name), size / whole)
    bands.props["role"] = "img"
    told = [f"{name} {format_bytes(size)}" for name, size in parts.items()]
    bands.props["aria-label"] = f"{', '.join(told)} of {format_bytes(of)}"
    return bands


def show_parts(parts: dict[str, int], words_of: Callable[[str], str]) -> None:
    """The same as a table, with what each part is."""
    with box("table", "parts"), box("tbody"):
        for name, size in parts.items():
            with box("tr"):
                with box("td"):
                    _coloured(box("span", "dot"), name).props["aria-hidden"] = "true"
                words("td", name)
                words("td", format_bytes(size), "number")
                words("td", words_of(name), "figures")


def _coloured(element: ui.element, part: str) -> ui.element:
    return element.style(f"--tint: {BREAKDOWN_COLOURS.get(part, _GREY)}")


def _facts(found: Estimate) -> list[tuple[str, str]]:
    sizes = {
        "nvidia-smi": found.process_memory,
        "reserved": found.peak_reserved,
        "allocated": found.peak_allocated,
    }
    shown = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
    lines = [("Peak", shown), ("Reached", found.peak_words), ("How sure", found.certainty)]
    lines += [("Tried", found.trial_words), *(("Model", text) for text in map(model_words, found.models))]
    if found.out_of_memory and not found.fits:
        lines.append(("PyTorch says", found.out_of_memory.split(" If reserved")[0]))
    return [(name, text) for name, text in [*lines, ("Effort", found.effort)] if text]


def _show_timeline(found: Estimate) -> None:
    """Allocated and reserved memory over the calls of the allocator."""
    step = max(1, len(found.timeline) // _MOST_POINTS)
    groups = [found.timeline[at : at + step] for at in range(0, len(found.timeline), step)]
    highest = [max(group, key=lambda point: point[1]) for group in groups]  # a peak is never thinned away
    context = found.breakdown.get("context", 0)
    limit = (found.gpu_memory - context) / GIB
    top = max(limit, *(reserved / GIB for _, _, reserved in highest))

    def line(name: str, place: int, colour: str) -> dict[str, Any]:
        data = [[point[0], round(point[place] / GIB, 4)] for point in highest]
        area = {"opacity": 0.25} if place == 1 else {"opacity": 0}
        return {"name": name, "type": "line", "data": data, "showSymbol": False, "step": "end",
                "lineStyle": {"width": 1.5, "color": colour}, "itemStyle": {"color": colour},
                "areaStyle": area}  # fmt: skip

    mark = {"silent": True, "symbol": "none", "lineStyle": {"color": "#c9372c", "type": "dashed"},
            "label": {"formatter": f"{found.gpu} is full", "color": _GREY, "position": "insideEndTop"},
            "data": [{"yAxis": round(limit, 4)}]}  # fmt: skip
    show_limit = top < 4 * max(reserved / GIB for _, _, reserved in highest)
    with box("section", "card"):
        words("h2", "Memory over the run")
        words("p", f"By calls of the allocator; {format_bytes(context)} of CUDA context come on top of it.", "figures")
        chart = ui.echart({
            "animation": False, "grid": {"left": 70, "right": 16, "top": 36, "bottom": 30},
            "legend": {"top": 0, "textStyle": {"color": _GREY}},
            "tooltip": {"trigger": "axis", ":valueFormatter": "value => value.toFixed(2) + ' GiB'"},
            "xAxis": {"type": "value", "min": "dataMin", "max": "dataMax", "axisLabel": {"color": _GREY},
                      "splitLine": {"show": False}},
            "yAxis": {"type": "value", "axisLabel": {"color": _GREY, ":formatter": _GIB_LABEL, "showMaxLabel": False},
                      "splitLine": {"lineStyle": {"color": _GREY, "opacity": 0.25}},
                      **({"max": float(f"{1.05 * top:.3g}")} if show_limit else {})},
            "series": [line("allocated", 1, BREAKDOWN_COLOURS["activations"]),
                       line("reserved", 2, BREAKDOWN_COLOURS["context"])
                       | ({"markLine": mark} if show_limit else {})],
        })  # fmt: skip
        chart.classes("chart").props["role"] = "img"
        highest_point = max(allocated for _, allocated, _ in highest)
        chart.props["aria-label"] = f"Memory over the run, at most {format_bytes(highest_point)} allocated"


def _show_speed(found: Utilization) -> None:
    with box("section", "card"):
        words("h2", "How fast, and how busy")
        with box("dl", "facts"):
            for name, text in [("A step", found.step_words), ("Limited by", found.limit_words),
                               ("Power", found.power_words)]:  # fmt: skip
                words("dt", name)
                words("dd", text)
        for name, share, meaning in found.shares:
            with box("div", "curve share"):
                words("span", name, "name")
                with box("div", "bands thin"):
                    set_width(box("div", "band part job-0"), share)
                words("span", percent(share), "value")
            if meaning:
                words("p", meaning, "figures meaning")
        words("p", "; ".join(found.remarks), "figures")


def _show_advice(advice: dict[str, Any]) -> None:
    with box("section", "card"):
        if not advice["options"] and not advice["largest"]:
            words("h2", "Nothing that was tried makes it fit")
            words("p", "For a script, name the argument that sets its batch size.", "figures")
            return
        help_found = any(option["fits"] for option in advice["options"])
        nothing = "Nothing that was tried makes it fit" if not advice["largest"] else "What was tried"
        heading = "What would make it fit" if help_found else nothing if advice["options"] else "The largest batch"
        words("h2", heading)
        if advice["options"]:
            tried = all(option["takes"] for option in advice["options"])
            words("p", "Each of these was estimated." if tried else "What has a size was estimated.", "figures")
            with scrolled("Changes"), box("table"):
                _head("Change", "Takes", "")
                with box("tbody"):
                    for option in advice["options"]:
                        with box("tr"):
                            mark = "✓" if option["fits"] else "✗" if option["takes"] else "·"
                            words("td", f"{mark} {option['change']}")
                            words("td", format_bytes(option["takes"]) if option["takes"] else "", "number")
                            words("td", str(option["note"]), "figures")
        for line in str(advice["largest"]).splitlines() if advice["largest"] else ():
            words("p", line)


def _show_gpus(estimates: Sequence[Estimate]) -> None:
    fits = sum(each.fits for each in estimates)
    with box("section", "card"):
        words("h2", "On other GPUs")
        words("p", f"It fits on {fits} of {len(estimates)}; the smallest first.", "figures")
        with scrolled("GPUs"), box("table"):
            _head("GPU", "Takes", "Of", "At most", "A step")
            with box("tbody"):
                for each in sorted(estimates, key=lambda one: (not one.fits, one.gpu_memory, one.gpu)):
                    with box("tr", "" if each.fits else "no"):
                        words("td", f"{each.mark} {each.gpu}")
                        words("td", format_bytes(each.needed), "number")
                        words("td", format_bytes(each.gpu_memory), "number")
                        words("td", format_bytes(each.bound), "number")
                        step = each.utilization.step_s if each.utilization is not None and each.fits else None
                        words("td", "" if step is None else format_duration(step), "number")


def _head(*names: str) -> None:
    with box("thead"), box("tr"):
        for place, name in enumerate(names):
            words("th", name, "number" if place else "").props["scope"] = "col"


def _listed(lines: Sequence[str]) -> None:
    with box("ul", "notes"):
        for line in lines:
            words("li", line)
