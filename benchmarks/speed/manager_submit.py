"""How long a submission takes besides the estimate: from the request to the acknowledgement, which is on disk by then.

python benchmarks/speed/manager_submit.py [--jobs 300] [--queued 2000]

Starts a daemon of its own on virtual GPUs in a temporary home, fills its queue, and measures submissions one after the
other, and from eight submitters at once, while jobs run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ullage.errors import NoDaemon
from ullage.manager.client import Client
from ullage.workloads.job_files import JobSpec

GOAL = 0.020  # seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--queued", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as folder:
        daemon = start(Path(folder), "--estimator", "none")
        try:
            measure(Path(folder), options.jobs, options.queued)
        finally:
            daemon.kill()
            daemon.wait()


def start(home: Path, *options: str) -> subprocess.Popen[bytes]:
    """A daemon on eight virtual GPUs that answers."""
    command = [sys.executable, "-m", "ullage", "serve", "--virtual", "8xA100-40GB", *options]
    daemon = subprocess.Popen(command, env={**os.environ, "ULLAGE_HOME": str(home)}, stderr=subprocess.DEVNULL)
    while daemon.poll() is None:
        try:
            Client(home).call("ping")
            break
        except NoDaemon:
            time.sleep(0.05)
    return daemon


def measure(home: Path, jobs: int, queued: int) -> None:
    report("empty queue, held jobs", [timed(Client(home), hold=True) for _ in range(jobs)])
    report("an array of 1,000", [timed(Client(home), hold=True, array=list(range(1000)))])
    client = Client(home)
    for begin in range(0, queued, 1000):
        timed(client, exclusive=True, array=list(range(begin, min(begin + 1000, queued))), command=["sleep", "600"])
    report(f"{queued} jobs in the queue, 8 of them running", [timed(client, exclusive=True) for _ in range(jobs)])
    times: list[float] = []
    threads = [threading.Thread(target=many, args=(home, jobs // 8, times)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report("the same, 8 submitters at once", times)
    client.call("cancel", jobs=[job["id"] for job in client.call("queue")])


def many(home: Path, jobs: int, times: list[float]) -> None:
    client = Client(home)
    times += [timed(client, exclusive=True) for _ in range(jobs)]


def timed(client: Client, **more: object) -> float:
    """Seconds until a submission is acknowledged, with an environment as large as this one."""
    values = {"command": ["true"], "cwd": "/tmp", "memory": 1 << 30, "env": dict(os.environ), **more}
    spec = JobSpec.model_validate(values)
    began = time.perf_counter()
    client.submit_spec(spec)
    return time.perf_counter() - began


def report(what: str, times: list[float]) -> None:
    times = sorted(times)
    most = times[int(0.99 * (len(times) - 1))]
    within = sum(each <= GOAL for each in times) / len(times)
    print(
        f"{what}: median {statistics.median(times) * 1e3:.1f} ms, 99th percentile {most * 1e3:.1f} ms, "
        f"{within:.0%} within {GOAL * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
