"""NVIDIA's Multi-Process Service: a control daemon in folders of its own, so that it disturbs no other daemon."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ullage.errors import UllageError

CONTROL = "nvidia-cuda-mps-control"
MISSING = f"needs {CONTROL}, which NVIDIA's driver brings; it is not on PATH"
_LONGEST_PIPE = 80  # a Unix socket's path has 108 bytes at most, and MPS adds names of its own
_ANSWER = 10.0  # seconds


class MpsUnavailable(UllageError, RuntimeError):
    """This machine has no MPS, or it does not start."""


class MpsService:
    """One control daemon, which serves all GPUs that its environment shows. `start()` adopts it if it already answers.

    service = MpsService(Path("folder"))
    service.start()
    subprocess.run(["python", "train.py"], env=os.environ | service.environment)
    service.stop()
    """

    def __init__(self, folder: Path) -> None:
        self._pipe, self.log = _pipe_folder(folder), folder / "mps-log"
        control = shutil.which(CONTROL)
        if control is None:
            raise MpsUnavailable(f"MPS {MISSING}")
        self._control = control

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients and commands find this service."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    def start(self) -> bool:
        """Start the daemon; `False` if it is already running."""
        for folder in (self._pipe, self.log):
            folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        if self.answers():
            return False
        done = self._run([self._control, "-d"], None)
        if done is None:
            raise MpsUnavailable(f"{CONTROL} -d failed: it did not answer")
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip()[:300]
            raise MpsUnavailable(f"{CONTROL} -d failed: {words or f'exit code {done.returncode}'}")
        return True

    def answers(self) -> bool:
        return self._ask("get_server_list")

    def stop(self) -> None:
        self._ask("quit")

    def _ask(self, order: str) -> bool:
        done = self._run([self._control], order + "\n")
        return done is not None and done.returncode == 0

    def _run(self, command: list[str], text: str | None) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(
                command,
                input=text,
                text=True,
                capture_output=True,
                timeout=_ANSWER,
                check=False,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        except (subprocess.TimeoutExpired, OSError):
            return None


def _pipe_folder(folder: Path) -> Path:
    pipe = folder / "mps-pipe"
    if len(os.fsencode(pipe)) <= _LONGEST_PIPE:
        return pipe
    short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ullage-mps-{os.getuid()}-{short}"
