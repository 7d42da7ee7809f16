"""Many jobs of mixed sizes at once: no GPU is overbooked. A controller that is killed loses nothing."""

import collections
import random
import re
import signal
import time

import pytest

from ullage.manager.slurm import commands
from ullage.manager.slurm.submission import plan_words
from ullage.units import GIB

# What happens to a job is written down by the job itself. The lock says whether it is alive twice.
JOB = """#!/bin/sh
exec 9>>alive-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
flock -n 9 || echo twice >> log
echo start $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID >> log
while [ ! -e proceed ]; do sleep 0.1; done
sleep 0.$SLURM_ARRAY_TASK_ID
echo end $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID >> log
"""


def submit(sizes, each):
    """Arrays of jobs, each with as many shards as its size in GiB needs: their numbers."""
    arrays = []
    for size in sizes:
        plan = plan_words(["--gpus=1", "job.sh"], memory=size * GIB)
        assert plan.sizing.name == "shard"
        words = ["--gpus=1", f"--array=1-{each}", "--output=/dev/null", *plan.words, "job.sh"]
        arrays.append(commands.submit(words))
    return arrays


def promised(jobs):
    """Shards by node and number of the GPU, of all jobs that run."""
    found = collections.Counter()
    for job in jobs:
        for place in job.allocated if job.state == "RUNNING" else ():
            shards, index = re.fullmatch(r"shard:(\d+)\(IDX:(\d+)\)", place).groups()
            found[job.nodes, int(index)] += int(shards)
    return found


def finish(slurm, project, arrays, count):
    """Until all jobs are over: each has begun once and ended once, and no GPU was ever overbooked."""
    busiest = 0

    def all_done():
        nonlocal busiest
        jobs = commands.jobs()
        taken = promised(jobs)
        busiest = max(busiest, *taken.values(), 0)
        assert busiest <= slurm.shards_per_gpu, taken
        return sum(job.state == "COMPLETED" for job in jobs if job.array_job in arrays) == count

    slurm.until(all_done, "all jobs are over", 240.0, look=0.3)
    lines = collections.Counter((project / "log").read_text().splitlines())
    assert sum(lines.values()) == 2 * count and set(lines.values()) == {1}, lines.most_common(3)
    return busiest


@pytest.mark.slow
def test_two_hundred_mixed_jobs_never_overbook_a_gpu(slurm, project):
    (project / "job.sh").write_text(JOB)
    (project / "proceed").touch()
    sizes = (1, 2, 3, 5, 8, 12, 16, 20, 30, 39)  # the last takes all shards of a GPU
    arrays = submit(sizes, 20)
    assert finish(slurm, project, arrays, 200) == slurm.shards_per_gpu


@pytest.mark.slow
def test_a_killed_controller_loses_no_job_and_runs_none_twice(slurm, project):
    (project / "job.sh").write_text(JOB)
    arrays = submit((11, 30), 16)
    seen = []

    def settled():
        """The jobs that run, once they are the same for a while and others wait for room."""
        jobs = commands.jobs()
        seen.append({job.id for job in jobs if job.state == "RUNNING"})
        waiting = any(job.state == "PENDING" for job in jobs)
        return seen[-1] if waiting and len(seen[-1]) >= 12 and seen[-3:] == [seen[-1]] * 3 else None

    running = slurm.until(settled, "the GPUs are full", look=0.3)
    slurm.until_saved()
    slurm.kill_daemon("slurmctld")
    slurm.start_daemon("slurmctld")
    assert {job.id for job in commands.jobs() if job.state == "RUNNING"} == running
    (project / "proceed").touch()
    finish(slurm, project, arrays, 32)


@pytest.mark.slow
def test_controller_restarts_lose_no_job_and_run_none_twice(slurm, project):
    (project / "job.sh").write_text(JOB)
    (project / "proceed").touch()
    arrays = submit((5, 12, 20), 20)
    for _ in range(3):
        time.sleep(random.uniform(0, 3))
        slurm.kill_daemon("slurmctld", signal.SIGTERM)
        slurm.start_daemon("slurmctld")
    finish(slurm, project, arrays, 60)
