"""The process that commands of tests are forked from."""

import os
import signal
import subprocess
import sys

import pytest
from tests import nursery
from tests.manager.conftest import until
from tests.paths import ROOT, shown_to_all

from ullage.sandbox.process_identity import stat_field

STARTS = """
import os, sys, time
from tests.nursery import Nursery
nursery = Nursery()
child = nursery.start(["serve", "--virtual", "1xT4", "--estimator", "none"], dict(os.environ), [os.devnull] * 3)
print(nursery.pid, child.pid, flush=True)
time.sleep(1000)
"""


def test_it_and_its_commands_end_with_a_killed_run(tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    variables = os.environ | {"ULLAGE_HOME": str(tmp_path), "PYTHONPATH": paths}
    run = subprocess.Popen([sys.executable, "-c", STARTS], env=variables, stdout=subprocess.PIPE, text=True)
    started = [int(word) for word in run.stdout.readline().split()]
    until(lambda: (tmp_path / "run").exists(), "the daemon to begin")
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    until(lambda: all(stat_field(pid, 0) in (None, "Z") for pid in started), "both to end")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_commands_see_what_a_test_mounts_later(tmp_path):
    try:
        shown_to_all([tmp_path])  # as other tests of this process do, if the clone is in a closed folder
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system refuses mounts")
    (tmp_path / "file").touch()
    assert nursery.current().run([], {}, str(tmp_path), program="import os; os.stat('file')").returncode == 0
    subprocess.run(["umount", "-l", tmp_path], check=True)
