"""The process between a parent and its child: it isolates the child, and ends everything that the child started.

    parent ── guard ── first process of the sandbox ── child

`python -I -S` runs the guard, with the rights of the child's user, from this package and the standard library alone: no
variable of the user (PYTHONPATH, a sitecustomize) has an effect before the sandbox is closed. The guard then starts the
child in it as a Python of the user. When the parent is gone, the guard ends the child, and with it everything in the
sandbox. It imports little, since every child waits for it.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ullage.errors import InvalidValue, MissingPackage
from ullage.sandbox import kernel, overlay
from ullage.sandbox.fd_channel import FdChannel
from ullage.sandbox.process_identity import Process, is_alive
from ullage.sandbox.protocol import Channel, Exceeded, encode, error_text

_EVERY = 0.1  # seconds between checks
COVERED, REDIRECTED = "overlays", "redirection"  # how a child's files are kept
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
SPACES = ("pid", "ipc", "mnt")  # what a forked child joins, besides the network if the sandbox has its own
BOOT = "import sys; sys.path.append(sys.argv[1]); from ullage.sandbox.guard import main; main(sys.argv[2])"


class Sandbox(NamedTuple):
    """The isolation of a child: it reads the files of its user, and its writes are discarded.

    Without `network` it reaches only its own loopback address. Overlays cover its files, unless the system refuses them
    or `overlays=False`; then its writes are redirected. Namespaces isolate processes and network, unless the system
    refuses them or `namespaces=False`; then Python does what it can.
    """

    network: bool = False
    overlays: bool = True
    namespaces: bool = True


class Order(NamedTuple):
    """The task of a guard. `command` is the child's; `options` are for the child, as the last argument.

    Without overlays, writes go to `folder`, which does not exist yet. `pool` leads to a worker (`worker_pool`) that
    forks the child; if that fails, the guard starts one. With `waits` the child is such a worker.
    """

    command: list[str]
    options: dict[str, Any]
    channel: int
    parent: Process
    cwd: str | None
    private: Sandbox | None
    written: int
    folder: str
    pool: int | None = None
    waits: bool = False

    def to_text(self) -> str:
        return json.dumps({**self._asdict(), "private": self.private and self.private._asdict()})

    @classmethod
    def from_text(cls, text: str) -> "Order":
        values = json.loads(text)
        private = values["private"] and Sandbox(**values["private"])
        return cls(**{**values, "parent": Process(*values["parent"]), "private": private})


def main(text: str) -> None:
    order = Order.from_text(text)
    channel = Channel(order.channel)
    try:
        if order.private is None:
            _become(order)
        code = _guard_waiting(order) if order.waits else _guard(order, channel)
    except OSError as error:
        channel.error(error)
        code = 1
    _leave(code)


def _guard(order: Order, channel: Channel) -> int:
    """Start the child in its sandbox, wait for its end, and return its exit code."""
    assert order.private is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if sys.platform == "linux":
        kernel.adopt_orphans()
    try:
        if sys.platform == "linux" and order.private.namespaces:
            for spaces in _worlds(order):
                started = spaces.start()
                if started is not None:
                    first, how = started
                    channel.private(how)
                    return spaces.watch(first, channel)
        channel.private(REDIRECTED)
        return _redirect(order, channel)
    finally:
        _remove(order.folder)


def _guard_waiting(order: Order) -> int:
    """Start a worker, and end it and its descendants when its parent is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    kernel.adopt_orphans()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            _cover(order)
            _become(order)
        finally:
            os._exit(1)
    try:
        while _reap(child) is None and not _wait_a_moment() and is_alive(order.parent):
            pass
    finally:
        _end_all()
    return 0


def _become(order: Order, **options: Any) -> None:
    enter(order.cwd, order.channel)
    os.set_inheritable(order.channel, True)
    os.execv(order.command[0], [*order.command, json.dumps({**order.options, **options})])


def enter(folder: str | None, channel: int) -> None:
    """Enter the child's folder, or report the reason on its channel and exit."""
    try:
        if folder is not None:
            os.chdir(folder)
    except OSError as error:
        Channel(channel).error(InvalidValue(f"cannot enter the folder {folder}: {error.strerror}"))
        os._exit(1)


def _cover(order: Order) -> None:
    """Give this process its own files and network, and let it keep the right to join sandboxes of the same users."""
    entered, say = os.pipe()
    process = os.getpid()
    mapper = os.fork()
    if mapper == 0:
        os.read(entered, 1)
        _map_users(process)
        os._exit(0)
    assert order.private is not None
    kernel.enter_namespaces(network=order.private.network, processes=False)
    os.write(say, b"e")
    if os.waitpid(mapper, 0)[1]:
        raise PermissionError("users cannot be mapped")
    for descriptor in (entered, say):
        os.close(descriptor)
    if overlay.build(order.written, order.cwd, _near(), only_imports=True) is None:
        raise PermissionError("files cannot be covered")
    kernel.keep_rights_to_join()
    kernel.gain_no_rights()


def _leave(code: int) -> None:
    """Exit with the child's code or signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class NamespacesUnavailable(Exception):
    """The system refuses namespaces."""


def _worlds(order: Order) -> "Iterator[_Namespaces]":
    """Yield the sandboxes to try: one whose child is forked by a worker, and one whose child is started."""
    if order.pool is not None:
        pool = FdChannel(order.pool)
        while not select.select([pool], [], [], _EVERY)[0]:
            if signal.SIGTERM in signal.sigpending() or not is_alive(order.parent):
                _leave(-signal.SIGKILL)
        if message := pool.receive():
            yield _Namespaces(order, message[1][0], pool)
    yield _Namespaces(order)


class _Namespaces:
    """A sandbox of namespaces; the guard starts its child, or the worker at the other end of `pool` forks it."""

    def __init__(self, order: Order, users: int | None = None, pool: FdChannel | None = None) -> None:
        self._order, self._users, self._pool = order, users, pool
        self._life, self._words = os.pipe(), os.pipe()  # closing `_life` ends the sandbox; `_words` has its messages
        self._buffer = b""

    def start(self) -> tuple[int, str] | None:
        """Return the pid of the sandbox's first process and how its files are kept; `None` if the system refuses it."""
        helper = self._fork(self._enter)
        for descriptor in (self._life[0], self._words[1]):
            os.close(descriptor)
        try:
            self._hear("entered")
            if self._users is None:
                _map_users(helper)
            os.write(self._life[1], b"m")
            first = int(self._hear("first"))
            os.waitpid(helper, 0)  # this process is the parent of the first one now
            os.write(self._life[1], b"g")
            how = str(self._hear("ready"))
        except (NamespacesUnavailable, OSError):
            os.close(self._life[1])
            return None
        return first, how

    def _fork(self, life: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                life()
            except BaseException as error:
                self._say({"refused": error_text(error)})
            finally:
                os._exit(1)
        return pid

    def _enter(self) -> None:
        """In the helper: enter new namespaces, and start their first process."""
        for descriptor in (self._life[1], self._words[0]):
            os.close(descriptor)
        assert self._order.private is not None
        kernel.enter_namespaces(network=self._order.private.network, users=self._users)
        self._say({"entered": True})
        if os.read(self._life[0], 1):
            self._say({"first": self._fork(self._first)})

    def _first(self) -> None:
        """Run the first process of the sandbox: it covers the files, and when it ends, the kernel ends all others."""
        if not os.read(self._life[0], 1):
            return
        kernel.die_with_parent(signal.SIGKILL)
        order = self._order
        assert order.private is not None
        if not order.private.network:
            kernel.raise_loopback()
        memory = overlay.build(order.written, order.cwd, _near(), order.private.overlays)
        self._say({"ready": REDIRECTED if memory is None else COVERED})
        child = self._call_child() if memory is not None and self._pool is not None else None
        if child is None:
            child = self._fork(lambda: self._child(memory is None))
        taken = partial(_taken, order.folder) if memory is None else partial(overlay.written, memory)
        os.close(order.channel)
        for stream in (0, 1, 2):
            os.close(stream)
        end = None
        while end is None and not select.select([self._life[0]], [], [], 0)[0]:
            end = _reap(child)
            if end is None and taken() <= order.written:
                _wait_a_moment()
            else:
                self._say({"end": [end, taken()]})
                return

    def _call_child(self) -> int | None:
        """Let the worker fork the child; return its pid, or `None` if that failed."""
        order = self._order
        assert self._pool is not None and order.private is not None
        record = order.options["record"]
        streams = [0, 1, 2, order.channel, *([] if record is None else [record])]
        spaces = kernel.namespaces(*SPACES, *([] if order.private.network else ["net"]))
        message = {
            "entry": order.command[-2],
            "options": order.options,
            "env": dict(os.environ),
            "cwd": order.cwd,
            "streams": len(streams),
        }
        try:
            self._pool.send(message, [*streams, *spaces])
            answer = self._pool.receive()
        except OSError:
            return None
        finally:
            self._pool.close()
            for space in spaces:
                os.close(space)
        return int(answer[0]["child"]) if answer else None

    def _child(self, redirect: bool) -> None:
        for descriptor in (self._life[0], self._words[1]):
            os.close(descriptor)
        kernel.drop_capabilities()
        kernel.gain_no_rights()
        _begin(self._order, redirect)

    def watch(self, first: int, channel: Channel) -> int:
        """Wait until the sandbox has ended, or end it; return the child's exit code."""
        order = self._order
        while os.waitpid(first, os.WNOHANG)[0] == 0:
            if _wait_a_moment() or not is_alive(order.parent):
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
                return -signal.SIGKILL
        try:
            end, written = self._hear("end")
        except NamespacesUnavailable:  # it was killed from outside
            return -signal.SIGKILL
        if written > order.written:
            channel.limit(_wrote_too_much(order))
        return -signal.SIGKILL if end is None else int(end)

    def _say(self, word: dict[str, Any]) -> None:
        os.write(self._words[1], encode(word))

    def _hear(self, name: str) -> Any:
        """Return the next message of the processes started here, which must have this name."""
        while b"\n" not in self._buffer:
            part = os.read(self._words[0], 4096)
            if not part:
                raise NamespacesUnavailable
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        word = json.loads(line)
        if name not in word:
            raise NamespacesUnavailable(word)
        return word[name]


def _redirect(order: Order, channel: Channel) -> int:
    """Start the child without namespaces, wait for its end or end it; return its exit code."""
    end, child = None, os.fork()
    if child == 0:
        _begin(order, redirect=True)
    try:
        while end is None:
            if _wait_a_moment() or not is_alive(order.parent):
                return -signal.SIGKILL
            end = _reap(child)
            if _taken(order.folder) > order.written:
                channel.limit(_wrote_too_much(order))
                return -signal.SIGKILL
        return end
    finally:
        _end_all()


def _begin(order: Order, redirect: bool) -> None:
    """In the child: isolate it, and become it. With `redirect` it redirects its writes itself."""
    assert order.private is not None
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if redirect:
        os.mkdir(order.folder, 0o700)
        most = order.written + overlay.WRITTEN_UNNOTICED
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        if sys.platform == "linux":
            kernel.confine(order.folder)
        _become(order, redirect=order.folder, network=order.private.network)
    _become(order)


def _end_all() -> None:
    """Kill all descendants of this process, and those that they leave behind."""
    from ullage.sandbox.limits import family

    with suppress(MissingPackage):
        while others := family(os.getpid()).keys() - {os.getpid()}:
            for pid in others:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            _reap(0)
            time.sleep(0.001)


def _taken(folder: str) -> int:
    """Return the bytes on disk of the files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def _remove(folder: str) -> None:
    if os.path.lexists(folder):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _wrote_too_much(order: Order) -> Exceeded:
    from ullage.units import format_bytes

    return Exceeded("written", f"wrote more than {format_bytes(order.written)}")


def _wait_a_moment() -> bool:
    """Wait a moment, or until a child has ended; return whether this process is to end."""
    if sys.platform != "linux":
        time.sleep(_EVERY / 10)
        return signal.SIGTERM in signal.sigpending()
    received = signal.sigtimedwait(_SIGNALS, _EVERY)
    return received is not None and received.si_signo == signal.SIGTERM


def _reap(child: int) -> int | None:
    """Collect ended processes; return the child's exit code if it is among them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                break
    return None


def _map_users(pid: int) -> None:
    """Give users the same numbers in the sandbox: all of them for root, otherwise only the user's own."""
    for name, own in (("uid", os.getuid()), ("gid", os.getgid())):
        with open(f"/proc/self/{name}_map") as file:
            known = [line.split() for line in file]
        try:
            _write(f"/proc/{pid}/{name}_map", "".join(f"{here} {here} {count}\n" for here, _, count in known))
        except PermissionError:
            if name == "gid":
                _write(f"/proc/{pid}/setgroups", "deny")
            _write(f"/proc/{pid}/{name}_map", f"{own} {own} 1\n")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _near() -> list[str]:
    """Return places where a child is likely to write, apart from its folder."""
    named = (value for value in os.environ.values() if value.startswith("/") and ":" not in value)
    return ["/tmp", "/var/tmp", *named]
