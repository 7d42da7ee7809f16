"""Small parts of pages. Texts of users only go through `words`, which never turns them into HTML."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from ullage.manager.page.kept_files import address_of
from ullage.manager.page.readings import KEPT

_STEP = 5.0  # seconds between two points of a curve, and between its updates
_HEIGHT = 30
_FIELD = "outlined dense stack-label spellcheck=false autocomplete=off"

Cell = str | tuple[str, str]  # a text, or the text and the address of a link


def words(tag: str, text: str = "", kind: str = "") -> TextElement:
    made = TextElement(tag=tag, text=text)
    return made.classes(kind) if kind else made


def box(tag: str = "div", kind: str = "") -> ui.element:
    made = ui.element(tag)
    return made.classes(kind) if kind else made


def card(title: str = "", kind: str = "") -> ui.element:
    made = box("section", f"card {kind}")
    with made:
        if title:
            words("h2", title)
    return made


def button(text: str, pressed: Callable[..., Any] | None, kind: str = "quiet") -> TextElement:
    """Make a button; with `None`, it submits its form."""
    made = words("button", text, kind).props(f'type="{"button" if pressed else "submit"}"')
    return made.on("click", pressed) if pressed else made


def problem() -> TextElement:
    return words("p", "", "problem").props('role="alert"')


def show_facts(facts: Iterable[tuple[str, str]]) -> dict[str, TextElement]:
    """Show names and texts as a definition list; return the elements of the texts."""
    return {name: (words("dt", name), words("dd", text))[1] for name, text in facts}


def show_table(
    heads: Sequence[str],
    rows: Iterable[tuple[str, Sequence[Cell]]],
    kinds: Mapping[str, str],
    total: Sequence[Cell] | None = None,
) -> None:
    with box("table"):
        with box("thead"), box("tr"):
            for head in heads:
                words("th", head, kinds.get(head, "")).props('scope="col"')
        for part, lines in (("tbody", rows), ("tfoot", [("", total)] if total else [])):
            with box(part):
                for kind, cells in lines:
                    with box("tr", kind):
                        for head, cell in zip(heads, cells, strict=True):
                            _show_cell(cell, kinds.get(head, ""))


def _show_cell(cell: Cell, kind: str) -> None:
    if isinstance(cell, str):
        words("td", cell, kind)
    else:
        with box("td", kind):
            ui.link(*cell)


def text_field(label: str, example: str = "", kind: str = "") -> ui.input:
    return ui.input(label, placeholder=example).props(_FIELD).classes(kind)


def number_field(label: str, unsaid: str = "", value: int | None = None, least: int | None = 1) -> ui.number:
    made = ui.number(label, value=value, min=least, precision=0, format="%d", placeholder=unsaid)
    return made.props("outlined dense stack-label")


def choice(label: str, options: Any, value: Any, kind: str = "") -> ui.select:
    return ui.select(options, value=value, label=label).props("outlined dense").classes(kind)


def toggle(label: str, options: Iterable[str], value: str) -> ui.toggle:
    return ui.toggle(list(options), value=value).props(f'no-caps unelevated aria-label="{label}"')


def preload(module: str) -> None:
    """Let the browser load a module of NiceGUI with the page."""
    ui.add_head_html(f'<link rel="modulepreload" href="{address_of(module)}" fetchpriority="low">')


def scrolled(label: str) -> ui.element:
    """Make an element that scrolls sideways, also by keyboard."""
    made = box("div", "scroll").props('tabindex="0" role="region"')
    made.props["aria-label"] = label
    return made


def set_prop(element: ui.element, name: str, value: Any) -> None:
    if element.props.get(name) != value:
        element.props[name] = value


def percent_of(part: float) -> str:
    """Return a width relative to the surrounding element, as CSS.

    >>> percent_of(0.256), percent_of(1.5)
    ('25.60%', '100.00%')
    """
    return f"{100 * min(1.0, max(0.0, part)):.2f}%"


def set_width(element: ui.element, part: float) -> None:
    width = percent_of(part)
    if element.style.get("width") != width:
        element.style(f"width: {width}")


def describe(element: ui.element, text: str) -> None:
    """Mark an element as a picture, with a text for screen readers."""
    set_prop(element, "role", "img")
    set_prop(element, "aria-label", text)


def curve(name: str, series: list[tuple[float, float | None]], top: float, value: str) -> dict[str, Any]:
    """Return the values of the last minutes as an SVG line of height `top`, with the last value in words."""
    about = f"{name} over the last {KEPT / 60:.0f} minutes, now {value}"
    view = f"0 0 {KEPT:.0f} {_HEIGHT}"
    return {"name": name, "value": value, "path": path_of(series, top), "box": view, "about": about}


def path_of(series: list[tuple[float, float | None]], top: float) -> str:
    """Return an SVG path that ends now at the right edge: means of some seconds each, with gaps if unknown.

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
