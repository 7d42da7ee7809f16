"""Why a run of a job ended, by the evidence that the local manager goes by, and what the job asks Slurm for next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ullage.errors import UllageError
from ullage.hardware import gpu as find_gpu
from ullage.manager.core.ends import AttemptEnd, classify
from ullage.manager.placement.recovery import Failure, RecoveryRules, after_failure
from ullage.manager.slurm.commands import Gres, SlurmJob, SlurmNode, read_comment
from ullage.manager.slurm.runs import RunRecord
from ullage.manager.storage.records import Cause
from ullage.units import GIB

# By Slurm's states of jobs that are over: what an exit record says of such an end.
_RECORDS: dict[str, dict[str, Any]] = {
    "COMPLETED": {"code": 0},
    "FAILED": {},
    "OUT_OF_MEMORY": {"cgroup_kills": 1},
    "CANCELLED": {"reason": "cancelled"},
    "TIMEOUT": {"reason": "time-limit"},
    "DEADLINE": {"reason": "time-limit"},
}
ENDS = frozenset(_RECORDS)
_SYSTEM = frozenset({Cause.GPU_LOST, Cause.MPS_LOST})


class NextRun(NamedTuple):
    """What becomes of a job: what it asks for next (`None`: it is not started again), and the words for it."""

    gres: str | None
    text: str


def how_it_ended(job: SlurmJob, output: str) -> AttemptEnd:
    """The cause of a job's end from its state, its exit code and the end of what it printed."""
    record = {"code": job.exit_code or None, "signal": None, "reason": None} | _RECORDS[job.state]
    return classify(record, output)


def what_next(
    job: SlurmJob, ended: AttemptEnd, before: Sequence[RunRecord], nodes: Sequence[SlurmNode], rules: RecoveryRules
) -> NextRun:
    """Decide about a restart and its shards. `before` are earlier runs. A GPU to itself is all shards of the largest
    one: Slurm refuses to turn shards into a GPU."""
    if ended.cause is not Cause.GPU_MEMORY and ended.cause not in _SYSTEM:
        return NextRun(None, ended.detail)
    if not job.requeue:
        return NextRun(None, f"{ended.detail}; it asked never to be started twice (--no-requeue)")
    shards = next((gres for gres in job.requested if gres.name == "shard"), None)
    able = [node.shards_per_gpu for node in nodes if shards is not None and shards.type in (None, node.gpu_type)]
    largest = max(able, default=0)
    if ended.cause is Cause.GPU_MEMORY and (shards is None or not largest):
        return NextRun(None, f"{ended.detail}; it had GPUs to itself, so no more room can be given")
    shard = shard_size(job, nodes)
    alike = _SYSTEM if ended.cause in _SYSTEM else {Cause.GPU_MEMORY}
    failures = sum(run.cause in alike for run in before)
    if shards is None or ended.cause in _SYSTEM:
        decision = after_failure(Failure("system", failures), largest * shard, rules)
        return NextRun(gres_text(job.requested) if decision.again else None, f"{ended.cause}: {decision.text}")
    alone = shards.count >= largest
    failure = Failure("memory", failures, shards.count * shard, needed=ended.needed, exclusive=alone, alone=alone)
    decision = after_failure(failure, largest * shard, rules)
    if not decision.again:
        return NextRun(None, f"{ended.detail}; {decision.text}")
    count = largest if decision.exclusive else min(largest, max(shards.count + 1, -(-(decision.promise or 0) // shard)))
    return NextRun(gres_text([replace(shards, count=count)]), f"{decision.text}: {count} of {largest} shards")


def shard_size(job: SlurmJob, nodes: Sequence[SlurmNode]) -> int:
    """Bytes of a shard: all shards of a GPU are all of its memory, if the comment says which GPU; else 1 GiB."""
    values = read_comment(job.comment) or {}
    per_gpu = max((node.shards_per_gpu for node in nodes), default=0)
    try:
        return find_gpu(str(values["gpu"])).usable // per_gpu if per_gpu else GIB
    except (KeyError, UllageError):
        return GIB


def gres_text(requested: Sequence[Gres]) -> str:
    """As sbatch and scontrol take it.

    >>> gres_text([Gres("shard", "a100", 12)])
    'shard:a100:12'
    """
    return ",".join(":".join(filter(None, (gres.name, gres.type, str(gres.count)))) for gres in requested)
