"""Processes that have imported what many children need: who asks for a child has it forked in place of started.

    warm = WarmProcesses(["torch"])
    run("ullage.estimation.jobs.child:estimate_here", request, private=Private(), warm=warm)

A child in a private world is as private as one that is started, see `waiting`. Wherever anything is in the way (the
system refuses namespaces, an import fails or starts threads), the child is started.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ullage.sandbox.guard import Order, Private
from ullage.sandbox.handover import Line, pair
from ullage.sandbox.limits import Limits, Watch
from ullage.sandbox.process_identity import this_process
from ullage.sandbox.recording import matters_at_start
from ullage.sandbox.starting import Rights, as_file, end_guard, kill_group, start_guard

_ENTRY = "ullage.sandbox.waiting:wait"
_IDLE = 300.0  # seconds
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # NumPy would start others on import, and a fork has one of them only
_MOST_WRITTEN = 1 << 26  # bytes, while it imports
_OFTEN, _SELDOM, _YOUNG = 0.1, 5.0, 10.0  # seconds between two looks at one, while it is so young and later


class WarmProcesses:
    """At most `most` processes that wait, each for one user, one Python and the variables that matter when it starts.

    Of other variables those count that were read on import: a child for which one of them is another is started.
    `limits` are those of a process that waits, while it imports and later.
    """

    def __init__(
        self, preload: Sequence[str], *, most: int = 4, idle: float = _IDLE, limits: Limits | None = None
    ) -> None:
        self._preload, self._most, self._idle, self._limits = list(preload), most, idle, limits or Limits()
        self._known: dict[Any, _Warm] = {}  # the one that was asked last comes last
        self._lock = threading.Lock()

    def line(
        self, program: list[str], env: Mapping[str, str], cwd: str | None, rights: Rights | None, network: bool
    ) -> Line | None:
        """A line for a guard to a process that waits, which is started if there is none."""
        places = env.get("PYTHONPATH", "").split(os.pathsep)
        cwd = "/" if all(os.path.isabs(place) for place in places if place) else cwd  # it imports from there
        variables = tuple(sorted((name, value) for name, value in env.items() if matters_at_start(name)))
        key = (*program, cwd, network, variables, tuple(sorted((rights or {}).items())))
        with self._lock:
            warm = self._known.pop(key, None)
            line = warm.line() if warm is not None else None
            if warm is None or line is None:
                warm = _Warm(
                    program, env, cwd, rights, network, {"preload": self._preload, "idle": self._idle}, self._limits
                )
                line = warm.line()
            self._known[key] = warm
            for old in [*self._known][: -self._most]:
                self._known.pop(old).close()
            return line

    def close(self) -> None:
        """End them all."""
        with self._lock:
            while self._known:
                self._known.popitem()[1].close()


class _Warm:
    """A process that waits."""

    def __init__(
        self, program: list[str], env: Mapping[str, str], cwd: str | None, rights: Rights | None,
        network: bool, request: dict[str, Any], limits: Limits,
    ) -> None:  # fmt: skip
        self._line, child_line = pair()
        told = {"parent": None, "record": None, "redirect": None, "network": None}
        number = child_line.fileno()
        order = Order(
            command=[*program, _ENTRY, str(number)], told=told, channel=number, parent=this_process(), cwd=cwd,
            private=Private(network=network), written=_MOST_WRITTEN, folder="", waits=True,
        )  # fmt: skip
        with as_file({**request, "line": number}) as file:
            self._process = start_guard(order, file, subprocess.DEVNULL, {**_ONE_THREAD, **env}, [number], rights)
        child_line.close()
        self._watch = Watch(self._process.pid, limits)
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="warm").start()

    def line(self) -> Line | None:
        """A new line to it; `None` if it has ended."""
        here, there = pair()
        try:
            self._line.send({}, [there.fileno()])
        except OSError:
            here.close()
            return None
        finally:
            there.close()
        return here

    def close(self) -> None:
        """End it, with what it has started."""
        self._ended.set()

    def _look(self) -> None:
        """Wait for its end, or end it: nothing that a user's packages do on import may take this machine's memory."""
        looks = 0
        while self._process.poll() is None and not self._ended.is_set() and self._watch.exceeded() is None:
            looks += 1
            self._ended.wait(_OFTEN if looks < _YOUNG / _OFTEN else _SELDOM)
        end_guard(self._process)
        kill_group(self._process)
        self._line.close()
