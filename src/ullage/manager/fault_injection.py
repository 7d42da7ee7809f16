"""Named points at which a test may kill the daemon: `ULLAGE_CRASH_AT=placed ullage serve`.

Each lies between two steps that must both happen or be repaired. `tests/manager/test_kills.py` uses all of them.
"""

import os
import signal

VARIABLE = "ULLAGE_CRASH_AT"

# In the order in which a job meets them.
POINTS = (
    "submit-before-commit",
    "order-before-commit",
    "submit-before-answer",
    "order-before-answer",
    "estimated-before-commit",
    "estimated",
    "edit-before-commit",
    "edited",
    "place-before-commit",
    "placed",
    "folder-made",
    "order-written",
    "supervisor-started",
    "running-before-commit",
    "running",
    "stop-before-commit",
    "stop-decided",
    "stop-written",
    "stop-sent",
    "over-before-commit",
    "over",
    "notify-before-delivery",
    "notify-delivered",
    "retry-before-commit",
    "requeue-before-commit",
    "requeued",
    "adopt-begun",
    "adopt-revoked",
)
# While the promise of a job that runs changes: it shrinks, or it grows.
REVISION_POINTS = ("revise-before-commit", "revised")
# The same inside the process that watches one job; there it is that process which ends.
SUPERVISOR_POINTS = ("supervisor-locked", "supervisor-forked", "supervisor-recorded", "supervisor-waited")


def crash_point(name: str) -> None:
    """End this process like `kill -9` if the environment names this point."""
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
