"""Workers: processes that have imported PyTorch, and that fork children.

    parent ── guard ── first process of the sandbox ── child, forked by the worker

A worker has the rights and variables of the children's user and runs in their Python. It can write no file and reach no
other machine, so its imports change nothing. For a child it forks a process that joins the sandbox that the child's
guard has made. It runs no request itself. It ends with its parent, when it has been idle for a while, and when a file
that it imported has changed. If anything fails (the system refuses namespaces, an import fails or starts threads), the
guard starts the child.
"""

import gc
import importlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ullage.sandbox import kernel, recording
from ullage.sandbox.fd_channel import FdChannel, channel_pair
from ullage.sandbox.guard import Order, Sandbox
from ullage.sandbox.limits import Limits, Watch
from ullage.sandbox.process_identity import this_process
from ullage.sandbox.recording import matters_at_start
from ullage.sandbox.spawn import (
    Rights,
    count_threads,
    end_guard,
    kill_group,
    request_file,
    run_child,
    start_guard,
)

_ENTRY = "ullage.sandbox.worker_pool:wait_for_children"
_IDLE = 300.0  # seconds
_ONE_THREAD = {  # NumPy and PyArrow would start others on import, and a fork has one of them only
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_MOST_WRITTEN = 1 << 26  # bytes, while it imports
_OFTEN, _SELDOM, _YOUNG = 0.1, 5.0, 10.0  # seconds between checks of a young worker, of an older one, and the limit


class WorkerPool:
    """At most `most` workers, one for each user, Python and set of variables that matter at its start.

    Other variables count if the imports read them: for a child with another value, the guard starts a process. `limits`
    are those of a worker.
    """

    def __init__(
        self,
        preload: Sequence[str],
        *,
        later: Sequence[str] = (),
        most: int = 4,
        idle: float = _IDLE,
        limits: Limits | None = None,
    ) -> None:
        self._request = {"preload": list(preload), "later": list(later), "idle": idle}
        self._most, self._limits = most, limits or Limits()
        self._known: dict[Any, _Worker] = {}  # the last used worker comes last
        self._lock = threading.Lock()

    def channel(
        self, program: list[str], env: Mapping[str, str], cwd: str | None, rights: Rights | None, network: bool
    ) -> FdChannel | None:
        """Connect a guard to a worker, and start one if there is none."""
        places = env.get("PYTHONPATH", "").split(os.pathsep)
        cwd = "/" if all(os.path.isabs(place) for place in places if place) else cwd  # it imports from there
        variables = tuple(sorted((name, value) for name, value in env.items() if matters_at_start(name)))
        key = (*program, cwd, network, variables, tuple(sorted((rights or {}).items())))
        with self._lock:
            worker = self._known.pop(key, None)
            channel = None if worker is None else worker.channel()
            if worker is None or channel is None:
                worker = _Worker(program, env, cwd, rights, network, self._request, self._limits)
                channel = worker.channel()
            self._known[key] = worker
            for old in [*self._known][: -self._most]:
                self._known.pop(old).close()
            return channel

    def close(self) -> None:
        with self._lock:
            while self._known:
                self._known.popitem()[1].close()


class _Worker:
    """A worker, as seen by its parent."""

    def __init__(
        self,
        program: list[str],
        env: Mapping[str, str],
        cwd: str | None,
        rights: Rights | None,
        network: bool,
        request: dict[str, Any],
        limits: Limits,
    ) -> None:
        self._channel, theirs = channel_pair()
        number = theirs.fileno()
        order = Order(
            command=[*program, _ENTRY, str(number)],
            options={"parent": None, "record": None, "redirect": None, "network": None},
            channel=number,
            parent=this_process(),
            cwd=cwd,
            private=Sandbox(network=network),
            written=_MOST_WRITTEN,
            folder="",
            waits=True,
        )
        with request_file({**request, "channel": number}) as file:
            self._process = start_guard(order, file, subprocess.DEVNULL, {**_ONE_THREAD, **env}, [number], rights)
        theirs.close()
        self._watch = Watch(self._process.pid, limits)
        self._ended = threading.Event()
        threading.Thread(target=self._supervise, daemon=True, name="worker").start()

    def channel(self) -> FdChannel | None:
        """Connect to the worker, or return `None` if it has exited."""
        here, there = channel_pair()
        try:
            self._channel.send({}, [there.fileno()])
        except OSError:
            here.close()
            return None
        finally:
            there.close()
        return here

    def close(self) -> None:
        self._ended.set()

    def _supervise(self) -> None:
        """Wait for its end, or end it at a limit: an imported package may use all memory of this machine."""
        looks = 0
        while self._process.poll() is None and not self._ended.is_set() and self._watch.exceeded() is None:
            looks += 1
            self._ended.wait(_OFTEN if looks < _YOUNG / _OFTEN else _SELDOM)
        end_guard(self._process)
        kill_group(self._process)
        self._channel.close()


def wait_for_children(request: dict[str, Any]) -> None:
    """In the worker: import the modules of `preload`, then fork for each guard, until `idle` seconds pass. A fork does
    so in its place while it imports the modules of `later`, and for good if that fails or starts threads."""
    channel, idle = FdChannel(request["channel"]), request["idle"]
    notes, given = os.memfd_create("reads"), dict(os.environ)  # modules set variables, too
    recording.start(notes)
    if not _can_fork_after(request["preload"]):
        return
    imported = recording.reads_of(notes, given)
    if request["later"]:
        until_ready, ready = os.pipe()
        deputy = os.fork()
        if deputy == 0:
            os.close(ready)
            _fork_for_guards(channel, imported, idle, until_ready)
            os._exit(0)
        installed = (name for name in request["later"] if importlib.util.find_spec(name.partition(".")[0]) is not None)
        if not _can_fork_after(installed):
            os.waitpid(deputy, 0)
            return
        os.close(ready)
        imported = recording.reads_of(notes, given)
    _fork_for_guards(channel, imported, idle)


def _can_fork_after(modules: Iterable[str]) -> bool:
    """Import modules; return whether this process has one thread after that: a fork has no other."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # folders stay as they were when they were read
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception:
        return False
    finally:
        sys.dont_write_bytecode = before
    gc.collect()
    gc.freeze()  # the pages of what is there stay shared
    return count_threads() == 1


def _fork_for_guards(channel: FdChannel, imported: recording.Reads, idle: float, end: int | None = None) -> None:
    """Fork for each guard until there was none for a while, or until the pipe `end` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for those forked here
    wanted: list[Any] = [channel, *([] if end is None else [end])]
    while channel in select.select(wanted, [], [], idle)[0]:
        received = channel.receive()
        with recording.paused():
            is_current = imported.same_files()
        if received is None or not is_current:
            return
        guard = FdChannel(received[1][0])
        if os.fork() == 0:
            channel.close()
            _serve(guard, imported)
        guard.close()


def _serve(guard: FdChannel, imported: recording.Reads) -> None:
    """In a forked process: join the sandbox that the guard has made, and become the child in it.

    If a variable that the imports read has another value for the child, exit: the guard then starts a process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        guard.send({}, kernel.namespaces("user"))
        received = guard.receive()
        if received is None or not imported.same_variables(received[0]["env"]):
            os._exit(0)
        order, files = received
        streams, spaces = files[: order["streams"]], files[order["streams"] :]
        for space in spaces:
            kernel.join(space)
            os.close(space)
        if forked := os.fork():  # the next process is in the sandbox
            os.waitpid(forked, 0)
            os._exit(0)
        if os.fork():  # the one after that is a child of the sandbox's first process
            os._exit(0)
        kernel.drop_capabilities()
        kernel.gain_no_rights()
        guard.send({"child": os.getpid()})
        guard.close()
    except BaseException:
        os._exit(1)  # the guard starts a child then
    *standard, channel = streams[:4]
    options = order["options"] | {"record": streams[4] if len(streams) > 4 else None}
    run_child(order["entry"], channel, options, standard, order["env"], order["cwd"])
