"""Estimates on the way in: each in a process of its own with limits of time and memory, kept by content."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ullage.manager.questions import Question
from ullage.manager.settings import Estimating
from ullage.units import format_bytes, format_duration

_LOOK = 0.3  # seconds between two looks at its memory
_LONGEST_ANSWER = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """An estimate that somebody waits for, by its key; `env`, `cwd` and whose rights are the job's."""

    key: str
    estimator: str
    questions: Sequence[Question]
    gpus: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    rights: Mapping[str, int | str]


@dataclass(frozen=True)
class Answer:
    """What came of it: the bound, or `None` and why not."""

    key: str
    upper: int | None
    note: str
    seconds: float


class Estimates:
    """Makes the estimates that are asked for, a few at once; `done` is told of each, in the event loop's thread."""

    def __init__(self, rules: Estimating, done: Callable[[Answer], None]) -> None:
        self._rules, self._done = rules, done
        self._waiting: dict[str, Wanted] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def want(self, wanted: Wanted) -> None:
        """Ask for an estimate; one that is on its way already is not made twice."""
        if wanted.key not in self._running:
            self._waiting.setdefault(wanted.key, wanted)
        self._begin()

    @property
    def pending(self) -> int:
        """How many are waited for."""
        return len(self._waiting) + len(self._running)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._rules.at_once:
            key = next(iter(self._waiting))
            wanted = self._waiting.pop(key)
            self._running[key] = asyncio.get_running_loop().create_task(self._make(wanted))

    async def _make(self, wanted: Wanted) -> None:
        began = time.monotonic()
        try:
            upper, note = _read(await self._ask(wanted), wanted.estimator)
        except OSError as error:
            upper, note = None, f"not estimated: {error.strerror or error}"
        finally:
            self._running.pop(wanted.key, None)
        self._done(Answer(wanted.key, upper, note, time.monotonic() - began))
        self._begin()

    async def _ask(self, wanted: Wanted) -> dict[str, Any]:
        order = {
            "parent": os.getpid(),
            "estimator": wanted.estimator,
            "gpus": sorted(set(wanted.gpus)),
            "timeout": self._rules.timeout,
            "questions": [asdict(question) for question in wanted.questions],
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "ullage.manager.estimating_child", cwd=wanted.cwd, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=_environment(wanted.env), limit=_LONGEST_ANSWER, **_as_user(wanted.rights),
        )  # fmt: skip
        speaking = asyncio.ensure_future(process.communicate(json.dumps(order).encode()))
        try:
            too_much = await self._watch(process.pid, speaking)
            if too_much is not None:
                return {"failed": too_much}
            output, _ = speaking.result()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            speaking.cancel()
        lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {"failed": f"its process ended with {process.returncode}"}

    async def _watch(self, pid: int, speaking: asyncio.Future[Any]) -> str | None:
        """Until it has spoken (`None`), or the reason to give it up."""
        deadline = time.monotonic() + self._rules.timeout
        while not speaking.done():
            await asyncio.wait({speaking}, timeout=_LOOK)
            if speaking.done():
                break
            if time.monotonic() > deadline:
                return f"it took longer than {format_duration(self._rules.timeout)}"
            used = await asyncio.to_thread(_memory_of, pid)
            if used > self._rules.memory:
                return f"it took more than {format_bytes(self._rules.memory)} of this machine's memory"
        return None

    async def close(self) -> None:
        """Give up all that are under way; their jobs are asked about again later."""
        tasks = list(self._running.values())
        self._waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read(answer: dict[str, Any], estimator: str) -> tuple[int | None, str]:
    if "failed" in answer:
        return None, f"not estimated: {str(answer['failed'])[:400]}"
    fits = "" if answer["fits"] else f", which does not fit on {answer['gpu']}"
    return int(answer["upper"]), f"estimated by {estimator} for {answer['gpu']}{fits}"


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**env, **kept}


def _as_user(rights: Mapping[str, int | str]) -> dict[str, Any]:
    if not rights:
        return {}
    groups = os.getgrouplist(str(rights["user"]), int(rights["gid"]))
    return {"user": rights["uid"], "group": rights["gid"], "extra_groups": groups}


def _memory_of(pid: int) -> int:
    """Resident memory of a process and all that it started."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total
