"""A dashboard for Grafana that shows what `/metrics` has, as the file that Grafana imports."""

from __future__ import annotations

from typing import Any

_WIDTH, _HEIGHT = 24, 8  # of a row, and of a panel, in Grafana's units
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_BY_GPU = "GPU {{index}}"
_USED, _TOTAL = "ullage_gpu_memory_used_bytes", "ullage_gpu_memory_total_bytes"

# Rows of panels: title, unit, kind of panel, and by query what its lines are called.
_ROWS: tuple[tuple[tuple[str, str, str, dict[str, str]], ...], ...] = (
    (
        ("Jobs that run", "none", "stat", {'ullage_jobs{state="running"}': "running"}),
        ("Jobs that wait", "none", "stat", {'ullage_jobs{state="queued"}': "queued"}),
        ("Longest waiting", "s", "stat", {"ullage_oldest_waiting_seconds": "waits"}),
        ("Memory in use", "percentunit", "stat", {f"sum({_USED}) / sum({_TOTAL})": "used"}),
        ("GPUs lost", "none", "alarm", {"sum(ullage_gpu_lost)": "lost"}),
        ("Disk full", "none", "alarm", {"ullage_disk_full": "full"}),
    ),
    (
        ("Memory used of each GPU", "percentunit", "lines", {f"{_USED} / {_TOTAL}": _BY_GPU}),
        (
            "Memory of all GPUs",
            "bytes",
            "lines",
            {
                f"sum({_TOTAL})": "total",
                "sum(ullage_gpu_memory_promised_bytes)": "promised",
                f"sum({_USED})": "used",
                "sum(ullage_gpu_memory_free_bytes)": "can still be promised",
            },
        ),
    ),
    (
        ("SMACT", "percentunit", "lines", {'ullage_gpu_activity_ratio{kind="smact"}': _BY_GPU}),
        ("DRAMA", "percentunit", "lines", {'ullage_gpu_activity_ratio{kind="drama"}': _BY_GPU}),
        ("Power", "watt", "lines", {"ullage_gpu_power_watts": _BY_GPU}),
    ),
    (
        ("Jobs on each GPU", "none", "lines", {"ullage_gpu_jobs": _BY_GPU}),
        ("Jobs by state", "none", "stack", {'ullage_jobs{state!~"done|failed|cancelled"}': "{{state}}"}),
        ("Drained GPUs", "none", "lines", {"ullage_gpu_drained": _BY_GPU}),
    ),
    (
        (
            "Attempts that ended, by cause, in an hour",
            "none",
            "stack",
            {"increase(ullage_attempts_total[1h])": "{{cause}}"},
        ),
        ("Events in a second", "none", "lines", {"rate(ullage_events_total[5m])": "events"}),
        ("Estimates that are made or wait", "none", "lines", {"ullage_estimates_pending": "estimates"}),
    ),
    (
        ("Cores", "none", "lines", {"ullage_host_cores_total": "total", "ullage_host_cores_free": "free"}),
        (
            "Host memory",
            "bytes",
            "lines",
            {"ullage_host_memory_total_bytes": "total", "ullage_host_memory_free_bytes": "free"},
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard; Grafana asks for the Prometheus that it is to read.

    >>> dashboard()["title"], len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    ('Ullage', True)
    """
    panels: list[dict[str, Any]] = []
    for row, content in enumerate(_ROWS):
        width = _WIDTH // len(content)
        for column, (title, unit, kind, queries) in enumerate(content):
            place = {"x": column * width, "y": row * _HEIGHT, "w": width, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "title": title, "gridPos": place} | _panel(unit, kind, queries))
    return {
        "uid": "ullage",
        "title": "Ullage",
        "tags": ["ullage", "gpu"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "editable": True,
        "panels": panels,
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            ]
        },
    }


def _panel(unit: str, kind: str, queries: dict[str, str]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": name}
        for number, (query, name) in enumerate(queries.items())
    ]
    bad = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
    colours: dict[str, Any] = {"thresholds": {"mode": "absolute", "steps": bad if kind == "alarm" else bad[:1]}}
    drawn = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if kind == "stack" else {"fillOpacity": 5}
    limits = {"min": 0, "max": 1} if unit == "percentunit" else {"min": 0}
    custom = {"custom": {"lineWidth": 1, "showPoints": "never", **drawn}} if kind in ("lines", "stack") else {}
    return {
        "type": "timeseries" if custom else "stat",
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, **limits, **colours, **custom}, "overrides": []},
    }
