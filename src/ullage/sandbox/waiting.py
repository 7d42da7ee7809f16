"""The inside of a process that has imported what many children need, and waits to be forked for each of them.

    asker ── guard ── first process of the private world ── child, forked from the process that waits

It has the rights and the variables of the children's user, runs in their Python, can write no file and reach no other
machine: what is imported here can change nothing. For a child it forks a process that enters the world which that
child's guard has made, and goes on there as a child that was started would. It never runs a request itself, so no
request leaves anything to the next one. It ends when its asker does, when nobody has asked for a while, and when a file
that it imported is another one now.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from ullage.sandbox import child, kernel, recording
from ullage.sandbox.boot import HELLO
from ullage.sandbox.guard import enter
from ullage.sandbox.handover import Line
from ullage.sandbox.protocol import Channel

_is_fork = False


def wait(request: dict[str, Any]) -> None:
    """Import the modules of `preload`, then fork for everybody who asks on the line, until `idle` seconds pass."""
    line = Line(request["line"])
    notes, given = os.memfd_create("reads"), dict(os.environ)  # modules set variables, too
    recording.start(notes)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # folders stay as they were when they were read
    for module in request["preload"]:
        importlib.import_module(module)
    sys.dont_write_bytecode = before
    if _threads() > 1:
        return  # a fork has one of them only
    imported = recording.reads_of(notes, given)
    gc.collect()
    gc.freeze()  # the pages of what is there stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that are forked here
    while select.select([line], [], [], request["idle"])[0]:
        asked = line.receive()
        if asked is None or not _is_current(imported):
            return
        with_guard = Line(asked[1][0])
        if os.fork() == 0:
            line.close()
            _serve(with_guard, imported)
        with_guard.close()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _is_current(imported: recording.Reads) -> bool:
    """Whether what was read on import would be read again."""
    with recording.paused():
        return imported.same_files()


def _serve(guard: Line, imported: recording.Reads) -> None:
    """In a process that was forked: join the world that the guard has made, and be the child in it.

    Where a variable that was read on import is another one for the child, it does not come, and one is started.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        guard.send({}, kernel.namespaces("user"))
        asked = guard.receive()
        if asked is None or not imported.same_variables(asked[0]["env"]):
            os._exit(0)
        order, files = asked
        streams, spaces = files[: order["streams"]], files[order["streams"] :]
        for space in spaces:
            kernel.join(space)
            os.close(space)
        if forked := os.fork():  # the next one is in the world
            os.waitpid(forked, 0)
            os._exit(0)
        if os.fork():  # the one after that is a child of the world's first process
            os._exit(0)
        kernel.drop_capabilities()
        kernel.gain_no_rights()
        guard.send({"child": os.getpid()})
        guard.close()
    except BaseException:
        os._exit(1)  # the guard starts a child then
    *standard, channel = streams[:4]
    told = order["told"] | {"record": streams[4] if len(streams) > 4 else None}
    be_child(order["entry"], channel, told, standard, order["env"], order["cwd"])


def be_child(
    entry: str, channel: int, told: dict[str, Any], standard: list[int], env: Mapping[str, str], cwd: str | None
) -> None:
    """Go on as a child that was started would, in a process that was forked; it never returns."""
    global _is_fork
    code = 1
    try:
        os.setsid()
        for stream, file in enumerate(standard):
            os.dup2(file, stream)
        for file in set(standard) - {0, 1, 2}:
            os.close(file)
        with recording.paused():
            os.environ.clear()
            os.environ.update(env)
            if told["record"] is None:
                recording.leave()
        tempfile.tempdir = None
        sys.argv[1:] = [entry, str(channel), json.dumps(told)]
        _is_fork = True
        Channel(channel).at(HELLO)
        enter(cwd, channel)
        child.main(*sys.argv[1:])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        child.end(code)


def can_fork() -> bool:
    """Whether this process was forked from one that waited, and can be forked for a child of its own."""
    return _is_fork and _threads() == 1
