"""The command line as tests of several rooms use it: a real process, and a measured run to compare with."""

import subprocess
import sys

ROW = {
    "id": "one", "model": "mlp:x", "widths": [784, 256, 10], "batch": 512, "opt": "sgd", "precision": "fp32",
    "peak_alloc": 73022464, "peak_reserved": 92274688, "end_reserved": 92274688, "nvml_end": 870318080,
}  # fmt: skip


def ullage(*words):
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ullage", *map(str, words)], capture_output=True, text=True, timeout=300
    )
