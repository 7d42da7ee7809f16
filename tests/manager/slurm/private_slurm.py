"""A real Slurm of one's own: munged, slurmctld and slurmds on this host, with GPUs that are files.

    with PrivateSlurm(folder) as slurm:
        slurm.run("sbatch", "--gres=shard:12", "job.sh")

Everything is in one folder and on free ports of the loopback; a Slurm that this host belongs to is not touched. The
daemons are children of a guard: this file, run as a program. It ends them, and every job that they started, as soon as
whoever started it is gone, however that ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SUPERUSER = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
END = {"end": True}
PATIENCE = 120.0  # seconds after which something that should have happened is a failure

CONFIGURATION = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=idle_on_node_suspend
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,requeue_delay=0
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed.txt
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=30
KillWait=1
MinJobAge=600
MaxJobCount=5000
GresTypes=gpu,shard
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=64 RealMemory=100000 \
Gres=gpu:{type}:{gpus},shard:{shards}
PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""
RESOURCES = """
AutoDetect=off
NodeName=n[1-{nodes}] Name=gpu Type={type} File={folder}/gpu[0-{last}]
NodeName=n[1-{nodes}] Name=shard Count={shards}
"""


def missing() -> list[str]:
    """The programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SUPERUSER["PATH"]) is None]


class PrivateSlurm:
    """A cluster that runs from `start` to `close`."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        gpus: int = 4,
        shards_per_gpu: int = 40,
        gpu_type: str = "fake",
        more: str = "",
    ) -> None:
        self.folder, self.nodes, self.gpus, self.shards_per_gpu = folder, nodes, gpus, shards_per_gpu
        self._gpu_type = gpu_type
        self.more = more
        self.environment = {**SUPERUSER, "SLURM_CONF": str(folder / "slurm.conf")}
        self._guard: subprocess.Popen[str] | None = None

    def __enter__(self) -> PrivateSlurm:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """All daemons; back when every node is idle. Ports that somebody took meanwhile are chosen anew."""
        for attempt in range(3):
            self._write()
            self._guard = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self.environment,
                start_new_session=True,
            )
            try:
                for name in ("munged", "slurmctld", *self._slurmds()):
                    self.start_daemon(name)
                self.until(self._idle, "all nodes are idle", 30.0)
                return
            except AssertionError:
                self.close()
                if attempt == 2:
                    raise

    def close(self) -> None:
        """The end of all daemons and of all jobs."""
        if self._guard is not None:
            guard, self._guard = self._guard, None
            with contextlib.suppress(OSError):  # it has ended by itself
                guard.stdin.write(json.dumps(END) + "\n")  # a process that was forked meanwhile keeps the pipe open
                guard.stdin.close()
            guard.wait(PATIENCE)
            guard.stdout.close()

    def run(self, *words: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command of Slurm (or another one) as a user of this cluster types it."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            **options,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def submit(self, *words: object, **options: Any) -> int:
        """`sbatch WORDS`: the number of the job."""
        return int(self.run("sbatch", "--parsable", *words, **options).stdout.split(";")[0])

    def jobs(self) -> dict[int, dict[str, str]]:
        """What `scontrol --details show jobs` says, by number of the job and name of the field."""
        found = {}
        for line in self.run("scontrol", "--oneliner", "--details", "show", "jobs").stdout.splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "JobId" in fields:
                found[int(fields["JobId"])] = fields
        return found

    def until_state(self, job: int, *states: str, limit: float = PATIENCE) -> dict[str, str]:
        """Wait until a job is in one of these states (`COMPLETED`, `RUNNING`, ...): its fields."""

        def there() -> dict[str, str] | None:
            fields = self.jobs()[job]
            return fields if fields["JobState"] in states else None

        return self.until(there, f"job {job} is {' or '.join(states)}: {self.jobs().get(job)}", limit)

    def clear(self) -> None:
        """Cancel all jobs, and wait until their nodes are idle."""
        self.run("scancel", "--hurry", "--user", getpass.getuser())
        self.until(lambda: not self.run("squeue", "--noheader").stdout and self._idle(), "the queue is empty")

    def until_saved(self) -> None:
        """Wait until all that slurmctld knows now is on its disk: it writes all jobs at once, every few seconds. So
        this is when it has written down a job that came last, which is found by its name."""
        name = f"saved-{secrets.token_hex(8)}"
        last = self.submit("--hold", "--job-name", name, "--output=/dev/null", "--wrap", "true")

        def there() -> bool:
            with contextlib.suppress(FileNotFoundError):  # for a moment, while a new file takes its place
                return name.encode() in (self.folder / "state" / "job_state").read_bytes()
            return False

        self.until(there, "slurmctld has saved its jobs", look=0.1)
        self.run("scancel", last)

    def reconfigure(self, more: str) -> None:
        """Put lines below the configuration, in the place of those that were there, and have the daemons read them.
        Nodes do so a little later."""
        path = self.folder / "slurm.conf"
        path.write_text(path.read_text().partition("# more\n")[0] + "# more\n" + more + "\n")
        self.run("scontrol", "reconfigure")

    def start_daemon(self, name: str) -> None:
        """`munged`, `slurmctld`, or a node's slurmd: `n1`."""
        words = {
            "munged": [
                "munged",
                "--foreground",
                "--force",
                f"--socket={self.folder}/munge/socket",
                f"--key-file={self.folder}/munge/key",
                f"--log-file={self.folder}/munge/log",
                f"--pid-file={self.folder}/munge/pid",
                f"--seed-file={self.folder}/munge/seed",
            ],
            "slurmctld": ["slurmctld", "-D"],
        }.get(name, ["slurmd", "-D", "-N", name])
        self._order({"start": name, "words": words, "log": str(self.folder / "daemons.log")})
        if name == "munged":
            self.until((self.folder / "munge" / "socket").exists, "munged listens", 30.0)
        elif name == "slurmctld":
            self.until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld answers", 30.0)

    def kill_daemon(self, name: str, number: int = signal.SIGKILL) -> None:
        """End one of them; back when it is gone."""
        self._order({"kill": name, "signal": int(number)})

    def until(self, condition: Callable[[], Any], what: str, limit: float = PATIENCE, look: float = 0.02) -> Any:
        """What the condition gives as soon as it gives something; it is asked every `look` seconds."""
        deadline = time.monotonic() + limit
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {limit:.0f} s until {what}\n{self.log()}"
            time.sleep(look)
        return found

    def log(self) -> str:
        """The last lines that the daemons wrote."""
        texts = [path.read_text(errors="replace").splitlines()[-15:] for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(line for lines in texts for line in lines)

    def _slurmds(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    def _idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).stdout.split()
        return states == ["idle"] * self.nodes

    def _write(self) -> None:
        first = _free_ports(1 + self.nodes)
        values = {
            "host": socket.gethostname().partition(".")[0],
            "user": getpass.getuser(),
            "folder": self.folder,
            "ports": (first, first + 1, first + self.nodes),
            "nodes": self.nodes,
            "type": self._gpu_type,
            "gpus": self.gpus,
            "shards": self.gpus * self.shards_per_gpu,
            "last": self.gpus - 1,
        }
        for name in ("munge", "state", *(f"spool-{node}" for node in self._slurmds())):
            (self.folder / name).mkdir(exist_ok=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for number in range(self.gpus):
            _make_device(self.folder / f"gpu{number}")
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**values) + "# more\n" + self.more + "\n")
        (self.folder / "gres.conf").write_text(RESOURCES.format(**values))

    def _order(self, order: dict[str, Any]) -> None:
        self._guard.stdin.write(json.dumps(order) + "\n")
        self._guard.stdin.flush()
        assert self._guard.stdout.readline() == "done\n", f"the guard of the private Slurm is gone\n{self.log()}"


def _free_ports(count: int) -> int:
    """The first of some ports in a row that nobody listens to."""
    while True:
        first = 20000 + secrets.randbelow(12000)  # below those that the kernel gives to clients
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
            except OSError:
                continue


def _make_device(path: Path) -> None:
    """A device that is /dev/null by another name, where that is allowed: Slurm tells jobs the numbers of devices."""
    path.unlink(missing_ok=True)
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        path.touch()


def guard() -> None:
    """Start and end daemons as ordered on standard input; at its end, end everything that came of them."""
    from ullage.manager.running.process_tree import kill_tree

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: who leaves their parents becomes a child of this process
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order == END:
                break
            if "start" in order:
                with open(order["log"], "ab") as log:
                    started[order["start"]] = subprocess.Popen(
                        order["words"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        cwd=Path(order["log"]).parent,  # where one that crashes leaves its core
                    )
            elif (daemon := started.pop(order["kill"], None)) is not None:
                daemon.send_signal(order["signal"])
                daemon.wait(PATIENCE)
            print("done", flush=True)
    finally:
        with contextlib.suppress(ChildProcessError):
            while True:  # until no child is left; one that was forked meanwhile is met in the next round
                kill_tree(os.getpid())
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.01)


if __name__ == "__main__":
    guard()
