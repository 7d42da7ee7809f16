"""How jobs share a GPU: by time slicing, or through NVIDIA's Multi-Process Service, which the daemon looks after."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ullage.errors import UllageError
from ullage.units import MIB
from ullage.workloads.job_files import JobSpec

CONTROL = "nvidia-cuda-mps-control"
_LONGEST_PIPE = 80  # a Unix socket's path has 108 bytes at most, and MPS adds names of its own
_ANSWER, _BETWEEN_LOOKS = 10.0, 2.0  # seconds


class SharingUnavailable(UllageError, RuntimeError):
    """This machine cannot share GPUs in the way that was asked for."""


class Sharing:
    """Time slicing: what CUDA does by itself. The base of `Mps`."""

    name, watched = "time-slicing", False
    lost_at: float | None = None  # by the monotonic clock, when the service was last found lost

    def start(self) -> None:
        """Make it ready for the first job."""

    def watch(self) -> None:
        """Look after it; called again and again."""

    def stop(self) -> None:
        """No job will come any more."""

    def variables(self, spec: JobSpec, slots: Sequence[str]) -> dict[str, str]:
        """What a job's environment needs for it."""
        return {}


class Mps(Sharing):
    """One MPS control daemon for all GPUs of this daemon, with folders of its own, so that no other one is disturbed.

    It is adopted if it still answers, restarted when it stops answering, and ended when no job is left.
    """

    name, watched = "mps", True

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._pipe, self._log = _pipe_folder(folder), folder / "mps-log"
        self._next_look = 0.0
        found = shutil.which(CONTROL)
        if found is None:
            raise SharingUnavailable(
                f"--sharing mps needs {CONTROL}, which NVIDIA's driver brings; it is not on PATH. "
                "Install it, or serve with --sharing time-slicing"
            )
        self._control = found

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients and commands find this service."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}

    def start(self) -> None:
        """Start the control daemon, or take over the one that a daemon before this one left to its jobs."""
        for folder in (self._pipe, self._log):
            folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        if self._ask("get_server_list") is not None:
            self._say("MPS is running already; it is looked after again")
            return
        done = self._run([self._control, "-d"], None)
        if done is None or done.returncode != 0:
            words = "it did not answer" if done is None else (done.stderr or done.stdout).strip()[:300]
            raise SharingUnavailable(f"{CONTROL} -d failed: {words or f'exit code {done.returncode}'}")  # type: ignore[union-attr]
        self._say(f"MPS started; its log is in {self._log}")

    def watch(self) -> None:
        """Restart it when it does not answer; jobs that fail by that are tried again."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _BETWEEN_LOOKS
        if self._ask("get_server_list") is not None:
            return
        self.lost_at = now
        self._say("MPS does not answer; it is started again")
        try:
            self.start()
        except SharingUnavailable as error:
            self._say(str(error))

    def stop(self) -> None:
        """End it; its servers end with it."""
        self._ask("quit")

    def variables(self, spec: JobSpec, slots: Sequence[str]) -> dict[str, str]:
        """Where to find it, and the job's share of threads and memory where it asked for one."""
        found = {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}
        if spec.mps_threads is not None:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(spec.mps_threads)
        if spec.mps_memory is not None:
            limit = f"{max(1, spec.mps_memory // MIB)}M"
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{place}={limit}" for place in range(len(slots)))
        return found

    def _ask(self, order: str) -> str | None:
        done = self._run([self._control], order + "\n")
        return None if done is None or done.returncode != 0 else done.stdout

    def _run(self, command: list[str], text: str | None) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(
                command, input=text, text=True, capture_output=True, timeout=_ANSWER, check=False,
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, OSError):
            return None


def _pipe_folder(folder: Path) -> Path:
    pipe = folder / "mps-pipe"
    if len(os.fsencode(pipe)) <= _LONGEST_PIPE:
        return pipe
    short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ullage-mps-{os.getuid()}-{short}"


def sharing_of(name: str, folder: Path, say: Callable[[str], None]) -> Sharing:
    """The way of sharing of that name."""
    return Mps(folder, say) if name == "mps" else Sharing()
