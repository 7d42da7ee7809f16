"""Figures for Prometheus, from what the order `figures` answers. What is not known is left out, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ullage.manager.storage.records import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GPU = ("gpu", "index", "name")
_ACTIVITY = ("gract", "smact", "smocc", "drama")


def metrics(figures: dict[str, Any]) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(figures))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        about = self._figures["about"]
        names = ("version", "policy", "sharing", "estimator")
        yield InfoMetricFamily("ullage", "the daemon", {name: str(about[name]) for name in names})
        yield _one("ullage_start_time_seconds", "when the daemon started, since 1970", about["since"])
        yield _one("ullage_estimates_pending", "estimates that are being made or wait", about["estimates_pending"])
        yield _one("ullage_disk_full", "1 while nothing can be written", float(about["disk_full"]))
        oldest = self._figures["oldest_waiting"]
        if oldest is not None:
            yield _one("ullage_oldest_waiting_seconds", "how long the longest-waiting job has waited", oldest)
        yield self._jobs(about["jobs"])
        yield self._attempts()
        events = CounterMetricFamily("ullage_events", "events since the database was made")
        events.add_metric([], about["last_event"])
        yield events
        yield from _of_host(about.get("host"))
        yield from _of_gpus(self._figures["gpus"])

    def _jobs(self, counts: dict[str, int]) -> Metric:
        jobs = GaugeMetricFamily("ullage_jobs", "jobs by state, those that are over too", labels=["state"])
        for state in State:
            jobs.add_metric([state.value], counts.get(state.value, 0))
        return jobs

    def _attempts(self) -> Metric:
        attempts = CounterMetricFamily("ullage_attempts", "attempts that are over, by why they ended", labels=["cause"])
        for cause, number in sorted(self._figures["attempts"].items()):
            attempts.add_metric([cause], number)
        return attempts


def _of_host(host: dict[str, int] | None) -> Iterator[Metric]:
    for field, name, text in (
        ("cores", "cores_total", "processor cores that jobs may have together"),
        ("free_cores", "cores_free", "processor cores that can still be promised"),
        ("memory", "memory_total_bytes", "host memory that jobs may have together"),
        ("free_memory", "memory_free_bytes", "host memory that can still be promised"),
    ):
        if host is not None:
            yield _one(f"ullage_host_{name}", text, host[field])


def _of_gpus(gpus: list[dict[str, Any]]) -> Iterator[Metric]:
    for field, name, text in (
        ("total", "memory_total_bytes", "memory that jobs can use"),
        ("used", "memory_used_bytes", "memory in use by all processes"),
        ("promised", "memory_promised_bytes", "memory promised to jobs"),
        ("free", "memory_free_bytes", "memory that can still be promised"),
        ("drained", "drained", "1: gets no new jobs"),
        ("lost", "lost", "1: does not answer"),
        ("power_w", "power_watts", "power that it draws"),
    ):
        metric = GaugeMetricFamily(f"ullage_gpu_{name}", text, labels=_GPU)
        for gpu in gpus:
            if gpu[field] is not None:
                metric.add_metric(_labels(gpu), float(gpu[field]))
        yield metric
    jobs = GaugeMetricFamily("ullage_gpu_jobs", "jobs that hold a promise", labels=_GPU)
    activity = GaugeMetricFamily("ullage_gpu_activity_ratio", "mean over the window", labels=(*_GPU, "kind"))
    for gpu in gpus:
        jobs.add_metric(_labels(gpu), len(gpu["jobs"]))
        for kind in _ACTIVITY:
            value = gpu["activity"].get(kind)
            if value is not None:
                activity.add_metric([*_labels(gpu), kind], value)
    yield jobs
    yield activity


def _labels(gpu: dict[str, Any]) -> list[str]:
    return [str(gpu["id"]), str(gpu["index"]), str(gpu["name"])]


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
