"""Small parts of pages. Whatever users wrote is only ever given to `words`, which makes text of it and never HTML."""

from __future__ import annotations

from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from ullage.manager.page.kept_files import address_of
from ullage.manager.page.readings import KEPT

_STEP = 5.0  # seconds between two points of a curve: as often as it is sent to the browser
_HEIGHT = 30


def words(tag: str, text: str = "", kind: str = "") -> TextElement:
    """An element of HTML with text in it."""
    made = TextElement(tag=tag, text=text)
    return made.classes(kind) if kind else made


def box(tag: str = "div", kind: str = "") -> ui.element:
    """An element of HTML with others in it."""
    made = ui.element(tag)
    return made.classes(kind) if kind else made


def preload(module: str) -> None:
    """Let the browser load a module of NiceGUI with the page, not when it is first used."""
    ui.add_head_html(f'<link rel="modulepreload" href="{address_of(module)}" fetchpriority="low">')


def scrolled(label: str) -> ui.element:
    """What is wider than a phone and can be moved, with the keyboard too."""
    made = box("div", "scroll").props('tabindex="0" role="region"')
    made.props["aria-label"] = label
    return made


def set_prop(element: ui.element, name: str, value: Any) -> None:
    """Set an attribute; nothing is sent to the browser if it is the same already."""
    if element.props.get(name) != value:
        element.props[name] = value


def percent_of(part: float) -> str:
    """A width as a part of what is around it.

    >>> percent_of(0.256), percent_of(1.5)
    ('25.60%', '100.00%')
    """
    return f"{100 * min(1.0, max(0.0, part)):.2f}%"


def set_width(element: ui.element, part: float) -> None:
    """Let an element be so wide, as a part of what is around it."""
    width = percent_of(part)
    if element.style.get("width") != width:
        element.style(f"width: {width}")


def curve(name: str, series: list[tuple[float, float | None]], top: float, value: str) -> dict[str, Any]:
    """Figures of the last minutes as a line of SVG, with the last one in words. Each was so many seconds ago;
    `top` is the height of the picture."""
    return {
        "name": name, "value": value, "path": path_of(series, top), "box": f"0 0 {KEPT:.0f} {_HEIGHT}",
        "about": f"{name} over the last {KEPT / 60:.0f} minutes, now {value}",
    }  # fmt: skip


def path_of(series: list[tuple[float, float | None]], top: float) -> str:
    """The line of a picture whose right edge is now: means of some seconds each, with a gap where nothing is known.

    >>> path_of([(12.0, 1.0), (7.0, 0.5), (2.0, None)], top=1.0)
    'M285 0L290 15'
    """
    means: dict[int, list[float]] = {}
    for age, value in series:
        if value is not None and age < KEPT:
            means.setdefault(int(age // _STEP), []).append(value)
    line, before = "", None
    for step in sorted(means, reverse=True):
        height = _HEIGHT * (1 - min(1.0, sum(means[step]) / len(means[step]) / top)) if top else _HEIGHT
        line += f"{'L' if before == step + 1 else 'M'}{KEPT - (step + 1) * _STEP:.0f} {height:.3g}"
        before = step
    return line
