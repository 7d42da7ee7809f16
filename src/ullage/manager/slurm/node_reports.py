"""What jobs really take: a report that each node writes into a folder that all nodes share, and who reads them.

`ullage slurm monitor` writes `nodes/NODE.json` again and again: the GPUs of the node, and by job the bytes that it
holds on each of them now and held at most. A job keeps its line for a while after its end.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.errors import DeviceLost, InvalidValue
from ullage.manager.monitor.readings import Source

NODES = "nodes"  # the folder, in the one that all nodes share
STALE = 60.0  # seconds after which a report says nothing of now
_KEPT = 900.0  # seconds for which a job that is gone keeps its line
_OF_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.M)
_OF_ENVIRONMENT = re.compile(rb"(?:^|\0)SLURM_JOB_ID=(\d+)(?:\0|$)")


@dataclass
class JobUse:
    """What a job takes on the GPUs of a node, in bytes by index: now, and at most."""

    now: dict[int, int] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)
    seen: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """A GPU of a node; `used` is everybody's."""

    index: int
    name: str
    total: int | None
    used: int | None


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself."""

    node: str
    time: float
    gpus: tuple[GpuUse, ...]
    jobs: dict[int, JobUse]

    @property
    def is_stale(self) -> bool:
        """Whether it is too old to be about now."""
        return time.time() - self.time > STALE


def job_of(pid: int) -> int | None:
    """The job of Slurm's that a process belongs to: by its cgroup, or by its environment; `None`: to none."""
    try:
        found = _OF_CGROUP.search(Path(f"/proc/{pid}/cgroup").read_text())
        if found is None:
            inside = _OF_ENVIRONMENT.search(Path(f"/proc/{pid}/environ").read_bytes())
            return None if inside is None else int(inside[1])
    except OSError:
        return None
    return int(found[1])


class NodeMonitor:
    """Reads the GPUs of this node and writes its report."""

    def __init__(self, source: Source, node: str, folder: Path) -> None:
        self._source, self._node, self._folder = source, node, folder
        before = read_report(folder / NODES / f"{node}.json")
        self._jobs: dict[int, JobUse] = {} if before is None else before.jobs

    def run(self, interval: float, ending: threading.Event, say: Callable[[str], None] = print) -> None:
        """Write the report again and again until it is to end."""
        while not ending.is_set():
            try:
                self.write()
            except OSError as error:
                say(f"the report of {self._node} cannot be written: {error}")
            ending.wait(interval)

    def write(self) -> NodeReport:
        """Look once, and write the report in one go."""
        report = self.look()
        place = self._folder / NODES
        place.mkdir(parents=True, exist_ok=True, mode=0o755)
        new = place / f".{self._node}.{os.getpid()}"
        new.write_text(json.dumps(_plain(report)))
        new.replace(place / f"{self._node}.json")
        return report

    def look(self) -> NodeReport:
        """What is true now."""
        now, gpus = time.time(), []
        for use in self._jobs.values():
            use.now = {}
        for device in self._source.devices():
            try:
                used, held = self._source.read(device.id).memory_used, self._source.processes(device.id)
            except DeviceLost:
                used, held = None, None
            gpus.append(GpuUse(device.index, device.name, device.total, used))
            for pid, taken in (held or {}).items():
                job = job_of(pid)
                if job is None or taken is None:
                    continue
                use = self._jobs.setdefault(job, JobUse())
                use.now[device.index] = use.now.get(device.index, 0) + taken
                use.seen = now
        for use in self._jobs.values():
            for index, taken in use.now.items():
                use.peak[index] = max(use.peak.get(index, 0), taken)
        self._jobs = {job: use for job, use in self._jobs.items() if now - use.seen < _KEPT}
        return NodeReport(self._node, now, tuple(gpus), self._jobs)


def read_reports(folder: Path) -> dict[str, NodeReport]:
    """The reports of all nodes that wrote one, by node."""
    found = (read_report(file) for file in sorted((folder / NODES).glob("[!.]*.json")))
    return {report.node: report for report in found if report is not None}


def read_report(file: Path) -> NodeReport | None:
    """The report in a file; `None` if there is none that can be read."""
    try:
        told: dict[str, Any] = json.loads(file.read_bytes())
        jobs = {
            int(job): JobUse(_by_index(use["now"]), _by_index(use["peak"]), float(use["seen"]))
            for job, use in told["jobs"].items()
        }
        gpus = tuple(GpuUse(int(one["index"]), str(one["name"]), one["total"], one["used"]) for one in told["gpus"])
        return NodeReport(str(told["node"]), float(told["time"]), gpus, jobs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def peak_of(job: int, since: float, folder: Path) -> int | None:
    """The most bytes that a job was seen to hold on one GPU in a run that began then; `None` if nobody looked."""
    uses = [report.jobs[job] for report in read_reports(folder).values() if job in report.jobs]
    return max((peak for use in uses if use.seen >= since for peak in use.peak.values()), default=None)


def check_node(name: str) -> str:
    """The name of a node that can be that of a file."""
    if not re.fullmatch(r"[\w.-]{1,200}", name):
        raise InvalidValue(f"needed the name of this node, as Slurm calls it; found {name[:80]!r}")
    return name


def _by_index(told: dict[str, int]) -> dict[int, int]:
    return {int(index): int(taken) for index, taken in told.items()}


def _plain(report: NodeReport) -> dict[str, Any]:
    return {
        "node": report.node,
        "time": report.time,
        "gpus": [vars(one) for one in report.gpus],
        "jobs": {job: vars(use) for job, use in report.jobs.items()},
    }
