"""How soon the daemon answers: submissions, starts, orders for an array of 10,000 jobs, and estimates.

    python benchmarks/speed/manager.py submit [--jobs 300] [--queued 2000]
    python benchmarks/speed/manager.py starts [--jobs 30]
    python benchmarks/speed/manager.py orders [--jobs 10000] [--kilobytes 4]
    python benchmarks/speed/manager.py estimates [--elements 20] [--each | --kinds] [--against CHECKOUT]

Each starts a daemon of its own on virtual GPUs in a temporary home.

`submit` measures from the request to the acknowledgement, which is on disk by then: submissions one after the other,
and from eight submitters at once, while jobs run.

`starts` submits jobs of known memory one after the other to idle GPUs, and measures from the request until the job's
own first command runs, by the clock of this machine.

`orders` submits an array to a daemon with 1,000 other jobs, and gives orders for it. A second process pings the daemon
all the time: it prints how long each order takes, and how long the longest ping waits meanwhile.

`estimates` submits an array of one script with `--seed {index}`. As root, a job of another user (nobody) is submitted
after it. It prints after how many seconds the last element, and the other user's job, have their estimates. With
`--each` every element is estimated, none speaks for others, and the estimates a second are printed. `--kinds` submits a
job of each kind of `manager_trace.py` instead, one after the other, to a daemon that has made an estimate before. It
prints how long each estimate took, the processor time of all its processes, and how long the next job of that kind
takes from its submission to its start. `--against` does the same with the daemon of another checkout, in turns.
"""

from __future__ import annotations

import argparse
import grp
import json
import os
import pwd
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ullage.errors import NoDaemon
from ullage.jobs.job_files import JobSpec
from ullage.manager.client import Client

HERE = Path(__file__).resolve().parents[2]
SUBMIT_GOAL, PING_GOAL = 0.020, 0.100  # seconds
OTHERS = 1000
OTHER = "nobody"
TURNS = 2
PATIENCE = 900.0  # seconds for an estimate
WARMING = 15.0  # seconds in which the daemon's waiting processes import more
SHARE = 0.5  # of the steps of a kind of job
SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
torch.manual_seed(parser.parse_args().seed)
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AS_OTHER = """
import json, os, pwd, sys
from ullage.manager.client import Client  # before the rights go: Python itself may lie where that user cannot read
user = pwd.getpwnam(sys.argv[1])
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
answer = Client(sys.argv[2]).call("submit", job=json.loads(sys.argv[3]), key=f"a job of another user {os.getpid()}")
print(answer["jobs"][0])
"""
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


@contextmanager
def daemon(*options: str, files: dict[str, str] | None = None) -> Iterator[Path]:
    """The home of a daemon on eight virtual GPUs that answers, with these files in it."""
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as folder:
        os.chmod(folder, 0o755)  # another user's job runs there
        home = Path(folder)
        for name, text in (files or {}).items():
            (home / name).write_text(text)
        command = [sys.executable, "-m", "ullage", "serve", "--virtual", "8xA100-40GB", *options]
        serving = subprocess.Popen(
            command, cwd=home, env={**os.environ, "ULLAGE_HOME": folder}, stderr=subprocess.DEVNULL
        )
        while serving.poll() is None:
            try:
                Client(home).call("ping")
                break
            except NoDaemon:
                time.sleep(0.05)
        try:
            yield home
        finally:
            serving.terminate()
            serving.wait()


def submit(home: Path, jobs: int, queued: int) -> None:
    """Print how long submissions take."""
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
    """Return the seconds until a submission is acknowledged, with an environment as large as this one."""
    values = {"command": ["true"], "cwd": "/tmp", "memory": 1 << 30, "env": dict(os.environ), **more}
    spec = JobSpec.model_validate(values)
    began = time.perf_counter()
    client.submit_spec(spec)
    return time.perf_counter() - began


def report(what: str, times: list[float]) -> None:
    times = sorted(times)
    most = times[int(0.99 * (len(times) - 1))]
    within = sum(each <= SUBMIT_GOAL for each in times) / len(times)
    print(
        f"{what}: median {statistics.median(times) * 1e3:.1f} ms, 99th percentile {most * 1e3:.1f} ms, "
        f"{within:.0%} within {SUBMIT_GOAL * 1e3:.0f} ms"
    )


def starts(home: Path, jobs: int) -> None:
    """Print how long jobs take from their submission to their start."""
    client, marks = Client(home), home / "starts"
    marks.mkdir()
    spans: dict[str, list[float]] = {"known to the client": [], "known to the daemon": [], "begun": []}
    for number in range(jobs):
        mark = marks / str(number)
        words = ["/bin/sh", "-c", f"date +%s.%N > {mark}.new && mv {mark}.new {mark}; sleep 0.5"]
        spec = JobSpec.model_validate({"command": words, "cwd": "/tmp", "memory": 1 << 30, "env": dict(os.environ)})
        submitted = time.time()
        [job] = client.submit_spec(spec)["jobs"]
        spans["known to the client"].append(time.time() - submitted)
        while client.status(job)["state"] in ("queued", "starting"):
            time.sleep(0.002)
        spans["known to the daemon"].append(time.time() - submitted)
        client.wait(job)
        spans["begun"].append(float(mark.read_text()) - submitted)
    for what, times in spans.items():
        times.sort()
        print(f"{what}: median {statistics.median(times):.3f} s, the longest of {jobs} {times[-1]:.3f} s")


class Pings:
    """A second process that pings the daemon all the time."""

    def __init__(self, home: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, "-uc", PINGS, str(home)], text=True, **pipes)
        self.longest()

    def longest(self) -> float:
        """Return the longest wait since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("next\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def orders(home: Path, jobs: int, kilobytes: int) -> None:
    """Print how long each order takes, and how long others wait for it."""
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
        result = do()
        taken = time.perf_counter() - began
        time.sleep(2.0)  # the step that follows counts, too
        longest = pings.longest()
        within = "" if longest <= PING_GOAL else f" (more than {PING_GOAL * 1e3:.0f} ms)"
        print(f"{what}: {taken:.2f} s; the longest wait of a ping {longest * 1e3:.0f} ms{within}")
        return result

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


def estimates(elements: int, each: bool, kinds: bool, against: Path | None) -> None:
    """Measure with the daemon of this checkout, and in turns with that of another."""
    group = f'[access]\ngroup = "{grp.getgrgid(pwd.getpwnam(OTHER).pw_gid).gr_name}"\n' if os.geteuid() == 0 else ""
    samples = "[estimating]\narray_samples = 0\nper_user = 2\nat_once = 2\n" if each else ""
    files = {"settings.toml": group + samples, "train.py": SCRIPT}
    checkouts = [HERE, *([against.resolve()] if against else [])]
    for checkout in checkouts * (TURNS if against else 1):
        if against:
            print(f"{checkout}:")
            os.environ["PYTHONPATH"] = str(checkout / "src")
        with daemon("--settings", "settings.toml", files=files) as home:
            began = processor_seconds()
            if kinds:
                estimate_kinds(home)
            else:
                wait_for(home, elements, each)
        if each:
            taken = processor_seconds() - began
            print(f"processor seconds an estimate, with the daemon's: {taken / elements:.2f}", flush=True)


def estimate_kinds(home: Path) -> None:
    """Print what the estimate of each kind of the trace takes, and how soon the next job of the kind starts."""
    sys.path.append(str(HERE / "benchmarks/gpu"))
    from manager_trace import KINDS, LARGE, warm_up, words

    client = Client(home)
    warm_up(client, PATIENCE)
    time.sleep(WARMING)
    print(f"{'kind':20}{'estimate, s':>13}{'processor, s':>14}{'start, s':>10}  bound")
    for kind in (*KINDS, *LARGE):
        used, began = processor_seconds_of_daemon(), time.monotonic()
        [estimated] = client.submit(words(kind, SHARE), hold=True)
        client.wait_for_estimate(estimated, timeout=PATIENCE)
        taken = time.monotonic() - began
        used = processor_seconds_of_daemon() - used
        [started] = client.submit(words(kind, SHARE))
        while (status := client.status(started))["started"] is None:
            time.sleep(0.002)
        times = f"{taken:13.1f}{used:14.1f}{status['waited']:10.2f}"
        print(f"{kind.name:20}{times}  {status['promise']}", flush=True)
        client.cancel(estimated, started)


def processor_seconds_of_daemon() -> float:
    """Return the processor time of the daemon, the only child, and of its ended children."""
    [serving] = psutil.Process().children()
    return sum(serving.cpu_times()[:4])


def processor_seconds() -> float:
    """Return the processor time of all ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def job(home: Path, command: list[str], **more: Any) -> dict[str, Any]:
    return {"command": [sys.executable, "train.py", *command], "cwd": str(home), "env": dict(os.environ), **more}


def wait_for(home: Path, elements: int, each: bool) -> None:
    """Print when the last of the jobs has its estimate."""
    client = Client(home)
    waiting: dict[int, str] = {}
    array = JobSpec.model_validate(job(home, ["--seed", "{index}"], array=list(range(1, elements + 1)), hold=True))
    began = time.monotonic()
    for number in client.submit_spec(array)["jobs"]:
        waiting[number] = f"the array of {elements}"
    if os.geteuid() == 0 and not each:
        words = [sys.executable, "-c", AS_OTHER, OTHER, str(home), json.dumps(job(home, ["--seed", "0"], hold=True))]
        waiting[int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)] = f"the job of {OTHER}"
    last: dict[str, float] = {}
    while waiting:
        for number, what in list(waiting.items()):
            status = client.status(number)
            if status["estimate"] is not None:
                del waiting[number]
                last[what] = time.monotonic() - began
        time.sleep(0.2)
    for what, seconds in last.items():
        rate = f": {elements / seconds:.2f} estimates a second, two at once" if each else ""
        print(f"{what}: the last estimate was there after {seconds:.0f} s{rate}", flush=True)
    print(f"promises: {sorted({str(each['promise']) for each in client.call('history', limit=1000)})}")
    client.call("cancel", jobs=[each["id"] for each in client.call("queue")]) if client.call("queue") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("submit", help="how long a submission takes")
    part.add_argument("--jobs", type=int, default=300)
    part.add_argument("--queued", type=int, default=2000)
    part = parts.add_parser("starts", help="how long a job takes to its start")
    part.add_argument("--jobs", type=int, default=30)
    part = parts.add_parser("orders", help="orders for a large array, and who waits meanwhile")
    part.add_argument("--jobs", type=int, default=10_000)
    part.add_argument("--kilobytes", type=int, default=4, help="the size of the environment")
    part = parts.add_parser("estimates", help="how long estimates take")
    part.add_argument("--elements", type=int, default=20)
    part.add_argument("--each", action="store_true", help="estimate every element")
    part.add_argument("--kinds", action="store_true", help="estimate each kind of job of manager_trace.py")
    part.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout to compare with")
    options = parser.parse_args()
    if options.what == "estimates":
        estimates(options.elements, options.each, options.kinds, options.against)
        return
    with daemon("--estimator", "none") as home:
        if options.what == "submit":
            submit(home, options.jobs, options.queued)
        elif options.what == "starts":
            starts(home, options.jobs)
        else:
            orders(home, options.jobs, options.kilobytes)


if __name__ == "__main__":
    main()
