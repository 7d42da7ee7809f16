"""The cards of an estimate: memory by use and over time, the speed of a step, and advice."""

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui

from ullage.errors import InvalidValue
from ullage.estimation.result import Estimate
from ullage.estimation.words import BREAKDOWN_COLOURS, folded, model_words
from ullage.manager.page.charts import memory_figure, memory_line
from ullage.manager.page.elements import box, card, describe, scrolled, set_width, show_facts, show_table, words
from ullage.performance.result import Utilization, percent
from ullage.text import plain_values
from ullage.units import GIB, format_bytes, format_duration

_MARKS = {"✓": "good", "?": "doubtful", "✗": "bad"}
_MOST_POINTS = 800  # points of a curve
_GREY = "#7d8a93"  # readable on light and on dark


def read_estimates(answer: dict[str, Any]) -> list[Estimate]:
    """Read the estimates of an answer, which comes from a process of the user and may be anything."""
    try:
        estimates = [Estimate.from_dict(plain_values(each)) for each in answer["estimates"]]
        for each in estimates:
            _ = str(each), each.certainty, each.needed <= each.gpu_memory, each.bound <= each.gpu_memory
            _ = [(int(allocated), int(reserved)) for _, allocated, reserved in each.timeline]
    except (InvalidValue, AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise InvalidValue("the answer of the estimate makes no sense") from None
    return estimates


def show_answer(estimates: Sequence[Estimate], advice: dict[str, Any] | None) -> None:
    """Build the cards: the first GPU in full, and all of several in a table."""
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
        with card("Assumptions"), box("ul", "notes"):
            for line in folded(first.notes):
                words("li", line)


def _show_memory(estimate: Estimate) -> None:
    with card(kind="answer"):
        if estimate.source:
            words("p", estimate.source, "figures source")
        words("h2", f"{estimate.mark} {estimate.verdict}", f"verdict {_MARKS[estimate.mark]}")
        whole = max(estimate.gpu_memory, estimate.figure, 1)
        with show_bands(estimate.breakdown, whole, estimate.gpu_memory):
            if estimate.figure > estimate.gpu_memory:
                edge = box("div", "edge")
                edge.style(f"left: {100 * estimate.gpu_memory / whole:.2f}%")
                edge.props["title"] = f"{estimate.gpu} has {format_bytes(estimate.gpu_memory)}"
        if estimate.breakdown:
            words("p", f"At the peak{estimate.peak_moment}:", "figures")
        show_parts(estimate.breakdown, estimate.part_words)
        with box("dl", "facts"):
            show_facts(_facts(estimate))


def show_bands(parts: dict[str, int], whole: int, of: int) -> ui.element:
    with box("div", "bands") as bands:
        for name, size in parts.items():
            set_width(_coloured(box("div", "band part"), name), size / whole)
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    describe(bands, f"{sizes} of {format_bytes(of)}")
    return bands


def show_parts(parts: dict[str, int], words_of: Callable[[str], str]) -> None:
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


def _facts(estimate: Estimate) -> list[tuple[str, str]]:
    reserved, allocated = estimate.peak_reserved, estimate.peak_allocated
    sizes = {"nvidia-smi": estimate.process_memory, "reserved": reserved, "allocated": allocated}
    shown = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
    lines = [("Peak", shown), ("Reached", estimate.peak_words), ("Confidence", estimate.certainty)]
    lines += [("Tried", estimate.trial_words), *(("Model", text) for text in map(model_words, estimate.models))]
    if estimate.out_of_memory and not estimate.fits:
        lines.append(("PyTorch says", estimate.out_of_memory.split(" If reserved")[0]))
    return [(name, text) for name, text in [*lines, ("Run", estimate.effort)] if text]


def _show_timeline(estimate: Estimate) -> None:
    step = max(1, len(estimate.timeline) // _MOST_POINTS)
    groups = [estimate.timeline[at : at + step] for at in range(0, len(estimate.timeline), step)]
    highest = [max(group, key=lambda point: point[1]) for group in groups]  # thinning keeps every peak
    context = estimate.breakdown.get("context", 0)
    limit = (estimate.gpu_memory - context) / GIB
    most = max(reserved / GIB for _, _, reserved in highest)
    lines = []
    for place, name, part in ((1, "allocated", "activations"), (2, "reserved", "context")):
        data = [[point[0], round(point[place] / GIB, 4)] for point in highest]
        lines.append(memory_line(name, data, {"color": BREAKDOWN_COLOURS[part]}, area=place == 1))
    top: dict[str, Any] = {}
    if max(limit, most) < 4 * most:
        top = {"max": float(f"{1.05 * max(limit, most):.3g}")}
        label = {"formatter": f"{estimate.gpu} is full", "color": _GREY, "position": "insideEndTop"}
        style = {"color": "#c9372c", "type": "dashed"}
        full = {"silent": True, "symbol": "none", "lineStyle": style, "label": label}
        lines[1]["markLine"] = full | {"data": [{"yAxis": round(limit, 4)}]}
    with card("Memory over the run"):
        words("p", f"By calls of the allocator; {format_bytes(context)} of CUDA context come on top of it.", "figures")
        calls = {"type": "value", "min": "dataMin", "max": "dataMax", "splitLine": {"show": False}}
        chart = ui.echart(memory_figure(calls, lines, **top)).classes("chart")
        highest_point = max(allocated for _, allocated, _ in highest)
        describe(chart, f"Memory over the run, at most {format_bytes(highest_point)} allocated")


def _show_speed(step: Utilization) -> None:
    with card("How fast, and how busy"):
        with box("dl", "facts"):
            show_facts(
                [
                    ("Step", step.step_words),
                    ("Limited by", step.limit_words),
                    ("Power", step.power_words),
                ]
            )
        for name, share, meaning in step.shares:
            with box("div", "curve share"):
                words("span", name, "name")
                with box("div", "bands thin"):
                    set_width(box("div", "band part job-0"), share)
                words("span", percent(share), "value")
            if meaning:
                words("p", meaning, "figures meaning")
        words("p", "; ".join(step.remarks), "figures")


def _show_advice(advice: dict[str, Any]) -> None:
    options, largest = advice["options"], advice["largest"]
    nothing = "What was tried" if largest else "Nothing that was tried makes it fit"
    fits = any(option["fits"] for option in options)
    with card("What would make it fit" if fits else nothing if options or not largest else "The largest batch"):
        if not options and not largest:
            words("p", "For a script, name the argument that sets its batch size.", "figures")
        if options:
            tried = all(option["takes"] for option in options)
            words("p", "Each of these was estimated." if tried else "What has a size was estimated.", "figures")
            rows = []
            for option in options:
                mark = "✓" if option["fits"] else "✗" if option["takes"] else "·"
                needs = format_bytes(option["takes"]) if option["takes"] else ""
                rows.append(("", [f"{mark} {option['change']}", needs, str(option["note"])]))
            with scrolled("Changes"):
                show_table(["Change", "Needs", ""], rows, {"Needs": "number", "": "figures"})
        for line in str(largest).splitlines() if largest else ():
            words("p", line)


def _show_gpus(estimates: Sequence[Estimate]) -> None:
    fits = sum(bool(each.fits) for each in estimates)
    rows = []
    for each in sorted(estimates, key=lambda one: (not one.fits, one.gpu_memory, one.gpu)):
        sizes = [format_bytes(size) for size in (each.needed, each.gpu_memory, each.bound)]
        step = each.utilization.step_s if each.utilization is not None and each.fits else None
        cells = [f"{each.mark} {each.gpu}", *sizes, "" if step is None else format_duration(step)]
        rows.append(("" if each.fits else "no", cells))
    with card("On other GPUs"):
        words("p", f"It fits on {fits} of {len(estimates)}; the smallest first.", "figures")
        with scrolled("GPUs"):
            heads = ["GPU", "Needs", "Capacity", "At most", "Step"]
            show_table(heads, rows, dict.fromkeys(heads[1:], "number"))
