"""The page of the queue: jobs that wait, run, are tried again or are over, in a grid to sort and to filter."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from ullage.errors import UllageError
from ullage.job_words import reference, why
from ullage.page.elements import box, words
from ullage.page.frame import Frame
from ullage.page.readings import DaemonReading
from ullage.page.sessions import Session

GROUPS = ("all", "waiting", "running", "recovering", "over")
_CLOCK = 5.0  # seconds after which times are shown anew

# What the grid does in the browser: these texts are ours, and values reach the page as text only.
_GIB = "p => p.value == null ? '' : (p.value / 2 ** 30).toFixed(1) + ' GiB'"
_LINK = (
    "p => { const a = document.createElement('a'); a.href = '/job/' + Number(p.data.id); "
    "a.textContent = p.value; return a; }"
)
_STATE = (
    "p => { const s = document.createElement('span'); s.className = 'state ' + p.data.group; "
    "s.textContent = p.value; return s; }"
)
_OPEN = "e => { if (e.event.key === 'Enter') location.assign('/job/' + Number(e.data.id)); }"
_LABEL = "e => document.querySelector('.grid [role=treegrid], .grid [role=grid]')?.setAttribute('aria-label', 'Jobs')"
_NARROW = (  # on a phone: what there is room for
    "e => { const wide = e.clientWidth > 700; "
    "e.api.setColumnsVisible(['state', 'user', 'where', 'promise', 'used', 'time'], wide); "
    "e.api.applyColumnState({state: wide ? "
    "[{colId: 'job', width: 105}, {colId: 'name', width: 190}] : "
    "[{colId: 'job', width: 76}, {colId: 'name', width: 108}]}); }"
)
_SPAN = "p => p.data.since == null ? p.data.span : Date.now() / 1000 - p.data.since"
_TIME = (
    "p => { const s = Math.max(0, Math.round(p.value ?? 0)); "
    "const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60; "
    "return h ? h + ' h ' + m + ' min' : m ? m + ' min ' + (s % 60) + ' s' : s + ' s'; }"
)


def _columns() -> list[dict[str, Any]]:
    text = {"filter": "agTextColumnFilter", "floatingFilter": True}
    memory = {":valueFormatter": _GIB, "type": "rightAligned", "width": 105}
    return [
        {"headerName": "Job", "field": "job", ":cellRenderer": _LINK, "width": 105, ":comparator":
         "(a, b, x, y) => x.data.id - y.data.id"},
        {"headerName": "Name", "field": "name", "width": 190, "tooltipField": "name", **text},
        {"headerName": "State", "field": "state", "width": 130, ":cellRenderer": _STATE, **text},
        {"headerName": "User", "field": "user", "width": 110, **text},
        {"headerName": "GPU", "field": "where", "width": 80},
        {"headerName": "Promise", "field": "promise", **memory},
        {"headerName": "Used", "field": "used", **memory},
        {"headerName": "Time", "colId": "time", ":valueGetter": _SPAN, ":valueFormatter": _TIME, "width": 115,
         "type": "rightAligned"},
        {"headerName": "Why", "field": "why", "flex": 1, "minWidth": 150, "wrapText": True,
         "autoHeight": True, ":cellClass": "p => p.data.over ? 'why over' : 'why'"},
    ]  # fmt: skip


def show_queue(session: Session) -> None:
    """Build the page."""
    frame = Frame(session, "Queue", "/queue")
    shown: dict[str, dict[str, Any]] = {}
    last: list[DaemonReading] = []
    with frame.main:
        summary = words("p", "", "summary")
        with box("div", "tools"):
            group = ui.toggle(list(GROUPS), value="all").props('no-caps unelevated aria-label="Which jobs"')
            search = ui.input("Search all columns").props("outlined dense clearable").classes("search")
        grid = ui.aggrid({
            "columnDefs": _columns(), "rowData": [], ":getRowId": "p => p.data.key", ":onCellKeyDown": _OPEN,
            "defaultColDef": {"sortable": True, "resizable": True}, "enableBrowserTooltips": True,
            "enableCellTextSelection": True, "suppressFieldDotNotation": True, "rowHeight": 38,
            ":onGridReady": _LABEL, ":onGridSizeChanged": _NARROW,
        }, auto_size_columns=False).classes("grid")  # fmt: skip

    async def refresh(reading: DaemonReading) -> None:
        last[:] = [reading]
        try:
            finished = await session.readings.finished() if group.value in ("all", "over") else []
        except UllageError:
            finished = []  # the next reading says what is wrong
        rows = {row["key"]: row for row in rows_of(reading, finished) if group.value in ("all", row["group"])}
        change = {
            "add": [row for key, row in rows.items() if key not in shown],
            "update": [row for key, row in rows.items() if key in shown and row != shown[key]],
            "remove": [row for key, row in shown.items() if key not in rows],
        }
        if any(change.values()):
            grid.run_grid_method("applyTransaction", change)
            shown.clear()
            shown.update(rows)
        more = reading.all_rows - len(reading.rows)
        counts = ", ".join(f"{number:,} {state}" for state, number in reading.states.items()) or "no jobs wait or run"
        summary.set_text(counts + (f"; {more:,} more rows are not shown" if more > 0 else ""))

    async def choose() -> None:
        if last:
            await refresh(last[0])

    def find() -> None:
        grid.run_grid_method("setGridOption", "quickFilterText", search.value or "")

    group.on_value_change(choose)
    search.on_value_change(find)
    ui.timer(_CLOCK, lambda: grid.run_grid_method("refreshCells", {"columns": ["time"], "force": True}))
    frame.every_reading(refresh)


def rows_of(reading: DaemonReading, finished: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the grid: those of the queue, and then jobs that are over."""
    index = {gpu["id"]: gpu["index"] for gpu in reading.gpus}
    return [_row(job, index) for job in (*reading.rows, *finished)]


def _row(job: dict[str, Any], index: dict[str, int]) -> dict[str, Any]:
    places = [index.get(place, place) for place in job["gpus_used"]]
    live, over = job["alone"] is not None, job["ended"] is not None
    several = job.get("jobs", 1)
    return {
        "key": str(job["id"]), "id": job["id"], "job": reference(job), "name": job["name"], "user": job["user"],
        "state": job["state"] if several == 1 else f"{several:,} {job['state']}",
        "group": "over" if over else "running" if live else "recovering" if job["recovery"] else "waiting",
        "where": ", ".join(map(str, places)), "promise": job["promise"], "used": job["used"],
        "since": None if over else job["started"] if live else job["submitted"], "span": job["ran"] if over else None,
        "over": job["over_promise"], "why": why(job | {"places": places}),
    }  # fmt: skip
