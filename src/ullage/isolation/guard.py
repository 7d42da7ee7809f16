"""The process between who asks for a child and the child: it shuts the child in, and ends with it all that it started.

    asker ── guard ── first process of the private world ── child

`python -I -S` runs the guard, with the rights of the child's user, from this package and the standard library alone: no
variable of the user (PYTHONPATH, a sitecustomize) has any say before the world is shut. The child is then started in it
as a Python of the user. The guard ends the child when the asker is gone, and by that everything in the world.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ullage.errors import InvalidValue
from ullage.isolation import kernel, world
from ullage.isolation.limits import Exceeded
from ullage.isolation.process_identity import Process, is_alive
from ullage.isolation.protocol import Channel, encode, error_text
from ullage.units import format_bytes

_EVERY = 0.1  # seconds between two looks
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
BOOT = "import sys; sys.path.append(sys.argv[1]); from ullage.isolation.guard import main; main(sys.argv[2])"


@dataclass(frozen=True, kw_only=True)
class Private:
    """A child's private world: it reads what its user can read, and all that it writes is gone with it.

    Only with `network` does it reach more than this machine's own loopback address, which then is its own. With
    `namespaces=False` it is made without the kernel's help, as where that is refused.
    """

    network: bool = False
    namespaces: bool = True


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the guard is to do: `command` is the child's."""

    command: list[str]
    channel: int
    parent: Process
    cwd: str | None
    private: Private | None
    written: int

    def to_text(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Order:
        """What `to_text` gave."""
        values = json.loads(text)
        private = values["private"] and Private(**values["private"])
        return cls(**{**values, "parent": Process(*values["parent"]), "private": private})


def main(text: str) -> None:
    """The life of the guard."""
    order = Order.from_text(text)
    channel = Channel(order.channel)
    try:
        if order.private is None:
            _become(order)
        code = _Guard(order, channel).run()
    except (OSError, _Refused) as error:
        channel.error(error)
        code = 1
    _leave(code)


def _become(order: Order) -> None:
    """Go on as the child, in its folder."""
    if order.cwd is not None:
        try:
            os.chdir(order.cwd)
        except OSError as error:
            Channel(order.channel).error(InvalidValue(f"cannot enter the folder {order.cwd}: {error.strerror}"))
            os._exit(1)
    os.set_inheritable(order.channel, True)
    os.execv(order.command[0], order.command)


def _leave(code: int) -> None:
    """End as the child did."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class _Refused(Exception):
    """The system does not let us make a private world."""


class _Guard:
    def __init__(self, order: Order, channel: Channel) -> None:
        self._order, self._channel = order, channel
        self._life, self._words = os.pipe(), os.pipe()  # the world ends when `_life` is closed; it speaks on `_words`
        self._torn = b""

    def run(self) -> int:
        """Start the child in its world and wait for its end; returns how it ended."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        kernel.adopt_orphans()
        return self._watch(self._start())

    def _start(self) -> int:
        """Start the world; returns the pid of its first process."""
        helper = self._fork(self._enter)
        for descriptor in (self._life[0], self._words[1]):
            os.close(descriptor)
        self._hear()  # it has entered its namespaces
        _map_users(helper)
        os.write(self._life[1], b"m")
        first = int(self._hear()["first"])
        os.waitpid(helper, 0)  # this process is the parent of the first one now
        os.write(self._life[1], b"g")
        self._hear()
        self._channel.private("namespaces")
        return first

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
        """In the helper: leave the namespaces of this system, and start the first process of the new ones."""
        for descriptor in (self._life[1], self._words[0]):
            os.close(descriptor)
        assert self._order.private is not None
        kernel.enter_namespaces(network=self._order.private.network)
        self._say({"entered": True})
        os.read(self._life[0], 1)
        self._say({"first": self._fork(self._first)})

    def _first(self) -> None:
        """The first process of the world: it makes the world, and when it ends the kernel ends everything in it."""
        if not os.read(self._life[0], 1):
            return
        kernel.die_with_parent(signal.SIGKILL)
        order = self._order
        assert order.private is not None
        if not order.private.network:
            kernel.raise_loopback()
        memory = world.build(order.written, _near(order))
        self._say({"ready": True})
        child = self._fork(self._child)
        os.close(order.channel)
        for stream in (0, 1, 2):
            os.close(stream)
        end = None
        while end is None and not select.select([self._life[0]], [], [], 0)[0]:
            end = _reap(child)
            if end is None and world.written(memory) <= order.written:
                signal.sigtimedwait(_SIGNALS, _EVERY)
            else:
                self._say({"end": end, "written": world.written(memory)})
                return

    def _child(self) -> None:
        os.setsid()
        for descriptor in (self._life[0], self._words[1]):
            os.close(descriptor)
        kernel.drop_capabilities()
        kernel.gain_no_rights()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _become(self._order)

    def _watch(self, first: int) -> int:
        """Wait until the world has ended, or end it."""
        order = self._order
        while os.waitpid(first, os.WNOHANG)[0] == 0:
            found = signal.sigtimedwait(_SIGNALS, _EVERY)
            if not is_alive(order.parent) or found is not None and found.si_signo == signal.SIGTERM:
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
                return -signal.SIGKILL
        last = self._hear()
        if last.get("written", 0) > order.written:
            self._channel.limit(Exceeded("written", f"wrote more than {format_bytes(order.written)}"))
        end = last.get("end")
        return -signal.SIGKILL if end is None else int(end)

    def _say(self, word: dict[str, Any]) -> None:
        os.write(self._words[1], encode(word))

    def _hear(self) -> dict[str, Any]:
        """The next word of the processes that were started here: nothing if they have ended without one."""
        while b"\n" not in self._torn:
            part = os.read(self._words[0], 4096)
            if not part:
                return {}
            self._torn += part
        line, _, self._torn = self._torn.partition(b"\n")
        word: dict[str, Any] = json.loads(line)
        if "refused" in word:
            raise _Refused(word["refused"])
        return word


def _reap(child: int) -> int | None:
    """Take leave of processes that have ended; returns how the child ended, if it has."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                break
    return None


def _map_users(pid: int) -> None:
    """Users have the same numbers in the world: all of them for root, for others their own alone."""
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


def _near(order: Order) -> list[str]:
    """Places where the child is likely to write."""
    named = (value for value in os.environ.values() if value.startswith("/") and ":" not in value)
    return [*filter(None, [order.cwd]), "/tmp", "/var/tmp", *named]
