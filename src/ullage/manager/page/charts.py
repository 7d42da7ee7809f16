"""What the charts of the pages have in common.

Options whose names begin with a colon are JavaScript of our own (static/charts.js). Words of users are values of other
options, and never names.
"""

from __future__ import annotations

import datetime
from typing import Any

from nicegui import ui

FAINT = {":color": "ullage.css('--faint')"}
LINES = {"show": True, "lineStyle": {":color": "ullage.css('--line')"}}


def use_charts() -> None:
    """Let the browser load what charts need; before the first one."""
    ui.add_head_html('<script src="/_page/charts.js"></script>')


def tooltip(**more: Any) -> dict[str, Any]:
    """The options of a tooltip. By default it has the lines of text that are the `about` of a point."""
    colours = {":backgroundColor": "ullage.css('--sheet')", ":borderColor": "ullage.css('--line')"}
    text = {"textStyle": {":color": "ullage.css('--ink')"}}
    return {"trigger": "item", "confine": True, **colours, **text, **(more or {":formatter": "ullage.about"})}


def on_axis(seconds: float) -> float:
    """Seconds since 1970 as milliseconds of an axis, which shows the time of this machine and not of the browser's."""
    offset = datetime.datetime.fromtimestamp(seconds).astimezone().utcoffset()
    return round((seconds + (offset.total_seconds() if offset else 0.0)) * 1000, 3)
