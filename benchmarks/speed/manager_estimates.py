"""How long estimates hold up the queue: an array of seeds, and another user's job that comes after it.

python benchmarks/speed/manager_estimates.py [--elements 20] [--each] [--against CHECKOUT]

Starts a daemon of its own on virtual GPUs in a temporary home and submits an array of one script with `--seed {index}`.
As root, a job of another user (nobody) is submitted after it. Prints after how many seconds the last element, and the
other user's job, might start.

With `--each` every element is estimated, none speaks for others, and the estimates a second are printed. `--against`
does the same with the daemon of another checkout, in turns.
"""

from __future__ import annotations

import argparse
import grp
import json
import os
import pwd
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manager_submit import start
from ullage.manager.client import Client
from ullage.workloads.job_files import JobSpec

HERE = Path(__file__).resolve().parents[2]
OTHER = "nobody"
TURNS = 2
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=20)
    parser.add_argument("--each", action="store_true", help="estimate every element")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout to compare with")
    options = parser.parse_args()
    checkouts = [HERE, *([options.against.resolve()] if options.against else [])]
    for checkout in checkouts * (TURNS if options.against else 1):
        if options.against:
            print(f"{checkout}:")
            os.environ["PYTHONPATH"] = str(checkout / "src")
        with tempfile.TemporaryDirectory(prefix="ullage-bench-") as folder:
            os.chmod(folder, 0o755)
            daemon = prepared(Path(folder), options.each)
            began = processor_seconds()
            try:
                measure(Path(folder), options.elements, options.each)
            finally:
                daemon.terminate()
                daemon.wait()
            if options.each:
                taken = processor_seconds() - began
                print(f"processor seconds an estimate, with the daemon's: {taken / options.elements:.2f}", flush=True)


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepared(home: Path, each: bool) -> subprocess.Popen[bytes]:
    """A daemon that answers, with the script that is estimated."""
    group = f'[access]\ngroup = "{grp.getgrgid(pwd.getpwnam(OTHER).pw_gid).gr_name}"\n' if os.geteuid() == 0 else ""
    samples = "[estimating]\narray_samples = 0\nper_user = 2\nat_once = 2\n" if each else ""
    (home / "settings.toml").write_text(group + samples)
    (home / "train.py").write_text(SCRIPT)
    return start(home, "--settings", f"{home}/settings.toml")


def job(home: Path, command: list[str], **more: Any) -> dict[str, Any]:
    return {"command": [sys.executable, "train.py", *command], "cwd": str(home), "env": dict(os.environ), **more}


def measure(home: Path, elements: int, each: bool) -> None:
    client = Client(home)
    waiting: dict[int, str] = {}
    array = JobSpec.model_validate(job(home, ["--seed", "{index}"], array=list(range(1, elements + 1)), hold=each))
    began = time.monotonic()
    for number in client.submit_spec(array)["jobs"]:
        waiting[number] = f"the array of {elements}"
    if os.geteuid() == 0 and not each:
        words = [sys.executable, "-c", AS_OTHER, OTHER, str(home), json.dumps(job(home, ["--seed", "0"]))]
        waiting[int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)] = f"the job of {OTHER}"
    last: dict[str, float] = {}
    while waiting:
        for number, what in list(waiting.items()):
            found = client.status(number)
            if found["estimate"] if each else found["state"] != "estimating":
                del waiting[number]
                last[what] = time.monotonic() - began
        time.sleep(0.2)
    for what, seconds in last.items():
        rate = f": {elements / seconds:.2f} estimates a second, two at once" if each else ""
        print(f"{what}: the last one might start after {seconds:.0f} s{rate}", flush=True)
    print(f"promises: {sorted({str(each['promise']) for each in client.call('history', limit=1000)})}")
    client.call("cancel", jobs=[each["id"] for each in client.call("queue")]) if client.call("queue") else None


if __name__ == "__main__":
    main()
