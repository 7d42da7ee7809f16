"""The process in which a script runs on a virtual GPU: `python -P -m ullage.estimate.script_child JOB`.

The job file says what to run; the answer goes to the file that it names, once, at the first of: the script has been
followed far enough, has ended, has failed, or its time is over. The script's output stays on this process's own
standard output and error. Not for use by itself: `estimate_script` starts it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.allocator import AllocatorConfig
    from ullage.gpus import GPU

JOURNAL = "files"  # beside the answer: which files to put back afterwards
GRACE = 5.0  # seconds that a script has for its own cleaning up after it was stopped


@dataclass(frozen=True)
class Job:
    """What the child process is asked to do."""

    path: str
    args: list[str]
    module: bool
    gpu: GPU
    steps: int | None
    timeout: float
    limited: bool
    answer: str
    config: AllocatorConfig | None = None
    trace_file: str | None = None


class Answer:
    """Writes what became of a run, once; what comes later is not written."""

    def __init__(self, job: Job) -> None:
        self._path, self._lock = Path(job.answer), threading.Lock()
        self._owner = os.getpid()
        self.given = False

    def give(self, answer: dict[str, Any]) -> None:
        """Write the answer, if it is the first."""
        with self._lock:
            if self.given or os.getpid() != self._owner:  # a worker process has nothing to say
                return
            written = self._path.with_suffix(".part")
            written.write_text(json.dumps(answer))
            written.replace(self._path)
            self.given = True


def main(job_file: str) -> None:
    """Run the job; leaves by `os._exit` where the script does not let itself be stopped."""
    job: Job = pickle.loads(Path(job_file).read_bytes())
    from ullage.estimate.script_run import ScriptRun

    answer = Answer(job)
    run = ScriptRun(job, answer.give)
    _stop_in_time(job, run)
    _end_with(os.getppid())
    code = run.run()
    leave_after(GRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _stop_in_time(job: Job, run: Any) -> None:
    def wait() -> None:
        time.sleep(job.timeout)
        run.time_is_over()
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="ullage-timeout").start()


def _end_with(parent: int) -> None:
    """Whoever asked may be killed; then nobody waits for the answer, and the script must not run on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="ullage-parent").start()


def leave_after(seconds: float) -> None:
    """Threads and exit handlers of a script that was stopped must not keep the process for ever."""

    def wait() -> None:
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="ullage-exit").start()


if __name__ == "__main__":
    from ullage.estimate import script_child  # so that there is one Job, not one of `__main__` too

    script_child.main(sys.argv[1])
