"""The cluster as it is now: what Slurm promised on each GPU, and what is really taken there, job by job."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import SlurmJob, SlurmNode
from ullage.manager.slurm.node_reports import NodeReport, read_reports
from ullage.manager.slurm.recovery import shard_size
from ullage.units import MIB

TOLERANCE = 256 * MIB  # more than its promise that a job may take without a word
_ON_GPUS = re.compile(r"(?:^|,)(gpu|shard)(?::[^:,()]+)??:(\d+)\((?:IDX:)?([^)]*)\)")


def overview(folder: Path | None = None) -> dict[str, Any]:
    """Nodes, their GPUs and the jobs on them, ready for JSON; memory in bytes, unknown is `None`.

    `folder` is where nodes write what they see (`ullage slurm monitor`).
    """
    nodes = [node for node in commands.nodes() if node.gpus]
    jobs = [job for job in commands.jobs() if job.state in ("RUNNING", "COMPLETING", "SUSPENDED")]
    return combined(nodes, jobs, read_reports(folder) if folder is not None else {})


def combined(nodes: Sequence[SlurmNode], jobs: Iterable[SlurmJob], reports: Mapping[str, NodeReport]) -> dict[str, Any]:
    """The same from what Slurm and the nodes said."""
    running: dict[str, list[tuple[SlurmJob, str]]] = {}
    for job in jobs:
        for name, allocated in zip(_names(job.nodes), job.allocated, strict=False):
            running.setdefault(name, []).append((job, allocated))
    return {"nodes": [_node(node, running.get(node.name, []), reports.get(node.name), nodes) for node in nodes]}


@functools.lru_cache(4096)
def _names(nodes: str) -> list[str]:
    """The nodes of a job, each by its name: `n[1-2]` is n1 and n2."""
    return commands.run("scontrol", "show", "hostnames", nodes).split() if "[" in nodes else nodes.split(",")


def _node(
    node: SlurmNode, running: Sequence[tuple[SlurmJob, str]], report: NodeReport | None, nodes: Sequence[SlurmNode]
) -> dict[str, Any]:
    told = None if report is None or report.is_stale else report
    gpus = [_gpu(index, node, running, told, nodes) for index in range(node.gpus)]
    age = None if report is None else report.time
    return {"name": node.name, "state": node.state, "reported": age, "gpu_type": node.gpu_type, "gpus": gpus}


def _gpu(
    index: int, node: SlurmNode, running: Sequence[tuple[SlurmJob, str]], report: NodeReport | None,
    nodes: Sequence[SlurmNode],
) -> dict[str, Any]:  # fmt: skip
    seen = next((one for one in report.gpus if one.index == index), None) if report is not None else None
    jobs = []
    for job, allocated in running:
        shards = _promised(allocated, index, node.shards_per_gpu)
        if shards is None:
            continue
        use = report.jobs.get(job.id) if report is not None else None
        used = None if report is None else use.now.get(index, 0) if use is not None else 0
        peak = None if use is None else use.peak.get(index)
        promise = shards * shard_size(job, nodes) if node.shards_per_gpu else None
        over = used is not None and promise is not None and shards < node.shards_per_gpu and used > promise + TOLERANCE
        jobs.append({"job": job.id, "user": job.user, "name": job.name, "shards": shards, "promise": promise,
                     "used": used, "peak": peak, "over_promise": over})  # fmt: skip
    return {
        "index": index, "name": seen.name if seen else None, "shards": node.shards_per_gpu,
        "promised": sum(job["shards"] for job in jobs), "total": seen.total if seen else None,
        "used": seen.used if seen else None, "jobs": jobs,
    }  # fmt: skip


def _promised(allocated: str, index: int, shards_per_gpu: int) -> int | None:
    """How many shards of a GPU a job was given; a whole GPU is all of them; `None`: it is not there.

    >>> _promised("shard:fake:12(IDX:1)", 1, 40), _promised("shard:12(IDX:1)", 0, 40)
    (12, None)
    >>> _promised("gpu:fake:2(IDX:0-1)", 1, 40)
    40
    >>> _promised("shard:a100:15(10/40,5/40)", 1, 40)
    5
    """
    for name, count, places in _ON_GPUS.findall(allocated):
        if "/" in places:  # newer releases: how much of each GPU
            parts = [int(part.partition("/")[0]) for part in places.split(",")]
            if index < len(parts) and parts[index]:
                return parts[index]
        elif index in _numbers(places):
            return int(count) if name == "shard" else shards_per_gpu
    return None


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)


def unreported(found: dict[str, Any]) -> list[str]:
    """The nodes with GPUs of which nobody says what their jobs take."""
    return [
        node["name"] for node in found["nodes"] if node["gpus"] and all(gpu["total"] is None for gpu in node["gpus"])
    ]


def over_promised(found: dict[str, Any]) -> list[str]:
    """A sentence for each job that takes more than it was promised."""
    return [
        f"job {job['job']} of {job['user']} takes {job['used'] / MIB:.0f} MiB on GPU {gpu['index']} of {node['name']}; "
        f"{job['promise'] / MIB:.0f} MiB were promised ({job['shards']} shards)"
        for node in found["nodes"] for gpu in node["gpus"] for job in gpu["jobs"] if job["over_promise"]
    ]  # fmt: skip


def prometheus(found: dict[str, Any]) -> str:
    """The same figures as Prometheus reads them; what is not known is left out."""
    lines = []
    for name, text, values in (
        ("ullage_slurm_gpu_shards", "shards of a GPU", "shards"),
        ("ullage_slurm_gpu_promised_shards", "shards that jobs were given", "promised"),
        ("ullage_slurm_gpu_total_bytes", "memory of a GPU", "total"),
        ("ullage_slurm_gpu_used_bytes", "memory that is taken, by anybody", "used"),
    ):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(node=node['name'], gpu=gpu['index'])} {gpu[values]}"
                  for node in found["nodes"] for gpu in node["gpus"] if gpu[values] is not None]  # fmt: skip
    for name, text, values in (
        ("ullage_slurm_job_promised_bytes", "memory that a job was promised on a GPU", "promise"),
        ("ullage_slurm_job_used_bytes", "memory that a job takes on a GPU", "used"),
        ("ullage_slurm_job_over_promise", "1 if a job takes more than it was promised", "over_promise"),
    ):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [
            f"{name}{_labels(node=node['name'], gpu=gpu['index'], job=job['job'], user=job['user'])} {int(job[values])}"
            for node in found["nodes"] for gpu in node["gpus"] for job in gpu["jobs"] if job[values] is not None
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _labels(**labels: object) -> str:
    def quoted(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}"
