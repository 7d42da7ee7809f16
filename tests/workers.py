"""Run tests in several processes: `--workers N` imports and collects everything once, then forks N workers.

Each worker runs whole files from the front of its share of the tests. A worker that has nothing left takes files from
the end of the largest share. Reports go to the main process, which prints them, so other plugins work as they do
without workers. If a worker dies, or hangs past the test's timeout, the test that it ran fails and another worker
takes over the rest.
"""

import atexit
import contextlib
import importlib
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from multiprocessing import connection

import pytest
import pytest_timeout
from _pytest.config import create_terminal_writer
from tests import nursery

LIBRARIES = [
    "torch._inductor.compile_fx",
    "torchvision.models",
    "timm",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("auto", "bert", "gpt2", "llama", "opt", "t5", "vit")),
    "transformers.trainer",
    "lightgbm",
    "sklearn.ensemble",
]
MADE_SLOWLY = {"page", "_cluster"}  # fixtures that take seconds, once in each worker
GRACE = 60.0  # seconds that a worker has, after a test's timeout, to report the failure itself


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N forked processes")


def pytest_configure(config):
    if config.getoption("--workers") and not config.option.usepdb:
        config.pluginmanager.register(Workers(config), "workers")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fork the nursery of this process before a test does anything."""
    if not session.config.pluginmanager.hasplugin("workers") and not session.config.option.collectonly:
        nursery.begin()


class Workers:
    """Hands out tests and passes on reports, in the main process."""

    def __init__(self, config):
        self._config, self._count = config, config.getoption("--workers")
        self._began = time.monotonic()
        self._workers: list[Worker] = []

    def pytest_collection_modifyitems(self, items):
        """Run first, and so in one worker, what needs a page or a cluster: other workers take from the end."""
        items.sort(key=lambda item: not MADE_SLOWLY & {*getattr(item, "fixturenames", ())})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        if session.config.option.collectonly or not session.items:
            return None
        if "ullage.cli" in sys.modules:  # some tests run commands: import what these need once for all
            nursery.import_commands()
            import_libraries()
        self._config._tmp_path_factory.getbasetemp()  # makes, and maybe clears, the folder that all share
        try:
            for share in split_into_shares(session.items, self._count):
                self._fork(session, share)
            while running := [worker for worker in self._workers if not worker.ended]:
                lines = {worker.line: worker for worker in running if not worker.silent}
                for line in connection.wait([*lines], timeout=1.0):
                    self._receive(session, lines[line])
                for worker in running:
                    self._check(session, worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers:
                worker.close()
        return True

    def pytest_terminal_summary(self, terminalreporter):
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        elapsed = time.monotonic() - self._began
        terminalreporter.line(f"{elapsed:.0f} s with {self._count} workers, {spent:.0f} s of processor time")

    def _fork(self, session, share):
        self._workers.append(Worker(session, share, self._workers))
        self._assign(session, self._workers[-1])

    def _receive(self, session, worker):
        try:
            kind, content = worker.line.recv()
        except (EOFError, OSError):
            worker.silent = True
            worker.process.join(GRACE)
            return
        worker.last_heard = time.monotonic()
        hook = self._config.hook
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            text, place, when, nodeid = content
            message = warnings.WarningMessage(Warning(text), Warning, *place)
            known = {"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
            hook.pytest_warning_recorded.call_historic(kwargs=known)
        elif kind == "done":
            worker.assigned.popleft()
            self._assign(session, worker)
        else:
            raise RuntimeError(f"a worker failed outside its tests:\n{content}")

    def _assign(self, session, worker):
        """Let a worker know two tests: the one that it runs, and the next, since they may share fixtures."""
        while len(worker.assigned) < 2 and not worker.complete:
            if not worker.share:
                largest = max(self._workers, key=lambda other: len(other.share))
                worker.share = split_off_half(largest.share, session.items)
            number = worker.share.popleft() if worker.share else None
            worker.send(number)
            if number is None:
                worker.complete = True
            else:
                worker.assigned.append(number)

    def _check(self, session, worker):
        """If a worker has died, or hangs, fail its test and let another worker take over."""
        limit = timeout_of(session.items[worker.assigned[0]]) if worker.assigned else 0.0
        hangs = time.monotonic() - worker.last_heard > limit + GRACE
        if hangs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGABRT)  # faulthandler prints where it hangs
            worker.process.join(GRACE)
            worker.process.kill()
            worker.process.join()
        if worker.process.is_alive() or (not worker.silent and worker.line.poll()):
            return
        worker.ended = True
        reason = "hung" if hangs else f"ended with exit code {worker.process.exitcode}"
        if worker.assigned:
            item = session.items[worker.assigned.popleft()]
            text = f"the process that ran this test {reason}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._config.hook.pytest_runtest_logreport(report=report)
            rest, worker.share = deque([*worker.assigned, *worker.share]), deque()
            if rest:
                self._fork(session, rest)
        elif hangs or worker.process.exitcode:
            raise RuntimeError(f"a worker {reason} after its last test")


class Worker:
    """A worker, as the main process sees it; tests are known by their numbers."""

    def __init__(self, session, share, others):
        self.share, self.assigned = share, deque()
        self.complete = self.silent = self.ended = False  # knows all of its tests; closed its line; is gone
        self.last_heard = time.monotonic()
        self.line, there = multiprocessing.Pipe()
        lines = [self.line, *(other.line for other in others)]
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=run_worker, args=(session, there, lines, len(others)))
        self.process.start()
        there.close()

    def send(self, number):
        with contextlib.suppress(OSError):  # the worker has died, which `_check` finds
            self.line.send(number)

    def close(self):
        self.line.close()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run_worker(session, line, others, index):
    """Run the tests that the main process names."""
    if sys.platform == "linux":
        from ullage.sandbox.kernel import die_with_parent

        die_with_parent(signal.SIGKILL)
    for other in others:
        other.close()
    atexit._clear()  # those of the main process
    try:
        become_worker(session.config, line, index)
        current = line.recv()
        while current is not None:
            following = line.recv()
            items = [None if number is None else session.items[number] for number in (current, following)]
            session.config.hook.pytest_runtest_protocol(item=items[0], nextitem=items[1])
            line.send(("done", None))
            current = following
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        session._setupstate.teardown_exact(None)
    except BaseException:
        line.send(("error", traceback.format_exc()))
        raise
    finally:
        nursery.end()
        atexit._run_exitfuncs()


def become_worker(config, line, index):
    """Give this process what it may not share with other workers: a terminal, output, a folder, and a nursery."""
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Terminal(config), "terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"w{index}"
    factory._basetemp.mkdir()
    nursery.begin()
    config.pluginmanager.register(Reporting(config, line), "reporting")


class Terminal:
    """A worker's terminal: what plugins write to it becomes a part of the test's report."""

    def __init__(self, config):
        self._tw = create_terminal_writer(config, self)

    def write(self, text):
        sys.stderr.write(text)

    def flush(self):
        sys.stderr.flush()


class Reporting:
    """Sends a worker's reports to the main process."""

    def __init__(self, config, line):
        self._config, self._line = config, line

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._line.send(("report", data))

    def pytest_warning_recorded(self, warning_message, when, nodeid):
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._line.send(("warning", (text, (warning_message.filename, warning_message.lineno), when, nodeid)))


def split_into_shares(items, count):
    """Divide the tests into shares of about the same size, each of whole files."""
    shares, place = [deque() for _ in range(count)], 0
    for _, file in itertools.groupby(range(len(items)), key=lambda number: items[number].path):
        numbers = [*file]
        shares[(place + len(numbers) // 2) * count // len(items)].extend(numbers)
        place += len(numbers)
    return [share for share in shares if share]


def split_off_half(share, items):
    """Take the second half of a share: in whole files, if it has several."""
    numbers, half = [*share], len(share) // 2
    ends = [n for n in range(1, len(numbers)) if items[numbers[n]].path != items[numbers[n - 1]].path]
    half = min(ends, key=lambda end: abs(end - half), default=half)
    for _ in numbers[half:]:
        share.pop()
    return deque(numbers[half:])


def import_libraries():
    """Import what models need, for workers, their nurseries and all commands from these."""
    from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

    make_torchvision_importable()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def timeout_of(item):
    """How many seconds a test may take before pytest-timeout fails it."""
    return pytest_timeout._get_item_settings(item).timeout or float("inf")
