"""CPU and RAM of processes and all that they started."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class HostReading:
    """A process and its descendants at one moment; `None` is unknown.

    `cpu` is in cores (1.5 = one and a half cores busy since the look before) and unknown at the first look. `ram` is
    the sum of resident bytes; pages that processes share, as data loaders' workers do, are counted in each of them.

    >>> HostReading(pid=1, processes=3, cpu=None, ram=1 << 30).cpu is None
    True
    """

    pid: int
    processes: int
    cpu: float | None
    ram: int | None
    user: str | None = None
    command: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON.

        >>> HostReading(1, 1, None, None).to_dict()["processes"]
        1
        """
        return asdict(self)


class HostWatch:
    """Looks at the trees of some processes. CPU is what was used between two looks.

        watch = HostWatch()
        watch.look([pid])
        ...
        print(watch.look([pid])[pid].cpu)

    A look goes through all processes of the machine once, whatever the number of trees. What a process used between the
    last look and its end is not seen.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[psutil.Process, float] = {}  # CPU time by process; equal only with the same start time
        self._about: dict[psutil.Process, tuple[str | None, str | None]] = {}
        self._last: float | None = None

    def look(self, roots: Iterable[int]) -> dict[int, HostReading]:
        """One reading for each root that lives; a pid that is not there (or not in this container) is left out."""
        roots = list(roots)
        now, before = self._clock(), self._last
        if not roots:
            return {}
        living, children = _all_processes()
        seconds: dict[psutil.Process, float] = {}
        about: dict[psutil.Process, tuple[str | None, str | None]] = {}
        found = {}
        for root in roots:
            if root in living:
                elapsed = None if before is None else now - before
                found[root] = self._read(root, _tree(root, children), living, elapsed, seconds, about)
        self._seconds, self._about, self._last = seconds, about, now
        return found

    def _read(
        self, root: int, pids: list[int], living: dict[int, psutil.Process], elapsed: float | None,
        seconds: dict[psutil.Process, float], about: dict[psutil.Process, tuple[str | None, str | None]],
    ) -> HostReading:  # fmt: skip
        used, ram, seen = 0.0, 0, 0
        known_before = False
        for pid in pids:
            process = living[pid]
            try:
                with process.oneshot():
                    times, resident = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue  # ended on the way, or not ours to ask
            seen += 1
            ram += resident
            seconds[process] = times.user + times.system
            known_before = known_before or process in self._seconds
            # A process that was not there at the last look has used all it has since then.
            used += max(0.0, seconds[process] - self._seconds.get(process, 0.0))
        process = living[root]
        about[process] = self._about.get(process) or _about(process)
        user, command = about[process]
        cpu = used / elapsed if known_before and elapsed else None
        return HostReading(root, seen, cpu, ram if seen else None, user, command)


def _all_processes() -> tuple[dict[int, psutil.Process], dict[int, list[int]]]:
    living: dict[int, psutil.Process] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        living[process.pid] = process
        parent = process.info["ppid"]
        if parent is not None:
            children[parent].append(process.pid)
    return living, children


def _tree(root: int, children: dict[int, list[int]]) -> list[int]:
    found, todo = [], [root]
    seen = {root}
    while todo:
        pid = todo.pop()
        found.append(pid)
        fresh = [child for child in children.get(pid, ()) if child not in seen]
        seen.update(fresh)
        todo.extend(fresh)
    return found


def _about(process: psutil.Process) -> tuple[str | None, str | None]:
    user = command = None
    with contextlib.suppress(psutil.Error, KeyError):
        user = process.username()
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline()) or process.name()
    return user, command
