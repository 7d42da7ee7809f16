"""A private home, its daemon as a real process, and jobs that write down themselves what happens to them."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.nursery import Child, Nursery, current
from tests.paths import ROOT

from ullage.errors import NoDaemon
from ullage.jobs.job_files import JobSpec
from ullage.jobs.validation import checked
from ullage.manager.client import Client
from ullage.manager.core.daemon import Daemon, make_daemon
from ullage.manager.core.orders import arguments_model, parameters_of
from ullage.manager.identity import Caller, this_user
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.settings import read_settings
from ullage.manager.storage.database import Database
from ullage.manager.storage.job_store import JobStore

SOURCE = ROOT / "src"
PATIENCE = 60.0  # seconds after which something that should have happened is a failure

# The oracle. The lock says whether the same job is alive twice, whatever the daemon believes.
JOB = """
log="$1/attempts.log"
exec 9>>"$1/alive-$ULLAGE_JOB_ID"
flock -n 9 || echo "twice $ULLAGE_JOB_ID" >> "$log"
echo "start $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> "$log"
if [ -n "$2" ]; then while [ ! -e "$1/$2" ]; do sleep 0.05; done; fi
echo "end $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> "$log"
"""


def answer_of(upper: int, gpu: str = "A100-40GB", **more: Any) -> dict[str, Any]:
    """What a process that makes estimates answers for a job on one model of GPU."""
    values = {"gpu": gpu, "upper": upper, "fits": True}
    return {**values, "figure": upper, "estimates": [values], **more}


def until(condition: Callable[[], Any], what: str) -> Any:
    """What the condition gives as soon as it gives something."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < PATIENCE:
        found = condition()
        if found:
            return found
        time.sleep(min(0.005 + passed / 10, 0.05))  # every look costs the daemon and this process some of a core
    raise AssertionError(f"waited {PATIENCE:.0f} s for {what}")


class Home:
    """A home with, at most, one daemon."""

    until = staticmethod(until)

    def __init__(self, folder: Path, nursery: Nursery, by_command: bool = False) -> None:
        self.folder, self.nursery, self.by_command = folder, nursery, by_command
        self.work = folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.client = Client(folder)
        self.process: subprocess.Popen[bytes] | Child | None = None
        self.options = ["--virtual", "2xA100-40GB", "--estimator", "none"]
        self.settings = "[running]\ngrace = 1.0\n"
        self.variables: dict[str, str] = {}
        self.python = sys.executable

    def start(self, crash_at: str | None = None, wait: bool = True) -> None:
        """Start the daemon; `wait` until it answers or has ended."""
        config, log = self.folder / "settings.toml", self.folder / "serve.log"
        config.write_text(self.settings)
        words, environment = ["serve", *self.options, "--settings", str(config)], self.environment(crash_at)
        if not self.by_command:
            self.process = self.nursery.start(words, environment, [os.devnull, str(log), str(log)])
        else:
            with log.open("ab") as output:
                command = [self.python, "-m", "ullage", *words]
                self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        if wait:
            self.client.close()
            until(lambda: self.answers() or self.process.poll() is not None, "the daemon to answer")

    def environment(self, crash_at: str | None = None) -> dict[str, str]:
        """The environment of this home's commands."""
        kept = {name: value for name, value in os.environ.items() if name not in ("ULLAGE_CRASH_AT", "OMP_NUM_THREADS")}
        paths = [str(SOURCE), *filter(None, [kept.get("PYTHONPATH")])]
        more = {"ULLAGE_HOME": str(self.folder), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        return {**kept, **more, **self.variables} | ({"ULLAGE_CRASH_AT": crash_at} if crash_at else {})

    def answers(self) -> bool:
        """Whether a daemon answers."""
        try:
            return bool(self.client.call("ping"))
        except NoDaemon:
            return False

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> str:
        """End the daemon as Ctrl-C does; what it said."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(PATIENCE)
        return self.said()

    def said(self) -> str:
        """All that daemons of this home said."""
        return (self.folder / "serve.log").read_text()

    def submit(self, command: list[str] | None = None, proceed: str | None = None, **more: Any) -> int:
        """Submit the job that keeps the log, or another command; its number."""
        words = command or ["/bin/sh", "-c", JOB, "job", str(self.work), proceed or ""]
        spec = JobSpec(**{"command": words, "cwd": str(self.work), "memory": 1 << 30, **more})
        return self.client.submit_spec(spec, patience=PATIENCE)["jobs"][0]

    def script(self, text: str, **more: Any) -> int:
        """Submit a shell script."""
        return self.submit(["/bin/sh", "-c", text], **more)

    def go(self, name: str = "proceed") -> None:
        """Let jobs that block on that file go on."""
        (self.work / name).touch()

    def log(self) -> list[str]:
        """What the jobs wrote."""
        file = self.work / "attempts.log"
        return file.read_text().splitlines() if file.exists() else []

    def job(self, number: int) -> dict[str, Any]:
        """All about a job."""
        return self.client.call("status", job=number)[0]

    def wait(self, number: int, *states: str) -> dict[str, Any]:
        """The job once it is in one of those states (over, by default)."""
        wanted = states or ("done", "failed", "cancelled")

        def there() -> Any:
            found = self.job(number)
            return found if found["state"] in wanted else None

        try:
            return until(there, f"job {number} to be {' or '.join(wanted)}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.job(number)}") from None

    def cli(self, *words: str, code: int = 0, text: str | None = None) -> str:
        """Run `ullage WORDS`; what it printed."""
        done = self.nursery.run(list(words), self.environment() | {"COLUMNS": "200"}, str(self.work), text or "")
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def close(self) -> None:
        """End everything that this home started."""
        for file in ("proceed", "never"):
            self.go(file)
        try:
            if self.process is None or self.process.poll() is not None:
                self.start()
            for job in self.client.call("queue"):
                self.client.call("cancel", jobs=[job["id"]])
            until(lambda: not self.client.call("queue"), "jobs to end")
        except (NoDaemon, AssertionError):
            pass
        finally:
            self.client.close()
            if "COVERAGE_PROCESS_CONFIG" in os.environ:
                self.stop()  # one that is killed cannot say which lines it ran
            if self.process.poll() is None:
                self.kill()


class Here:
    """A daemon in a thread of this process, with a clock of the test's own and, if one is given, its monitor."""

    until = staticmethod(until)

    def __init__(self, folder: Path, moved: float = 0.0, monitor: Monitor | None = None, **given: Any) -> None:
        self.moved, self.folder = moved, folder
        (folder / "work").mkdir(exist_ok=True)
        self._ready = threading.Event()
        self._keys = itertools.count()
        virtual = None if monitor else given.pop("virtual", "1xA100-40GB")
        self._settings = read_settings(None, virtual=virtual, estimator="none", **given)
        self._thread = threading.Thread(target=self._run, args=(monitor,))
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _run(self, monitor: Monitor | None) -> None:
        def clock() -> float:
            return time.time() + self.moved

        if monitor is None:
            self.daemon = make_daemon(self.folder, self._settings, print, clock=clock)
        else:
            self.daemon = Daemon(self.folder, self._settings, monitor, say=print, clock=clock)
        asyncio.run(self.daemon.run(self._begin))

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()

    def call(self, verb: str, **arguments: Any) -> Any:
        """Do an order as the user of this process."""
        return self.call_as(this_user(), verb, arguments)

    def call_as(self, caller: Caller, verb: str, arguments: dict[str, Any]) -> Any:
        values = dict(checked(arguments_model(verb, parameters_of(verb)), arguments, verb))
        return asyncio.run_coroutine_threadsafe(self.daemon.call(caller, verb, values), self._loop).result()

    def submit(self, script: str, **more: Any) -> int:
        """Submit a shell script; its number."""
        job = {"command": ["/bin/sh", "-c", script], "cwd": str(self.folder / "work"), "memory": 1 << 30, **more}
        return self.call("submit", job=job, key=f"key {next(self._keys)} of {time.monotonic()}")["jobs"][0]

    def job(self, number: int) -> dict[str, Any]:
        """All about a job."""
        return self.call("status", job=number)[0]

    def until_over(self, number: int) -> dict[str, Any]:
        """The job once it is over."""
        over = ("done", "failed", "cancelled")
        until(lambda: self.job(number)["state"] in over, f"job {number} to be over")
        return self.job(number)

    def close(self) -> None:
        """End the daemon; jobs go on."""
        if self._thread.is_alive():
            self.call("stop_serving")
            self._thread.join(PATIENCE)


@pytest.fixture
def make_here(tmp_path: Path) -> Iterator[Callable[..., Here]]:
    """Makes daemons in threads of this process, one after another, of one home."""
    made: list[Here] = []

    def make(**given: Any) -> Here:
        made.append(Here(tmp_path, **given))
        return made[-1]

    yield make
    (tmp_path / "work/proceed").touch()
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    """Where daemons come from that start fast; those that a file shares (`common`) are started as people do."""
    return current()


@pytest.fixture
def home(tmp_path: Path, nursery: Nursery) -> Iterator[Home]:
    """A home whose daemon is not started yet."""
    made = Home(tmp_path / "h", nursery)
    yield made
    made.close()


@pytest.fixture
def served(home: Home) -> Home:
    """A home with a daemon."""
    home.start()
    return home


@pytest.fixture(scope="module")
def _of_module(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("h"), nursery, by_command=True)
    made.start()
    yield made
    made.close()


@pytest.fixture
def common(_of_module: Home, tmp_path: Path) -> Home:
    """A home with a daemon that all tests of a file share, with a folder of the test's own for its jobs."""
    _of_module.work = tmp_path
    return _of_module


@pytest.fixture(scope="session")
def make_home(nursery: Nursery) -> Callable[[Path], Home]:
    """Makes a home for tests that share one."""
    return lambda folder: Home(folder, nursery)


class CountingDatabase(Database):
    """Counts what reaches the disk."""

    commits = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._connection.set_trace_callback(self._committed)

    def _committed(self, statement: str) -> None:
        self.commits += statement == "COMMIT"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    """An empty store, whose `database` counts its commits."""
    database = CountingDatabase(tmp_path)
    made = JobStore(database, clock=lambda: 0.0)
    made.database = database
    yield made
    database.close()
