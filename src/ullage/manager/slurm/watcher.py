"""Restarts Slurm jobs that ran out of GPU memory: holds them, gives them more shards, and releases them, once per end.

Each decision is on disk before it is carried out. After a crash of the watcher or the controller, Slurm's present state
shows the next step.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ullage.errors import SlurmFailed, UllageError
from ullage.hardware import gpu as find_gpu
from ullage.manager.core.ends import AttemptEnd, classify
from ullage.manager.fault_injection import crash_point
from ullage.manager.placement.recovery import Failure, RecoveryRules, after_failure
from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import Gres, SlurmJob, SlurmNode, read_comment, write_comment
from ullage.manager.slurm.outputs import forget_kept, marks_of, read_streams, text_of
from ullage.manager.slurm.runs import DECIDED, HELD, LET_GO, LOST, OVER, RELEASED, UPDATED, RunRecord, RunStore
from ullage.manager.storage.records import Cause
from ullage.units import GIB

# A node refuses a job that starts in the second in which its last run ended ("already killed, do not launch"), and
# Slurm counts that as a failed run.
_SOON = "now+2seconds"
_SETTLED = 15.0  # seconds after which slurmctld has stored a change


@dataclass(frozen=True)
class WatchTerms:
    """The jobs to watch, and the rules. `every_job`: also jobs that requested shards without Ullage."""

    rules: RecoveryRules = RecoveryRules()
    everybody: bool = True
    every_job: bool = False
    spool: Path | None = None


class Watcher:
    """Checks Slurm's jobs, once or at an interval."""

    def __init__(self, store: RunStore, terms: WatchTerms, say: Callable[[str], None] = print) -> None:
        self._store, self._terms, self._say = store, terms, say

    def run(self, interval: float, ending: threading.Event) -> None:
        """Check jobs every `interval` seconds until `ending` is set, even if the controller does not answer."""
        trouble = None
        while not ending.is_set():
            try:
                self.look()
                trouble = None
            except SlurmFailed as error:
                if str(error) != trouble:
                    trouble = str(error)
                    self._say(trouble)
            ending.wait(interval)

    def look(self) -> None:
        jobs = [job for job in commands.jobs(everybody=self._terms.everybody) if self._is_ours(job)]
        nodes: list[SlurmNode] = []
        decided = set()
        failed: SlurmFailed | None = None
        for job in jobs:
            known = self._store.of(job.id)
            last = known[-1] if known else None
            try:
                if job.state in ENDS:
                    if last is None or (last.started, last.restarts) != (job.started, job.restarts):
                        nodes = nodes or commands.nodes()
                        last = self._decide(job, known, nodes)
                    decided.add(job.id)
                    if last.again:
                        self._start_again(job, last)
                elif last is not None and last.again and last.step not in (RELEASED, LOST):
                    self._go_on(job, last)
            except SlurmFailed as error:  # go on with the others; the next check tries again
                failed = error
        if self._terms.spool is not None:  # at each check, since an epilog may be late
            forget_kept(self._terms.spool, decided)
        self._give_up({job.id for job in jobs})
        if failed is not None:
            raise failed

    def _is_ours(self, job: SlurmJob) -> bool:
        return read_comment(job.comment) is not None or self._terms.every_job and job.shards is not None

    def _decide(self, job: SlurmJob, known: Sequence[RunRecord], nodes: Sequence[SlurmNode]) -> RunRecord:
        before = [run for run in known if run.restarts < job.restarts and (run.user, run.name) == (job.user, job.name)]
        streams = read_streams(job, self._terms.spool)
        ended = how_it_ended(job, text_of(streams, before[-1].streams if before else None, job.started))
        following = what_next(job, ended, before, nodes, self._terms.rules)
        crash_point("slurm-before-decision")
        now = time.time()
        run = RunRecord(
            job=job.id,
            started=job.started,
            restarts=job.restarts,
            user=job.user,
            name=job.name,
            ended=job.ended,
            nodes=job.nodes,
            gres=gres_text(job.requested),
            exit_code=job.exit_code,
            cause=ended.cause,
            detail=ended.detail,
            next_gres=following.gres,
            next_text=following.text,
            streams=marks_of(streams),
            step=DECIDED if following.gres else OVER,
            decided=now,
            changed=now,
        )
        self._store.add(run)
        crash_point("slurm-decided")
        if run.again or ended.cause != "finished":
            self._say(f"job {job.id} of {job.user}: {ended.cause}; {following.text}")
        return run

    def _start_again(self, job: SlurmJob, run: RunRecord) -> None:
        commands.run("scontrol", "requeuehold", str(job.id))
        crash_point("slurm-requeued")
        run = self._store.step(run, HELD)
        crash_point("slurm-held")
        for now in commands.jobs([job.id]):
            self._go_on(now, run)

    def _go_on(self, job: SlurmJob, run: RunRecord) -> None:
        """Continue a decided restart: give the job more shards if it is held, or note that it was released."""
        if job.restarts <= run.restarts or job.state not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"):
            return  # not held yet
        if job.state == "PENDING" and job.restarts == run.restarts + 1 and job.reason.startswith("JobHeld"):
            self._update(job, run)
            crash_point("slurm-more")
            run = self._store.step(run, UPDATED)
            crash_point("slurm-updated")
            commands.run("scontrol", "release", str(job.id))
            crash_point("slurm-let-go")
            self._store.step(run, LET_GO)
            crash_point("slurm-noted")
        elif time.time() - run.changed > _SETTLED:
            self._store.step(run, RELEASED)

    def _update(self, job: SlurmJob, run: RunRecord) -> None:
        values = (read_comment(job.comment) or {}) | {"attempt": run.restarts + 2, "before": run.cause}
        count = re.search(r"shard:(?:\w+:)?(\d+)", run.next_gres or "")
        values |= {"shards": int(count[1])} if count else {}
        words = [f"Gres={run.next_gres}"] if run.next_gres != gres_text(job.requested) else []
        comment = [f"Comment={write_comment(values, job.comment)}"] if read_comment(job.comment) is not None else []
        commands.run("scontrol", "update", f"JobId={job.id}", *words, f"StartTime={_SOON}", *comment)

    def _give_up(self, known: set[int]) -> None:
        """Mark runs as lost whose jobs Slurm has forgotten, since it cannot start them again."""
        for run in self._store.unfinished():
            if run.job not in known:
                self._store.step(run, LOST, "Slurm forgot it before it was started again (MinJobAge in slurm.conf)")
                self._say(f"job {run.job} of {run.user}: Slurm forgot it before it was started again")


# By Slurm's states of finished jobs: the fields of the exit record for such an end.
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
    """The decision about a job: its next request (`None`: it is not started again), and the decision in words."""

    gres: str | None
    text: str


def how_it_ended(job: SlurmJob, output: str) -> AttemptEnd:
    """Return the cause of a job's end, from its state, its exit code and the end of its output."""
    record = {"code": job.exit_code or None, "signal": None, "reason": None} | _RECORDS[job.state]
    return classify(record, output)


def what_next(
    job: SlurmJob, ended: AttemptEnd, before: Sequence[RunRecord], nodes: Sequence[SlurmNode], rules: RecoveryRules
) -> NextRun:
    """Decide about a restart and its shards. `before` are earlier runs. An exclusive GPU means all shards of the
    largest one, since Slurm refuses to turn shards into a GPU."""
    if ended.cause is not Cause.GPU_MEMORY and ended.cause not in _SYSTEM:
        return NextRun(None, ended.detail)
    if not job.requeue:
        return NextRun(None, f"{ended.detail}; it has --no-requeue")
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
    """Return the bytes of a shard: the GPU's memory divided by its shards if the comment names the GPU, else 1 GiB."""
    values = read_comment(job.comment) or {}
    per_gpu = max((node.shards_per_gpu for node in nodes), default=0)
    try:
        return find_gpu(str(values["gpu"])).usable // per_gpu if per_gpu else GIB
    except (KeyError, UllageError):
        return GIB


def gres_text(requested: Sequence[Gres]) -> str:
    """Return resources as sbatch and scontrol accept them.

    >>> gres_text([Gres("shard", "a100", 12)])
    'shard:a100:12'
    """
    return ",".join(":".join(filter(None, (gres.name, gres.type, str(gres.count)))) for gres in requested)
