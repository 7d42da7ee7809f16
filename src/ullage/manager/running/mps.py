"""The ways to share a GPU: time slicing, or NVIDIA's Multi-Process Service, which the daemon keeps running."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ullage.hardware.mps import MISSING, MpsService, MpsUnavailable
from ullage.jobs.job_files import JobSpec
from ullage.units import MIB

_BETWEEN_LOOKS = 2.0  # seconds


class TimeSlicing:
    """Time slicing, which needs no service. The base of `Mps`."""

    name, watched = "time-slicing", False
    lost_at: float | None = None  # monotonic time of the last loss of the service

    def start(self) -> None:
        """Prepare for the first job."""

    def watch(self) -> None:
        """Check the service; called regularly."""

    def stop(self) -> None:
        """Stop the service after the last job."""

    def variables(self, spec: JobSpec, slots: Sequence[str]) -> dict[str, str]:
        return {}


class Mps(TimeSlicing):
    """One MPS control daemon for all GPUs, which is adopted if it answers, restarted if it stops answering, and ended
    after the last job."""

    name, watched = "mps", True

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._next_look = 0.0
        try:
            self._service = MpsService(folder)
        except MpsUnavailable:
            raise MpsUnavailable(f"--sharing mps {MISSING}. Install it, or serve with --sharing time-slicing") from None

    def start(self) -> None:
        """Start the control daemon, or adopt the one of an earlier daemon."""
        if self._service.start():
            self._say(f"MPS started; its log is in {self._service.log}")
        else:
            self._say("MPS is already running; the daemon watches it again")

    def watch(self) -> None:
        """Restart the control daemon if it does not answer."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _BETWEEN_LOOKS
        if self._service.answers():
            return
        self.lost_at = now
        self._say("MPS does not answer; it is started again")
        try:
            self.start()
        except MpsUnavailable as error:
            self._say(str(error))

    def stop(self) -> None:
        self._service.stop()

    def variables(self, spec: JobSpec, slots: Sequence[str]) -> dict[str, str]:
        variables = self._service.environment
        if spec.mps_threads is not None:
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(spec.mps_threads)
        if spec.mps_memory is not None:
            limit = f"{max(1, spec.mps_memory // MIB)}M"
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{place}={limit}" for place in range(len(slots)))
        return variables
