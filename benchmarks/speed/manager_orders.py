"""Orders for an array of 10,000 jobs: how long each takes, and how long somebody else's ping waits meanwhile.

python benchmarks/speed/manager_orders.py [--jobs 10000] [--kilobytes 4]

Starts a daemon of its own on virtual GPUs in a temporary home, with 1,000 other jobs in its queue. A second process
pings it all the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manager_submit import start
from ullage.manager.client import Client
from ullage.workloads.job_files import JobSpec

GOAL = 0.100  # seconds
OTHERS = 1000

PINGS = """
import sys, time
from pathlib import Path
from ullage.manager.client import Client
client, longest = Client(Path(sys.argv[1])), 0.0
for line in sys.stdin:
    print(longest, flush=True)
    longest, stop = 0.0, line == "stop\\n"
    while not stop:
        began = time.perf_counter()
        client.call("ping")
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.002)
        import select
        if select.select([sys.stdin], [], [], 0)[0]:
            break
"""


class Pings:
    """Somebody else, who asks all the time whether the daemon is there."""

    def __init__(self, home: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, "-uc", PINGS, str(home)], text=True, **pipes)
        self.longest()

    def longest(self) -> float:
        """The longest wait since this was asked before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("next\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Stop asking."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--kilobytes", type=int, default=4, help="the size of the environment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as folder:
        daemon = start(Path(folder), "--estimator", "none")
        try:
            measure(Path(folder), options.jobs, options.kilobytes)
        finally:
            daemon.kill()
            daemon.wait()


def measure(home: Path, jobs: int, kilobytes: int) -> None:
    client, pings = Client(home), Pings(home)
    base = {"command": ["sleep", "{index}"], "cwd": "/tmp", "memory": 1 << 30, "exclusive": True}
    spec = JobSpec.model_validate({**base, "env": {"FILL": "x" * 1024 * kilobytes}, "array": list(range(1, jobs + 1))})
    client.submit_spec(JobSpec.model_validate({**base, "array": list(range(600, 600 + OTHERS))}))
    time.sleep(2.0)
    pings.longest()
    time.sleep(5.0)
    print(f"nothing asked for: the longest wait of a ping {pings.longest() * 1e3:.0f} ms")

    def order(what: str, do: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = do()
        taken = time.perf_counter() - began
        time.sleep(2.0)  # the step that follows counts, too
        longest = pings.longest()
        within = "" if longest <= GOAL else f" (more than {GOAL * 1e3:.0f} ms)"
        print(f"{what}: {taken:.2f} s; the longest wait of a ping {longest * 1e3:.0f} ms{within}")
        return found

    array = order(f"submit an array of {jobs}", lambda: client.submit_spec(spec))["array"]
    order(f"queue with {jobs + OTHERS} jobs, as a list", client.queue)
    command = [sys.executable, "-m", "ullage", "queue"]
    show = {"env": {**os.environ, "ULLAGE_HOME": str(home)}, "stdout": subprocess.DEVNULL, "check": True}
    order("ullage queue", lambda: subprocess.run(command, **show))
    order("status of all", lambda: client.jobs(f"{array}_all"))
    order("hold all", lambda: client.hold(f"{array}_all"))
    order("release all", lambda: client.release(f"{array}_all"))
    order("edit all", lambda: client.edit(f"{array}_all", time_limit="1h"))
    order("cancel all", lambda: client.cancel(f"{array}_all"))
    order("requeue all", lambda: client.requeue(f"{array}_all", hold=True))
    order("cancel all again", lambda: client.cancel(f"{array}_all"))
    order(f"history of {jobs}", lambda: client.history(jobs))
    pings.close()
    files = sum(file.stat().st_size for file in (home / "manager").glob("state.db*"))
    print(f"the database has {files / 2**20:.1f} MiB")
    client.call("cancel", jobs=[job["id"] for job in client.queue()])


if __name__ == "__main__":
    main()
