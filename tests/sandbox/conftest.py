import os
import sys
import time
from pathlib import Path

import pytest

from ullage.sandbox.environment import environment
from ullage.sandbox.process_identity import start_of

HERE = str(Path(__file__).parent)


@pytest.fixture
def env(monkeypatch):
    """The environment of children that can import `children`."""
    monkeypatch.setattr(sys, "path", [HERE, *sys.path])
    return environment(import_from=[HERE])


@pytest.fixture
def until():
    """Wait for something that another process does."""

    def wait(condition, what, seconds=60.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited too long: {what}"
            time.sleep(0.01)

    return wait


@pytest.fixture
def gone(until):
    """Wait until the processes whose numbers are in a file are gone."""

    def wait(file):
        pids = [int(word) for word in file.read_text().split()]
        assert os.getpid() not in pids and pids
        until(lambda: all(start_of(pid) is None for pid in pids), f"{pids} are still there")

    return wait
