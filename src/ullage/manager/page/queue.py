"""The page of the queue: waiting, running and finished jobs in a grid, which users can sort and filter."""

import json
from typing import Any

from nicegui import ui

from ullage.errors import UllageError
from ullage.manager.job_words import reference, why
from ullage.manager.page.elements import box, preload, toggle, words
from ullage.manager.page.frame import Frame
from ullage.manager.page.readings import FIRST_ROWS, DaemonReading
from ullage.manager.page.sessions import Session

GROUPS = ("all", "waiting", "running", "recovering", "over")
_CLOCK = 5.0  # seconds between two updates of the shown times

# JavaScript for the grid: these texts are ours, and values reach the page only as text.
_GIB = "p => p.value == null ? '' : (p.value / 2 ** 30).toFixed(1) + ' GiB'"
_LINK = (
    "p => { const a = document.createElement('a'); a.href = '/job/' + Number(p.data.id); "
    "a.textContent = p.value; return a; }"
)
_STATE = (
    "p => { const s = document.createElement('span'); s.className = 'state ' + p.data.group + ' ' + p.data.state; "
    "s.textContent = p.value; return s; }"
)
_OPEN = "e => { if (e.event.key === 'Enter') location.assign('/job/' + Number(e.data.id)); }"
_READY = (
    "e => { document.querySelector('.grid [role=treegrid], .grid [role=grid]')?.setAttribute('aria-label', 'Jobs'); "
    "emitEvent('job_grid_ready'); }"
)
_ASK = "if (document.querySelector('.grid .ag-row, .grid .ag-overlay')) emitEvent('job_grid_ready');"  # it may be lost
_IN_ORDER = (  # the order of the queue, unless the user sorts by a column
    "p => { const place = row => window.jobOrder?.get(row.id) ?? Infinity; "
    "if (!p.api.getColumnState().some(column => column.sort)) "
    "p.nodes.sort((a, b) => place(a) < place(b) ? -1 : place(a) > place(b) ? 1 : 0); }"
)
_NARROW = (  # the columns that fit on a phone
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
    memory = {":valueFormatter": _GIB, "type": "rightAligned"}
    by_number = {":cellRenderer": _LINK, ":comparator": "(a, b, x, y) => x.data.id - y.data.id"}
    span = {"colId": "time", ":valueGetter": _SPAN, ":valueFormatter": _TIME, "type": "rightAligned"}
    whole = {"flex": 1, "minWidth": 150, "wrapText": True, "autoHeight": True}

    def column(name: str, field: str, width: int, **more: Any) -> dict[str, Any]:
        return {"headerName": name, "field": field, "width": width, **more}

    return [
        column("Job", "job", 105, **by_number),
        column("Name", "name", 190, tooltipField="name", **text),
        column("State", "state", 130, **{":cellRenderer": _STATE}, **text),
        column("User", "user", 110, **text),
        column("GPU", "where", 80),
        column("Promise", "promise", 105, **memory),
        column("Used", "used", 105, **memory),
        {"headerName": "Time", "width": 115, **span},
        {"headerName": "Why", "field": "why", ":cellClass": "p => p.data.over ? 'why over' : 'why'", **whole},
    ]


async def show_queue(session: Session) -> None:
    frame = Frame(session, "Queue")
    preload("nicegui-aggrid")
    last: list[DaemonReading] = []
    with frame.main:
        summary = words("p", "", "summary")
        with box("div", "tools"):
            group = toggle("Which jobs", GROUPS, "all")
            search = ui.input("Search all columns").props("outlined dense clearable").classes("search")
        grid = JobGrid()

    async def refresh(reading: DaemonReading) -> None:
        last[:] = [reading]
        try:
            over = group.value in ("all", "over") and reading.first is None
            finished = await session.readings.finished() if over else []
        except UllageError:
            finished = []  # the next reading reports the problem
        grid.show([row for row in rows_of(reading, finished) if group.value in ("all", row["group"])])
        more = reading.all_rows - len(reading.rows) if reading.first is None else 0
        counts = ", ".join(f"{number:,} {state}" for state, number in reading.states.items()) or "no jobs wait or run"
        summary.set_text(counts + (f"; {more:,} more rows are not shown" if more > 0 else ""))

    async def choose() -> None:
        if last:
            await refresh(last[0])

    group.on_value_change(choose)
    search.on_value_change(lambda: grid.find(search.value or ""))
    ui.timer(_CLOCK, grid.tell_time)
    await frame.from_the_first(refresh)


class JobGrid:
    """The jobs in an AG Grid; only changes are sent to it."""

    def __init__(self) -> None:
        self._place = box("div", "grid")
        self._grid: ui.aggrid | None = None
        self._ready, self._wanted = False, ""
        self._rows: list[dict[str, Any]] = []
        self._shown: dict[str, dict[str, Any]] = {}
        ui.on("job_grid_ready", self._is_ready)

    def show(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        by_key = {row["key"]: row for row in rows}
        if self._grid is None:
            self._shown = dict(list(by_key.items())[:FIRST_ROWS])
            with self._place:
                self._grid = _grid(list(self._shown.values()))
        elif self._ready:
            change = {
                "add": [row for key, row in by_key.items() if key not in self._shown],
                "update": [row for key, row in by_key.items() if key in self._shown and row != self._shown[key]],
                "remove": [row for key, row in self._shown.items() if key not in by_key],
            }
            by_itself = [key for key in self._shown if key in by_key] + [row["key"] for row in change["add"]]
            if moved := by_itself != list(by_key):
                self._grid.client.run_javascript(
                    f"jobOrder = new Map({json.dumps(list(by_key))}.map((key, i) => [key, i]))"
                )
            if any(change.values()):
                self._grid.run_grid_method("applyTransaction", change)
            elif moved:
                self._grid.run_grid_method("refreshClientSideRowModel", "sort")
            self._shown = by_key
        else:
            self._grid.client.run_javascript(_ASK)

    def find(self, text: str) -> None:
        self._wanted = text
        if self._grid is not None and self._ready:
            self._grid.run_grid_method("setGridOption", "quickFilterText", text)

    def tell_time(self) -> None:
        if self._grid is not None and self._ready:
            self._grid.run_grid_method("refreshCells", {"columns": ["time"], "force": True})

    def _is_ready(self) -> None:
        self._ready = True
        self.find(self._wanted)
        self.show(self._rows)


def _grid(rows: list[dict[str, Any]]) -> ui.aggrid:
    options = {
        "columnDefs": _columns(),
        "rowData": rows,
        "defaultColDef": {"sortable": True, "resizable": True},
        "enableBrowserTooltips": True,
        "enableCellTextSelection": True,
        "suppressFieldDotNotation": True,
        "rowHeight": 38,
        "animateRows": False,
        "overlayNoRowsTemplate": "No jobs",
        ":getRowId": "p => p.data.key",
        ":onCellKeyDown": _OPEN,
        ":onGridReady": _READY,
        ":onGridSizeChanged": _NARROW,
        ":postSortRows": _IN_ORDER,
    }
    return ui.aggrid(options, auto_size_columns=False)


def rows_of(reading: DaemonReading, finished: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the grid: the queue, then finished jobs."""
    return [_row(job, reading.places) for job in (*reading.rows[: reading.first], *finished)]


def _row(job: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    places = [names.get(place, place) for place in job["gpus_used"]]
    live, over = job["alone"] is not None, job["ended"] is not None
    several = job.get("jobs", 1)
    return {
        **{name: job[name] for name in ("id", "name", "user", "used")},
        "key": str(job["id"]),
        "job": reference(job),
        "state": job["state"] if several == 1 else f"{several:,} {job['state']}",
        "group": "over" if over else "running" if live else "recovering" if job["recovery"] else "waiting",
        "where": ", ".join(places),
        "promise": job["promise"] if job["gpus"] else None,
        "since": None if over else job["started"] if live else job["submitted"],
        "span": job["ran"] if over else None,
        "over": job["over_promise"],
        "why": why(job | {"places": places}),
    }
