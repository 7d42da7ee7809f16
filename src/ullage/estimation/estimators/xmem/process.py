"""Running the CPU training in a process of its own, with a time limit and a guard for this machine's memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.xmem.child import Request
from ullage.estimation.estimators.xmem.replay import CpuTrace
from ullage.units import format_bytes, format_duration

_EVERY = 0.05  # seconds between two looks at the process
_SHARE = 0.8  # of the memory that is available at the start
_LEFT = 0.04  # of the machine's memory that must stay free for everybody else


class TooLarge(UllageError, RuntimeError):
    """The run on the CPU was stopped: it took too much memory or too much time. There is no estimate then.

    >>> raise TooLarge("more memory than this machine has")
    Traceback (most recent call last):
    ...
    ullage.estimation.estimators.xmem.process.TooLarge: more memory than this machine has
    """


@dataclass(frozen=True)
class Limits:
    """How long the run may take (seconds) and how much of this machine's memory (bytes; `None`: what is available).

    >>> Limits(memory=2**30).bytes_allowed()
    1073741824
    """

    timeout: float = 600.0
    memory: int | None = None

    def bytes_allowed(self) -> int:
        """The limit in bytes."""
        return int(psutil.virtual_memory().available * _SHARE) if self.memory is None else self.memory


def run_on_cpu(request: Request, limits: Limits) -> CpuTrace:
    """The trace of the request's training; `TooLarge` if a limit stopped it, `InvalidValue` if it failed itself."""
    allowed = limits.bytes_allowed()
    with tempfile.TemporaryDirectory(prefix="ullage-xmem-") as folder:
        request.answer = str(Path(folder) / "answer")
        errors = Path(folder) / "errors"
        with errors.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", "ullage.estimation.estimators.xmem.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env=_environment(),
            )
        try:
            _send(child, request)
            _watch(child, limits.timeout, allowed)
        finally:
            child.kill()
            child.wait()
        if not Path(request.answer).is_file():
            raise InvalidValue(f"training on the CPU ended without an answer: {_last_line(errors)}")
        answer: CpuTrace | str = pickle.loads(Path(request.answer).read_bytes())
    if isinstance(answer, str):
        raise InvalidValue(answer)
    return answer


def _environment() -> dict[str, str]:
    """This process's own, with the same places to import from; threads that wait must not hold the cores."""
    places = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {"PYTHONPATH": places, "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


def _send(child: subprocess.Popen[bytes], request: Request) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(pickle.dumps(request))
        child.stdin.close()
    except BrokenPipeError:
        pass  # it ended at once; what it wrote says why


def _watch(child: subprocess.Popen[bytes], timeout: float, allowed: int) -> None:
    """Wait for the process; stop it at a limit."""
    begin = time.monotonic()
    while child.poll() is None:
        if time.monotonic() - begin > timeout:
            raise TooLarge(f"three training steps on the CPU took longer than {format_duration(timeout)}")
        try:
            used = psutil.Process(child.pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
        memory = psutil.virtual_memory()
        if used > allowed or memory.available < _LEFT * memory.total:
            raise TooLarge(
                f"three training steps on the CPU need more memory than this machine gives: {format_bytes(used)} were "
                f"in use, {format_bytes(allowed)} are allowed of {format_bytes(memory.total)}"
            )
        time.sleep(_EVERY)


def _last_line(errors: Path) -> str:
    lines = errors.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it was stopped from outside"
