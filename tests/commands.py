"""The command line as tests of several rooms use it: a real process, and a measured run to compare with."""

import os
import subprocess
import sys

from tests import nursery

ROW = {
    "id": "one",
    "model": "mlp:x",
    "widths": [784, 256, 10],
    "batch": 512,
    "opt": "sgd",
    "precision": "fp32",
    "peak_alloc": 73022464,
    "peak_reserved": 92274688,
    "end_reserved": 92274688,
    "nvml_end": 870318080,
}


def ullage(*words) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    return nursery.current().run([str(word) for word in words], dict(os.environ), os.getcwd(), "", timeout=300)


def typed_in(monkeypatch, capsys):
    """A function that runs a command in this process: its exit code, and what it prints on both streams."""
    from ullage.cli.main import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ullage", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
