"""Metrics for Prometheus, from the answer to the order `figures`. Unknown values are left out, never 0."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ullage.manager.storage.records import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("gpu", "index", "name")
_ACTIVITY = ("gract", "smact", "smocc", "drama")


def metrics(figures: dict[str, Any]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(figures))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        about, gpus, oldest = self._figures["about"], self._figures["gpus"], self._figures["oldest_waiting"]
        names = ("version", "policy", "sharing", "estimator")
        yield InfoMetricFamily("ullage", "the daemon", {name: str(about[name]) for name in names})
        yield _one("start_time_seconds", "when the daemon started, since 1970", about["since"])
        yield _one("estimates_pending", "estimates that are being made or wait", about["estimates_pending"])
        yield _one("disk_full", "1 while nothing can be written", about["disk_full"])
        if oldest is not None:
            yield _one("oldest_waiting_seconds", "how long the longest-waiting job has waited", oldest)
        states = {(state.value,): about["jobs"].get(state.value, 0) for state in State}
        yield _several("jobs", "jobs by state, those that are over too", ("state",), states)
        attempts = CounterMetricFamily("ullage_attempts", "attempts that are over, by why they ended", labels=["cause"])
        for cause, number in sorted(self._figures["attempts"].items()):
            attempts.add_metric([cause], number)
        yield attempts
        yield CounterMetricFamily("ullage_events", "events since the database was made", value=about["last_event"])
        for name, (text, value) in _HOST.items():
            if about.get("host") is not None:
                yield _one(f"host_{name}", text, about["host"][value])
        for name, (text, value) in _GPUS.items():
            yield _several(f"gpu_{name}", text, _LABELS, {_labels(gpu): gpu[value] for gpu in gpus})
        yield _several(
            "gpu_jobs", "jobs that hold a promise", _LABELS, {_labels(gpu): len(gpu["jobs"]) for gpu in gpus}
        )
        activity = {(*_labels(gpu), kind): gpu["activity"].get(kind) for gpu in gpus for kind in _ACTIVITY}
        yield _several("gpu_activity_ratio", "mean over the window", (*_LABELS, "kind"), activity)


# By the names of metrics: their help texts, and their keys in the daemon's answers.
_HOST = {
    "cores_total": ("processor cores that jobs may have together", "cores"),
    "cores_free": ("processor cores that can still be promised", "free_cores"),
    "memory_total_bytes": ("host memory that jobs may have together", "memory"),
    "memory_free_bytes": ("host memory that can still be promised", "free_memory"),
}
_GPUS = {
    "memory_total_bytes": ("memory that jobs can use", "total"),
    "memory_used_bytes": ("memory in use by all processes", "used"),
    "memory_promised_bytes": ("memory promised to jobs", "promised"),
    "memory_free_bytes": ("memory that can still be promised", "free"),
    "drained": ("1: gets no new jobs", "drained"),
    "lost": ("1: does not answer", "lost"),
    "power_watts": ("power that it draws", "power_w"),
}


def _labels(gpu: dict[str, Any]) -> tuple[str, ...]:
    return str(gpu["id"]), str(gpu["index"]), str(gpu["name"])


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ullage_{name}", text, value=float(value))


def _several(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float | None]) -> Metric:
    metric = GaugeMetricFamily(f"ullage_{name}", text, labels=labels)
    for key, value in values.items():
        if value is not None:
            metric.add_metric(key, float(value))
    return metric
