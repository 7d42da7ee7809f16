"""Named points at which a test may kill the daemon: `ULLAGE_CRASH_AT=placed ullage serve`.

Each lies between two steps; if only the first happens, the next daemon must repair it. `test_kills.py`,
`test_late_estimates.py` and `slurm/test_watch.py` in `tests/manager` use all of them.
"""

import os
import signal

VARIABLE = "ULLAGE_CRASH_AT"


def crash_point(name: str) -> None:
    """End this process like `kill -9` if the environment names this point."""
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
