"""The inside of a child process: it calls one function, answers on its channel, and ends with its parent."""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ullage.sandbox import overlay
from ullage.sandbox.gc_control import importing
from ullage.sandbox.process_identity import Process, is_alive
from ullage.sandbox.protocol import Channel

_EVERY = 0.2  # seconds between checks of the parent

_channel: Channel | None = None


def main(entry: str, channel: str, options_text: str) -> None:
    """Run a child that `parent.start` started: first its isolation, then the caller's code.

    The options (JSON) name the `parent` to end with, the descriptor to `record` reads to, the folder to `redirect`
    writes to, and whether the `network` is allowed.
    """
    options = json.loads(options_text)
    if options["parent"] is not None:
        end_with(Process(*options["parent"]))
    if options["redirect"] is not None:
        from ullage.sandbox import redirection

        redirection.start(options["redirect"], network=options["network"])
    elif overlay.is_private():
        overlay.patch_renames()
    with open(0, "rb", closefd=False) as given:
        if given.seekable():
            given.seek(0)  # shared with an earlier attempt at this child, which may have read it
        request = json.load(given)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # programs that the function runs must not read our request
    if options["record"] is not None:
        from ullage.sandbox import recording

        recording.start(options["record"], own=options["redirect"])
    answer(Channel(int(channel)), lambda: function_named(entry)(request))


def answer(channel: Channel, work: Callable[[], dict[str, Any] | None]) -> None:
    """Do the work and send its result as the answer, or its exception as the error."""
    global _channel
    _channel = channel
    try:
        result = work()
        if result is not None:
            channel.answer(result)
    except Exception as error:
        traceback.print_exc()
        channel.error(error)


def give_answer(result: dict[str, Any]) -> None:
    """Send the answer now, once: for a function that continues after it, or from another thread."""
    assert _channel is not None, "not in a child process"
    _channel.answer(result)


def give_so_far(result: dict[str, Any]) -> None:
    """Send the current state of the answer: it counts if this process ends without one."""
    assert _channel is not None, "not in a child process"
    _channel.so_far(result)


def say_doing(what: str) -> None:
    """Report a long operation; an empty text when it is done."""
    assert _channel is not None, "not in a child process"
    _channel.doing(what)


def end(code: int) -> None:
    """End this forked process as Python ends a started one, without touching its parent's state."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def function_named(entry: str) -> Callable[..., Any]:
    module, _, name = entry.partition(":")
    with importing():
        value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def run_command(request: dict[str, Any]) -> dict[str, Any]:
    """Run `command` in `env` with `text` as its standard input; return its exit code or the reason why it failed."""
    command, nothing = request["command"], subprocess.DEVNULL
    try:
        text = request["text"].encode()
        done = subprocess.run(command, input=text, env=request["env"], check=False, stdout=nothing, stderr=nothing)
    except OSError as error:
        return {"failed": f"cannot run {command[0]}: {error.strerror}"}
    return {"code": done.returncode}


def end_with(parent: Process) -> None:
    """Kill this process's group soon after `parent` has ended.

    The kernel could kill this process (PR_SET_PDEATHSIG), but not its descendants, and it would do so as soon as the
    thread that started it ends.
    """

    def watch() -> None:
        while is_alive(parent):
            time.sleep(_EVERY)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="ullage-parent").start()
