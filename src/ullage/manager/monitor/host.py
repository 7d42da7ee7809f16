"""CPU and RAM: the part of the machine that this process may use, and the use of process trees."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ullage.sandbox.process_identity import children, descendants

_CGROUPS = Path("/sys/fs/cgroup")
_IDLE = 0.7  # of a core, since no core is ever completely idle


@dataclass(frozen=True)
class HostReading:
    """A process and its descendants at one moment; `None` is unknown. `cpu` is in cores, and unknown at first.
    `ram` is the sum of resident bytes, with shared pages counted in each process."""

    pid: int
    processes: int
    cpu: float | None
    ram: int | None
    user: str | None = None
    command: str | None = None


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Return the number of cores that this process may use, by its affinity and the quota of its cgroup.

    >>> 1 <= usable_cores() <= (os.cpu_count() or 1)
    True
    """
    quotas = [line.split() for line in _limits("cpu.max", cgroups)]
    shares = [int(quota[0]) / int(quota[1]) for quota in quotas if quota[0] != "max"]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *shares])))


def usable_memory(cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that this process may use: the machine's, or fewer if its cgroup has a limit.

    >>> 0 < usable_memory() <= psutil.virtual_memory().total
    True
    """
    limits = [int(line) for line in _limits("memory.max", cgroups) if line != "max"]
    return min([int(psutil.virtual_memory().total), *limits])


class LoadSince:
    """The load of all processors since its creation: busy cores, and the share stolen by other virtual machines.

    >>> cores, stolen = LoadSince().read()
    >>> cores >= 0 and 0 <= stolen <= 1
    True
    """

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def read(self) -> tuple[float, float]:
        spent = {name: getattr(psutil.cpu_times(), name) - value for name, value in self._before._asdict().items()}
        within = ("guest", "guest_nice")  # user and nice include these
        everything = max(sum(value for name, value in spent.items() if name not in within), 1e-9)
        stolen = max(0.0, spent.get("steal", 0.0)) / everything
        idle = (spent["idle"] + spent.get("iowait", 0.0)) / everything
        return max(0.0, 1 - idle - stolen) * (os.cpu_count() or 1), stolen


class IdleCores:
    """The idle processor cores, read at most once a second; `take` counts one as used.

    >>> IdleCores(cores=0).take()
    False
    """

    def __init__(self, cores: int | None = None) -> None:
        self._cores = usable_cores() if cores is None else cores
        self._load, self._since, self._left = LoadSince(), time.monotonic(), float(self._cores)

    def look(self) -> None:
        """Read the load since the last reading, if that is at least a second old."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            busy, _ = self._load.read()
            self._load, self._since = LoadSince(), now
            self._left = min(self._cores, (os.cpu_count() or 1) - busy)

    def take(self) -> bool:
        """Return whether a core is idle, and count it as used."""
        self.look()
        is_idle = self._left >= _IDLE
        self._left -= is_idle
        return is_idle


def _limits(name: str, cgroups: Path) -> list[str]:
    """Read a limit of the process's own cgroup (v2) and of those above it."""
    own = "/"
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), own)
    folder, limits = cgroups / own.lstrip("/"), []
    for place in (folder, *folder.parents):
        if cgroups in (place, *place.parents):
            with contextlib.suppress(OSError):
                limits.append((place / name).read_text().strip())
    return limits


class HostWatch:
    """Reads process trees in one walk; CPU is the use between two readings. It misses the last use before a process
    ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[psutil.Process, float] = {}  # CPU time by process; a reused pid is another process
        self._about: dict[psutil.Process, tuple[str | None, str | None]] = {}
        self._processes: dict[int, psutil.Process] = {}
        self._last: float | None = None

    def look(self, roots: Iterable[int]) -> dict[int, HostReading]:
        roots = list(roots)
        now, before = self._clock(), self._last
        if not roots:
            return {}
        below = children()
        seconds: dict[psutil.Process, float] = {}
        about: dict[psutil.Process, tuple[str | None, str | None]] = {}
        readings = {}
        elapsed = None if before is None else now - before
        for root in roots:
            tree = [process for pid in (root, *descendants(root, below)) if (process := self._process(pid)) is not None]
            if tree and tree[0].pid == root:
                readings[root] = self._read(tree, elapsed, seconds, about)
        self._seconds, self._about, self._last = seconds, about, now
        self._processes = {process.pid: process for process in seconds}
        return readings

    def _process(self, pid: int) -> psutil.Process | None:
        """Return the process with a pid, as the known object if it is still the same process."""
        known = self._processes.get(pid)
        try:
            if known is None or not known.is_running():
                known = self._processes[pid] = psutil.Process(pid)
        except psutil.Error:
            self._processes.pop(pid, None)
            return None
        return known

    def _read(
        self,
        tree: list[psutil.Process],
        elapsed: float | None,
        seconds: dict[psutil.Process, float],
        about: dict[psutil.Process, tuple[str | None, str | None]],
    ) -> HostReading:
        used, ram, seen = 0.0, 0, 0
        known_before = False
        for process in tree:
            try:
                with process.oneshot():
                    times, resident = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue  # it has ended, or we may not read it
            seen += 1
            ram += resident
            seconds[process] = times.user + times.system
            known_before = known_before or process in self._seconds
            # A process that is new since the last reading used all of its CPU time since then.
            used += max(0.0, seconds[process] - self._seconds.get(process, 0.0))
        root = tree[0]
        about[root] = self._about.get(root) or _about(root)
        user, command = about[root]
        cpu = used / elapsed if known_before and elapsed else None
        return HostReading(root.pid, seen, cpu, ram if seen else None, user, command)


def _about(process: psutil.Process) -> tuple[str | None, str | None]:
    user = command = None
    with contextlib.suppress(psutil.Error, KeyError):
        user = process.username()
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline()) or process.name()
    return user, command
