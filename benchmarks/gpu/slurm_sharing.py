"""Whole GPUs against shards, on a real Slurm: the makespan and the waiting time of a published trace.

python benchmarks/gpu/slurm_sharing.py examples/carma/philly_heavy-60-tasks.sh [--scale 120] [--only shards-mps]

Starts a Slurm of its own with one node of four A100-40GB, as the authors had. Time goes `--scale` times as fast. Slurm
places the jobs. The jobs only wait: how far each is, is reckoned here from who shares its GPU, with the model of
`ullage share`. Needs Slurm (`make test-slurm` installs it) and takes minutes for each way.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.manager.slurm.private_slurm import PrivateSlurm

from ullage.hardware import gpu as find_gpu
from ullage.manager.simulation.reading import read_trace
from ullage.manager.simulation.trace import TraceJob
from ullage.manager.slurm import commands
from ullage.manager.slurm.sbatch_options import GpuRequest
from ullage.manager.slurm.site import GpuKind, Site
from ullage.manager.slurm.sizing import GpuNeed, size
from ullage.performance.sharing import share_of
from ullage.units import GIB

CARD = find_gpu("A100-40GB")
KIND = GpuKind("a100", CARD, CARD.usable // GIB, 4)
LOOK = 0.2  # seconds between two looks at the queue
WAYS = {"whole": None, "shards-timeslice": "time-slicing", "shards-mps": "mps"}
JOB = "#!/bin/sh\nwhile [ ! -e {folder}/done-$SLURM_JOB_NAME ]; do sleep 0.2; done\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--scale", type=float, default=120.0)
    parser.add_argument("--only", choices=WAYS)
    options = parser.parse_args()
    jobs = read_trace(Path(options.trace)).jobs
    for way in [options.only] if options.only else WAYS:
        with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
            cluster = PrivateSlurm(
                Path(folder),
                nodes=1,
                gpus=4,
                shards_per_gpu=KIND.shards,
                gpu_type="a100",
                more="SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
            )
            with cluster:
                os.environ.update(cluster.environment)
                run(way, jobs, options.scale, Path(folder))


def asked_for(job: TraceJob, how: str | None) -> str:
    """What a job asks Slurm for."""
    upper = job.kind.estimates["ullage"]
    if how is None:
        return f"gpu:{job.gpus}"
    need = GpuNeed(KIND, None if upper is None else min(upper, CARD.usable), job.kind.alone[CARD.name])
    return size([need], GpuRequest(per_node=job.gpus), Site((KIND,), how)).gres


def run(way: str, jobs: tuple[TraceJob, ...], scale: float, folder: Path) -> None:
    script = folder / "job.sh"
    script.write_text(JOB.format(folder=folder))
    left = {str(job.id): job.work_s for job in jobs}
    known = {str(job.id): job for job in jobs}
    waiting = sorted(jobs, key=lambda job: job.arrival)
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    shards, busy_s = 0, 0.0
    overfull: dict[str, float] = defaultdict(float)  # seconds in which a GPU had more in use than it has, by its jobs
    start = before = time.monotonic()
    while len(ended) < len(jobs):
        now = time.monotonic()
        clock, passed, before = (now - start) * scale, (now - before) * scale, now
        while waiting and waiting[0].arrival <= clock:
            job = waiting.pop(0)
            gres = asked_for(job, WAYS[way])
            shards += gres.startswith("shard")
            words = [f"--gres={gres}", f"--job-name={job.id}", "--output=/dev/null"]
            commands.submit([*words, str(script)])
        on_gpu: dict[int, list[str]] = defaultdict(list)
        for slurm_job in commands.jobs():
            if slurm_job.state == "RUNNING" and slurm_job.name not in ended:
                begun.setdefault(slurm_job.name, clock)
                for index in indices(slurm_job.allocated[0]):
                    on_gpu[index].append(slurm_job.name)
        speeds: dict[str, float] = defaultdict(lambda: 1.0)
        for names in on_gpu.values():
            busy_s += passed
            if sum(known[name].kind.memory or 0 for name in names) > CARD.usable:
                overfull[" + ".join(sorted(known[name].kind.name for name in names))] += passed
            if len(names) > 1:
                together = share_of([known[name].kind.alone[CARD.name] for name in names], CARD, WAYS[way] or "mps")
                for name, each in zip(names, together.jobs, strict=True):
                    speeds[name] = min(speeds[name], each.speed)
        for name in {name for names in on_gpu.values() for name in names}:
            left[name] -= passed * speeds[name]
            if left[name] <= 0:
                ended[name] = clock
                (folder / f"done-{name}").touch()
        time.sleep(LOOK)
    waits = [begun[name] - known[name].arrival for name in ended]
    turns = [ended[name] - known[name].arrival for name in ended]
    print(
        f"{way}: makespan {max(ended.values()) / 3600:.2f} h, waiting mean {statistics.mean(waits) / 60:.1f} min, "
        f"median {statistics.median(waits) / 60:.1f} min, arrival to end mean {statistics.mean(turns) / 60:.1f} min; "
        f"{shards} of {len(jobs)} jobs asked for shards; more in use than a GPU has, by the authors' figures: "
        f"{sum(overfull.values()) / busy_s:.1%} of the time of GPUs with jobs",
        flush=True,
    )
    for names, seconds in sorted(overfull.items(), key=lambda each: -each[1]):
        print(f"  {seconds / 60:.0f} min: {names}", flush=True)


def indices(allocated: str) -> list[int]:
    """The GPUs of `gpu:a100:2(IDX:0-1)` or `shard:12(IDX:3)`."""
    numbers: list[int] = []
    for part in re.search(r"IDX:([\d,-]+)", allocated)[1].split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


if __name__ == "__main__":
    main()
