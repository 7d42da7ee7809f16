"""Many users for a long time, with everything that can go wrong on the way: `pytest tests/manager/test_soak.py`.

Five users submit jobs and arrays, cancel, hold and release them, and have scripts estimated that try to destroy their
own files. Meanwhile the daemon, supervisors and estimates are killed (kill -9) and the disk is full at times. In the
last part the daemon is left alive, so that its memory and descriptors can be watched.

What the jobs themselves wrote is the oracle: no job is lost, none is alive twice, no file of a user has changed.
`--soak SECONDS` says how long it takes (20 minutes by default).
"""

import contextlib
import grp
import hashlib
import json
import os
import pwd
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.paths import public_python

from ullage.errors import UllageError
from ullage.manager.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

USERS = ("daemon", "bin", "games", "man", "nobody")
DISK = 128  # MiB for the daemon's home
PATIENCE = 240.0  # seconds for all jobs to end when nothing is killed any more
GROWTH, DESCRIPTORS = 24 << 20, 12  # how much larger a daemon may be at the end of the quiet part

# The lock says whether the same job is alive twice, whatever the daemon believes.
JOB = """
exec 9>>"alive/$ULLAGE_JOB_ID"
flock -n 9 || echo "twice $ULLAGE_JOB_ID" >> attempts.log
echo "start $ULLAGE_JOB_ID" >> attempts.log
sleep "$1"
echo "end $ULLAGE_JOB_ID" >> attempts.log
"""

# A job that needs an estimate. While it is estimated it does to its folder what no estimate may do.
TRAIN = """
import json, os, subprocess, sys, torch
if os.environ["ULLAGE_JOB_ID"] == "0":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    for name in ("precious.bin", "config.json"):
        with open(name, "rb") as file:
            kept = file.read()
        os.remove(name)
        with open(name, "wb") as file:
            file.write(kept[:1])
        os.rename(name, name + ".gone")
        with open(name, "wb") as file:
            file.write(kept)
        with open(name, "ab") as file:
            file.write(b"more")
    with open("attempts.log", "a") as file:
        file.write("estimate 0\\n")
    width = 64
else:
    width = json.load(open("config.json"))["width"]
    with open("attempts.log", "a") as file:
        file.write(f"start {os.environ['ULLAGE_JOB_ID']}\\n")
model = torch.nn.Linear(width, width).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(int(os.environ.get("BATCH", 8)), width, device="cuda")).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "precious.bin" if os.environ["ULLAGE_JOB_ID"] == "0" else f"last-{os.getpid()}.pt")
if os.environ["ULLAGE_JOB_ID"] != "0":
    with open("attempts.log", "a") as file:
        file.write(f"end {os.environ['ULLAGE_JOB_ID']}\\n")
"""

# One user's terminal: does things at random until the file `stop` is there, and writes down what was acknowledged.
ACTOR = """
import json, os, random, sys, time
from pathlib import Path
from ullage.errors import NoDaemon, UllageError
from ullage.manager.client import Client
from ullage.jobs.job_files import JobSpec
home, folder, job, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dice, client, mine = random.Random(seed), Client(home), []
log = open("acknowledged.jsonl", "a", buffering=1)
env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], "HOME": str(folder)}
def submit(**more):
    spec = JobSpec(**{"cwd": str(folder), "env": env, **more})
    numbers = client.submit_spec(spec, patience=120.0)["jobs"]
    log.write(json.dumps({"submitted": numbers}) + "\\n")
    mine.extend(numbers)
def order(verb, *jobs):
    log.write(json.dumps({verb: list(jobs)}) + "\\n")
    client.call(verb, jobs=list(jobs))
while not (folder.parent / "stop").exists():
    length = f"{dice.uniform(0, 2):.2f}"
    try:
        action = dice.random()
        if action < 0.45:
            submit(command=["/bin/sh", "-c", job, "job", length], memory=1 << 30)
        elif action < 0.60:
            submit(command=["/bin/sh", "-c", job, "job", length], memory=1 << 30, array="1-12")
        elif action < 0.70:
            submit(command=[sys.executable, "train.py"], env=env | {"BATCH": str(dice.choice((8, 16)))})
        elif mine and action < 0.85:
            order("cancel", dice.choice(mine))
        elif mine:
            chosen = dice.choice(mine)
            order("hold", chosen)
            order("release", chosen)
    except NoDaemon:
        pass
    except UllageError as error:
        log.write(json.dumps({"refused": str(error)}) + "\\n")
    time.sleep(dice.uniform(0.2, 2.0))
"""


@pytest.fixture
def soak(request):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to be five users and to fill a disk")
    python = public_python()
    if python is None:
        pytest.skip("needs a Python that every user can run")
    folder = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "h").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m,mode=755", "tmpfs", folder / "h"]).returncode:
        pytest.skip("this system refuses mounts")
    made = Soak(folder, python, request.config.getoption("--soak"))
    yield made
    made.close()
    subprocess.run(["umount", "-l", folder / "h"], check=True)
    shutil.rmtree(folder, ignore_errors=True)


class Soak:
    """The home on its small disk, the users' folders, the daemon that is started again, and what is done to it."""

    def __init__(self, folder, python, seconds):
        self.folder, self.home, self.seconds = folder, folder / "h", seconds
        self.python, path = python
        self.environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "ULLAGE_HOME": str(self.home)}
        self.client = Client(self.home)
        self.daemon, self.starts, self.done = None, 0, Counter()
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        (self.home / "settings.toml").write_text(
            '[access]\ngroup = "users"\n[running]\ngrace = 1.0\n[estimating]\ntimeout = 60\n'
        )
        self.work = {user: self._folder_of(user) for user in USERS}
        self.before = {user: checksums(place) for user, place in self.work.items()}

    def _folder_of(self, user):
        place, owner = self.folder / user, pwd.getpwnam(user)
        (place / "alive").mkdir(parents=True)
        (place / "train.py").write_text(TRAIN)
        (place / "config.json").write_text('{"width": 64}')
        (place / "precious.bin").write_bytes(random.Random(user).randbytes(100_000))
        (place / "attempts.log").touch()
        for each in (place, *place.iterdir()):
            os.chown(each, owner.pw_uid, owner.pw_gid)
        return place

    def _keep(self):
        with (self.folder / "serve.log").open("ab") as log:
            while not self._ending.is_set():
                words = ["-m", "ullage", "serve", "--virtual", "4xA100-40GB", "--settings", self.home / "settings.toml"]
                self.daemon = subprocess.Popen(
                    [self.python, *words], env=self.environment, stdout=log, stderr=log, cwd="/"
                )
                self.starts += 1
                while self.daemon.poll() is None and not self._ending.wait(0.05):
                    pass

    def start(self):
        """The daemon and the users."""
        self._keeper.start()
        self.ask("ping")
        everybody = grp.getgrnam("users").gr_gid
        self.actors = [
            subprocess.Popen(
                [self.python, "-c", ACTOR, self.home, place, JOB, str(number)],
                cwd=place,
                env=self.environment,
                user=user,
                group=pwd.getpwnam(user).pw_gid,
                extra_groups=[everybody],
            )
            for number, (user, place) in enumerate(self.work.items())
        ]

    def ask(self, verb, **arguments):
        """An order of root's, repeated until a daemon has answered it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.client.call(verb, **arguments)
            except UllageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def do_harm(self, dice, daemon_too):
        """Something that goes wrong."""
        what = dice.choice(["supervisor", "estimate", "disk", *(["daemon"] * 3 if daemon_too else [])])
        if what == "daemon":
            self.daemon.kill()
        elif what == "disk":
            self._fill(dice.uniform(0.5, 3.0))
        elif victims := self._processes("supervisor.py" if what == "supervisor" else "ullage.sandbox"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(victims), signal.SIGKILL)
        else:
            return
        self.done[what] += 1

    def _fill(self, seconds):
        filler = self.home / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        time.sleep(seconds)
        filler.unlink()

    def _processes(self, word):
        """Processes of this home whose command has a word."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    mine = (
                        str(self.folder).encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                    )
                    if mine and word.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found

    def size(self):
        """Resident bytes and open descriptors of the daemon."""
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        resident = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))
        return resident, len(os.listdir(f"/proc/{self.daemon.pid}/fd"))

    def end_actors(self):
        """The users go home."""
        (self.folder / "stop").touch()
        for actor in self.actors:
            assert actor.wait(PATIENCE) == 0

    def said(self, what):
        """The numbers in what the users wrote down: `submitted`, `cancel`."""
        found = []
        for place in self.work.values():
            for line in (place / "acknowledged.jsonl").read_text().splitlines():
                found += json.loads(line).get(what, [])
        return found

    def log(self):
        """What the jobs wrote: words and numbers."""
        return [line.split() for place in self.work.values() for line in (place / "attempts.log").open()]

    def close(self):
        self._ending.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for process in [*getattr(self, "actors", []), *([self.daemon] if self.daemon else [])]:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self._processes(""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def checksums(folder):
    """Of the files that no job of the folder writes."""
    names = ("train.py", "config.json", "precious.bin")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def test_five_users_and_everything_that_goes_wrong(soak, record_property):
    dice = random.Random(7)
    soak.start()
    began, sizes = time.monotonic(), []
    while (passed := time.monotonic() - began) < soak.seconds:
        quiet = passed > 0.6 * soak.seconds  # from here on the daemon lives, so that its size can be watched
        time.sleep(dice.uniform(0.5, 3.0))
        soak.do_harm(dice, daemon_too=not quiet)
        if quiet and soak.daemon.poll() is None:
            sizes.append(soak.size())
    soak.end_actors()
    submitted, cancelled = soak.said("submitted"), set(soak.said("cancel"))
    deadline = time.monotonic() + PATIENCE
    while (waiting := soak.ask("queue")) and time.monotonic() < deadline:
        for job in waiting:
            if job["state"] == "held":
                soak.ask("release", jobs=[job["id"]])
        time.sleep(1.0)
    history = {job["id"]: job for job in soak.ask("history", limit=100_000)}
    log = soak.log()
    record_property("jobs", len(submitted))
    print(f"{len(submitted)} jobs, {len(cancelled)} cancelled; harm: {dict(soak.done)}; daemon started {soak.starts}")
    print(f"daemon: {sizes[0]} bytes and descriptors at first, {sizes[-1]} in the end")

    assert len(submitted) == len(set(submitted)) > 0
    assert not waiting, f"{len(waiting)} jobs did not end: {waiting[:3]}"
    assert not set(submitted) - set(history), "a job was lost"
    wrong = {number: history[number] for number in submitted if history[number]["state"] not in ("done", "cancelled")}
    assert not wrong, f"{len(wrong)} jobs did not end well: {list(wrong.values())[:3]}"
    assert {number for number in submitted if history[number]["state"] == "cancelled"} <= cancelled
    assert not [line for line in log if line[0] == "twice"], "a job was alive twice"
    assert not [line for line in log if line[0] == "estimate"], "an estimate wrote into a user's file"
    ends = Counter(int(number) for word, number in log if word == "end")
    assert not [number for number in submitted if history[number]["state"] == "done" and not ends[number]]
    started = Counter(int(number) for word, number in log if word == "start")
    many = [number for number, count in started.items() if count > len(soak.ask("status", job=number)[0]["attempts"])]
    assert not many, "a job was started more often than its attempts say"
    assert {user: checksums(place) for user, place in soak.work.items()} == soak.before, "a user's file has changed"
    assert not soak._processes("ullage.sandbox"), "an estimate has outlived its daemon's need"
    assert sizes[-1][0] < sizes[len(sizes) // 4][0] + GROWTH, "the daemon's memory grows"
    assert sizes[-1][1] < sizes[len(sizes) // 4][1] + DESCRIPTORS, "the daemon's descriptors grow"
