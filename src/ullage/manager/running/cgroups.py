"""Limits of host memory by cgroup v2, where the system lets this process make groups."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class Cgroups:
    """One group an attempt below this process's own one; `available` says whether that works here, `why` why not."""

    def __init__(self, root: Path = _ROOT, own: Path | None = None) -> None:
        self._parent: Path | None = None
        self.why = self._prepare(root, own)

    @property
    def available(self) -> bool:
        """Whether limits can be kept."""
        return self._parent is not None

    def _prepare(self, root: Path, own: Path | None) -> str:
        if not (root / "cgroup.controllers").exists():
            return "this system has no cgroup v2"
        group = own if own is not None else _own_group(root)
        parent, daemon = group / "ullage-jobs", group / "ullage-daemon"
        try:
            parent.mkdir(exist_ok=True)
            daemon.mkdir(exist_ok=True)  # a group that has limits for its children may have no processes itself
            (daemon / "cgroup.procs").write_text(str(os.getpid()))
            for folder in (parent.parent, parent):
                (folder / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            return f"{parent} cannot be used: {error.strerror}"
        self._parent = parent
        return ""

    def make(self, token: str, limit: int) -> str | None:
        """A group with that limit of memory; its folder, or `None` where it cannot be made."""
        if self._parent is None:
            return None
        folder = self._parent / token
        try:
            folder.mkdir(exist_ok=True)
            (folder / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):  # swap may not be counted here
                (folder / "memory.swap.max").write_text("0")
            with contextlib.suppress(OSError):  # all of a job ends together, not one worker of it
                (folder / "memory.oom.group").write_text("1")
        except OSError:
            return None
        return str(folder)

    def remove(self, token: str) -> None:
        """The attempt is over."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._parent / token)


def _own_group(root: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return root / line[3:].lstrip("/")
    return root
