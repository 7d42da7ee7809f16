"""The command line as tests of several rooms use it: a real process, and a measured run to compare with."""

import atexit
import functools
import os
import subprocess

from tests.nursery import Nursery

ROW = {
    "id": "one", "model": "mlp:x", "widths": [784, 256, 10], "batch": 512, "opt": "sgd", "precision": "fp32",
    "peak_alloc": 73022464, "peak_reserved": 92274688, "end_reserved": 92274688, "nvml_end": 870318080,
}  # fmt: skip


@functools.cache
def _nursery():
    """Most commands need PyTorch, whose import takes longer than what they do."""
    made = Nursery(dict(os.environ), "torch", "ullage.estimation", "ullage.virtual")
    atexit.register(made.close)
    return made


def ullage(*words) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    return _nursery().run([str(word) for word in words], dict(os.environ), os.getcwd(), "", timeout=300)
