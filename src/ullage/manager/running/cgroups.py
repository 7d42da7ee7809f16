"""Creates a cgroup v2 for each attempt, if this process may. The kernel kills a group as a whole, and limits its host
memory and cores if it has these controllers."""

import contextlib
import os
from pathlib import Path

JOBS = "ullage-jobs"  # the group of all groups of attempts
_PERIOD = 100_000  # microseconds of the period of the core quota


class Cgroups:
    """Groups `ullage-jobs/TOKEN` below this process's own. `why` explains why memory limits are not `available`."""

    def __init__(self, root: Path | None = None, own: Path | None = None, wanted: bool = True) -> None:
        self._parent: Path | None = None
        self.available = False
        self.why = self._prepare(root, own) if wanted else "running.cgroup is off in the settings"

    @property
    def usable(self) -> bool:
        return self._parent is not None

    def _prepare(self, root: Path | None, own: Path | None) -> str:
        root = own_root() if root is None else root
        if root is None or not (root / "cgroup.controllers").exists():
            return "this system has no cgroup v2"
        group = _own_group(root) if own is None else own
        parent = group / JOBS
        try:
            parent.mkdir(exist_ok=True)
        except OSError as error:
            return f"{parent} cannot be used: {error.strerror}"
        if not all(os.access(place / "cgroup.procs", os.W_OK) for place in (group, parent) if own is None):
            return f"{parent} cannot be used: no process may be moved there"
        self._parent = parent
        if "memory" not in (root / "cgroup.controllers").read_text().split():
            return "its memory controller is not in cgroup v2"
        daemon = group / "ullage-daemon"
        try:
            daemon.mkdir(exist_ok=True)  # a group that limits its children must not contain processes
            (daemon / "cgroup.procs").write_text(str(os.getpid()))
            for folder in (group, parent):
                with contextlib.suppress(OSError):  # without this controller, the number of cores is not enforced
                    (folder / "cgroup.subtree_control").write_text("+cpu")
                (folder / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            return f"{parent} cannot limit memory: {error.strerror}"
        self.available = True
        return ""

    def make(self, token: str, memory: int | None = None, cores: int | None = None) -> str | None:
        """Make a group, perhaps with limits; return its folder, or `None`."""
        if self._parent is None:
            return None
        folder = self._parent / token
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            return None
        if memory is not None and self.available:
            for name, value in (
                ("memory.max", str(memory)),
                ("memory.swap.max", "0"),  # missing if swap is not counted
                ("memory.oom.group", "1"),  # the kernel kills all of a job, not just one worker
            ):
                with contextlib.suppress(OSError):
                    (folder / name).write_text(value)
        if cores is not None and self.available:
            with contextlib.suppress(OSError):
                (folder / "cpu.max").write_text(f"{cores * _PERIOD} {_PERIOD}")
        return str(folder)


def own_root() -> Path | None:
    """Return the mount of cgroup v2: /sys/fs/cgroup, or a folder of it next to version 1."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if after.split()[:1] == ["cgroup2"]:
                return Path(before.split()[4])
    return None


def _own_group(root: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return root / line[3:].lstrip("/")
    return root
