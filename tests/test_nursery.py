"""The process that commands of tests are forked from."""

import os
import signal
import subprocess
import sys

from tests.manager.conftest import until
from tests.paths import ROOT

from ullage.sandbox.process_tree import stat_field

STARTS = """
import os, sys, time
from tests.nursery import Nursery
nursery = Nursery()
child = nursery.start(["serve", "--virtual", "1xT4", "--estimator", "none"], dict(os.environ), [os.devnull] * 3)
print(nursery.pid, child.pid, flush=True)
time.sleep(1000)
"""


def test_neither_it_nor_its_commands_outlive_a_run_that_is_killed(tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    variables = os.environ | {"ULLAGE_HOME": str(tmp_path), "PYTHONPATH": paths}
    run = subprocess.Popen([sys.executable, "-c", STARTS], env=variables, stdout=subprocess.PIPE, text=True)
    started = [int(word) for word in run.stdout.readline().split()]
    until(lambda: (tmp_path / "run").exists(), "the daemon to begin")
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    until(lambda: all(stat_field(pid, 0) in (None, "Z") for pid in started), "both to end")
