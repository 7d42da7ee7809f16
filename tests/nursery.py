"""Commands that start in a few milliseconds: forked from a process that has imported everything and done nothing.

A command from here is a process like another: its own environment, its own end, kill -9 and all. The nursery is forked
from the process that runs the tests, before the first of them. It reads orders, a line of JSON each, and ends with the
process that forked it, and so do its commands.
"""

import atexit
import faulthandler
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent
_nursery = None


def begin():
    """Fork the nursery of this process, which must have no other threads."""
    global _nursery
    from tests.paths import enter_own_mounts  # by name: it imports Ullage

    enter_own_mounts()
    _nursery = Nursery()


def end():
    """End the nursery of this process."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
    _nursery = None


def current():
    """The nursery of this process."""
    return _nursery


def import_commands():
    """Import what commands need."""
    package = importlib.import_module("ullage.cli")
    commands = [f"ullage.cli.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    more = ["pydantic", "torch", "ullage.estimation", "ullage.manager.core.daemon", "ullage.virtual.shared_card.cards"]
    for name in (*commands, *more):
        importlib.import_module(name)


def serve_orders(orders, answers) -> None:
    """Fork a command for each order, or say how a command ended."""
    here, ended = os.getpid(), {}
    for line in orders:
        order = json.loads(line)
        if "pid" not in order:
            import_commands()
            answer = os.fork() or become(order, here)
        elif order["pid"] in ended:
            answer = ended[order["pid"]]
        else:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                ended[pid] = answer
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def die_with(parent: int) -> None:
    """Be killed when the parent ends, or now if it has."""
    if sys.platform == "linux":
        from ullage.sandbox.kernel import die_with_parent

        die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def forget_pytest(kept: list[int]) -> None:
    """Undo what pytest did to this process, and close all of its files but those."""
    faulthandler.disable()
    atexit._clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    sys.path[:] = [place for place in sys.path if place != str(TESTS.parent) and TESTS not in Path(place).parents]
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in kept:
            try:
                os.close(number)
            except OSError:  # the one that listed the folder
                continue


def become(order: dict, parent: int) -> int:
    """In the child: `ullage WORDS`, or a program. Never returns."""
    code = 1
    try:
        die_with(parent)
        for number, name in enumerate(order["files"]):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
        os.closerange(3, 4096)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["-c" if order["program"] else "ullage", *order["words"]]
        sys.modules["__main__"] = importlib.import_module("ullage.__main__")
        if order["program"]:
            exec(compile(order["program"], "<program>", "exec"), {"__name__": "__main__"})
        else:
            sys.modules["ullage.cli.main"].main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Nursery:
    """Forks that process, and has it fork commands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        (orders, self._orders), (self._answers, answers) = os.pipe(), os.pipe()
        here = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with(here)
                forget_pytest([orders, answers])
                serve_orders(os.fdopen(orders), os.fdopen(answers, "w"))
            finally:
                os._exit(0)
        os.close(orders)
        os.close(answers)
        self._orders, self._answers = os.fdopen(self._orders, "w"), os.fdopen(self._answers)

    def ask(self, order: dict) -> int | None:
        """The answer to one order; used by several threads."""
        with self._lock:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
            return json.loads(self._answers.readline())

    def start(
        self, words: list[str], environment: dict[str, str], files: list[str], cwd: str = ".", program: str = ""
    ) -> "Child":
        """`ullage WORDS` as a process, or `python -c PROGRAM WORDS`; `files` are its input, output and errors."""
        order = {"words": words, "environment": environment, "files": files, "cwd": cwd, "program": program}
        return Child(self, self.ask(order))

    def run(
        self,
        words: list[str],
        environment: dict[str, str],
        cwd: str,
        text: str = "",
        timeout: float = 60.0,
        program: str = "",
    ) -> subprocess.CompletedProcess:
        """Such a process from beginning to end, as `subprocess.run` would."""
        with tempfile.TemporaryDirectory(prefix="ullage-test-") as folder:
            files = [Path(folder) / name for name in ("input", "output", "errors")]
            files[0].write_text(text)
            child = self.start(words, environment, [str(file) for file in files], cwd, program)
            return subprocess.CompletedProcess(words, child.wait(timeout), files[1].read_text(), files[2].read_text())

    def close(self) -> None:
        """End that process, and its commands."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._orders.close()
        self._answers.close()


class Child:
    """A process of the nursery, with what of `subprocess.Popen` the tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it lives."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"pid": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; to one that has ended, none."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        """Until it has ended."""
        began = time.monotonic()
        while self.poll() is None:
            passed = time.monotonic() - began
            assert passed < timeout, f"process {self.pid} did not end in {timeout:g} s"
            time.sleep(min(0.005 + passed / 10, 0.05))
        return self.returncode
