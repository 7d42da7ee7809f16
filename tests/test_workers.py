"""Running tests in forked workers: nothing that goes wrong in one may end in a green run, or hold it up."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.manager.conftest import until
from tests.paths import ROOT

from ullage.sandbox.process_identity import stat_field

CONFTEST = 'pytest_plugins = ["tests.workers"]\nfrom tests import workers\nworkers.GRACE = 2.0\n'
GOOD = "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_good(n):\n    pass\n"


@pytest.fixture
def command(tmp_path):
    """The command that runs the test files which a test writes into its folder."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_good.py").write_text(GOOD)
    words = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--workers", "2", "--rootdir", str(tmp_path)]
    return [sys.executable, "-m", "pytest", *words, f"--basetemp={tmp_path / 'temporary'}", str(tmp_path)]


def environment():
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take long to import


def run(command, *more):
    return subprocess.run([*command, *more], env=environment(), capture_output=True, text=True)


def test_every_test_runs_once(command, tmp_path):
    count = "import os, pytest\n@pytest.mark.parametrize('n', range(30))\ndef test_n(n):\n    "
    count += "with open(os.path.join(os.path.dirname(__file__), 'ran'), 'a') as file:\n        file.write(f'{n}\\n')\n"
    (tmp_path / "test_counting.py").write_text(count)
    done = run(command)
    assert done.returncode == 0 and "50 passed" in done.stdout and "of processor time" in done.stdout
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == [*range(30)]


def test_a_failing_test_fails_the_run(command, tmp_path):
    (tmp_path / "test_bad.py").write_text("def test_bad():\n    print('what it printed')\n    assert 1 == 2\n")
    done = run(command)
    assert done.returncode == 1 and "1 failed, 20 passed" in done.stdout
    assert "assert 1 == 2" in done.stdout and "what it printed" in done.stdout


def test_an_error_of_a_shared_fixture_fails_the_run(command, tmp_path):
    fixture = (
        "import pytest\n@pytest.fixture(scope='session')\ndef thing():\n    yield 1\n    raise OSError('at the end')\n"
    )
    (tmp_path / "test_bad.py").write_text(fixture + "def test_fine(thing):\n    assert thing\n")
    done = run(command)
    assert done.returncode == 1 and "1 error" in done.stdout and "the end" in done.stdout


def test_a_file_that_cannot_be_imported_fails_the_run(command, tmp_path):
    (tmp_path / "test_bad.py").write_text("import no_such_module\n")
    done = run(command)
    assert done.returncode == pytest.ExitCode.INTERRUPTED and "no_such_module" in done.stdout


def test_a_test_that_ends_its_process_fails_alone(command, tmp_path):
    (tmp_path / "test_bad.py").write_text("import os\ndef test_bad():\n    os._exit(0)\ndef test_after():\n    pass\n")
    done = run(command)
    assert done.returncode == 1 and "1 failed, 21 passed" in done.stdout
    assert "the process that ran this test ended with exit code 0" in done.stdout


@pytest.mark.parametrize("deaf", [False, True])
def test_a_hanging_test_fails_alone(command, tmp_path, deaf):
    text = "import pytest, signal, time\n@pytest.mark.timeout(1)\ndef test_bad():\n    "
    text += "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    " if deaf else ""
    (tmp_path / "test_bad.py").write_text(text + "time.sleep(1000)\n")
    done = run(command)
    assert done.returncode == 1 and "1 failed, 20 passed" in done.stdout
    assert ("the process that ran this test hung" if deaf else "from pytest-timeout") in done.stdout


def test_no_worker_outlives_a_run_that_is_killed(command, tmp_path):
    text = f"import os, time\ndef test_slow():\n    open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} ')\n"
    (tmp_path / "test_slow.py").write_text(text + "    time.sleep(1000)\n")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    worker = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the test to begin"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: stat_field(worker, 0) in (None, "Z"), "the worker to end")


def test_ctrl_c_ends_fixtures_and_run(command, tmp_path):
    began, ended = tmp_path / "began", tmp_path / "ended"
    text = "import pathlib, pytest, time\n@pytest.fixture(scope='session')\ndef thing():\n    yield\n"
    text += f"    pathlib.Path({str(ended)!r}).touch()\ndef test_slow(thing):\n"
    (tmp_path / "test_slow.py").write_text(f"{text}    pathlib.Path({str(began)!r}).touch()\n    time.sleep(1000)\n")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    until(began.exists, "the test to begin")
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == pytest.ExitCode.INTERRUPTED and ended.exists()
