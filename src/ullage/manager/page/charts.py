"""The common parts of charts. Options with names that begin with a colon are our own JavaScript (static/charts.js);
users' texts are only values of other options."""

import datetime
from typing import Any

from nicegui import ui

FAINT = {":color": "ullage.css('--faint')"}
LINES = {"show": True, "lineStyle": {":color": "ullage.css('--line')"}}


def use_charts() -> None:
    ui.add_head_html('<script src="/_page/charts.js"></script>')


def tooltip(**more: Any) -> dict[str, Any]:
    """Return the options of a tooltip, by default with the lines in `about` of a point."""
    colours = {":backgroundColor": "ullage.css('--sheet')", ":borderColor": "ullage.css('--line')"}
    text = {"textStyle": {":color": "ullage.css('--ink')"}}
    return {"trigger": "item", "confine": True, **colours, **text, **(more or {":formatter": "ullage.about"})}


def on_axis(seconds: float) -> float:
    """Return milliseconds for an axis in local time of this machine, not of the browser."""
    offset = datetime.datetime.fromtimestamp(seconds).astimezone().utcoffset()
    return round((seconds + (offset.total_seconds() if offset else 0.0)) * 1000, 3)


def figure(x: dict[str, Any], y: dict[str, Any], series: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    legend = {"type": "scroll", "top": 0, "textStyle": FAINT, "pageTextStyle": FAINT}
    own = {
        "animation": False,
        "useUTC": True,
        "grid": {"left": 8, "right": 16, "top": 36, "bottom": 8, "containLabel": True},
        "legend": legend,
        "tooltip": tooltip(),
        "xAxis": {"axisLabel": {**FAINT, "hideOverlap": True}, **x},
        "yAxis": {"axisLabel": FAINT, "splitLine": LINES, **y},
        "series": series,
    }
    return own | more


def memory_figure(x: dict[str, Any], series: list[dict[str, Any]], **y: Any) -> dict[str, Any]:
    label = {**FAINT, ":formatter": "value => value + ' GiB'", "showMaxLabel": not y}
    shown = tooltip(trigger="axis", **{":valueFormatter": "value => value == null ? '' : value.toFixed(2) + ' GiB'"})
    return figure(x, {"type": "value", "min": 0, "axisLabel": label, **y}, series, tooltip=shown)


def memory_line(name: str, data: list[Any], colour: dict[str, str], area: bool = False, **more: Any) -> dict[str, Any]:
    line = {"name": name, "type": "line", "data": data, "showSymbol": False, "step": "end", **colour}
    return line | ({"areaStyle": {"opacity": 0.25}} if area else {}) | more
