"""Commands that start in a tenth of a second: forked from a process that has imported everything and done nothing.

A command from here is a process like another: its own environment, its own end, kill -9 and all. Run as a program this
is that process: its arguments are modules to import, and it reads orders on its input, a line of JSON each. It ends
with who started it, and so do its commands.
"""

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
from pathlib import Path


def serve_orders() -> None:
    _end_with(os.getppid())
    package = importlib.import_module("ullage.cli")
    commands = [f"ullage.cli.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in (*commands, "pydantic", *sys.argv[1:]):
        importlib.import_module(name)
    here, ended = os.getpid(), {}
    for line in sys.stdin:
        order = json.loads(line)
        if "words" in order:
            answer = os.fork() or _become(order, here)
        elif order["pid"] in ended:
            answer = ended[order["pid"]]
        else:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                ended[pid] = answer
        print(json.dumps(answer), flush=True)


def _end_with(parent: int) -> None:
    """Be killed when the parent ends, or now if it has."""
    if sys.platform == "linux":
        from ullage.isolation.kernel import die_with_parent

        die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(order: dict, parent: int) -> int:
    """In the child: `ullage WORDS`. Never returns."""
    code = 1
    try:
        _end_with(parent)
        for number, name in enumerate(order["files"]):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["ullage", *order["words"]]
        ullage = sys.modules["ullage.cli.main"]
        ullage.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Nursery:
    """Starts that process, and children in it."""

    def __init__(self, environment: dict[str, str], *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict) -> int | None:
        """The answer to one order; used by several threads."""
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(self, words: list[str], environment: dict[str, str], files: list[str], cwd: str = ".") -> "Child":
        """`ullage WORDS` as a process; `files` are its input, output and errors."""
        return Child(self, self.ask({"words": words, "environment": environment, "files": files, "cwd": cwd}))

    def run(
        self, words: list[str], environment: dict[str, str], cwd: str, text: str, timeout: float = 60.0
    ) -> subprocess.CompletedProcess:
        """`ullage WORDS` from beginning to end, as `subprocess.run` would."""
        with tempfile.TemporaryDirectory(prefix="ullage-test-") as folder:
            files = [Path(folder) / name for name in ("input", "output", "errors")]
            files[0].write_text(text)
            child = self.start(words, environment, [str(file) for file in files], cwd)
            return subprocess.CompletedProcess(words, child.wait(timeout), files[1].read_text(), files[2].read_text())

    def close(self) -> None:
        """End that process."""
        self._process.stdin.close()
        self._process.wait(60)


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


if __name__ == "__main__":
    serve_orders()
