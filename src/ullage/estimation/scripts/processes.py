"""Processes that a script starts.

Worker processes (those of DataLoaders and pools are daemons) are forked, whatever start method the script chose. A
training process that it starts with `multiprocessing` runs as a thread of this process, so that the virtual GPU sees
it. Ullage follows one of the ranks that join a process group, and, by a call of its function, one of the processes of
`torch.multiprocessing.spawn`. Other programs are recorded, because a script that only starts another program never uses
the GPU itself.
"""

import importlib
import multiprocessing.context
import multiprocessing.process
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed
import torch.multiprocessing

from ullage.estimation.scripts.driver import MADE_UP
from ullage.jobs.ranks import Rank
from ullage.virtual.call.replacements import Replacements

_AS_THREAD = "a process that the script started was followed as part of this one; really, each has its own CUDA context"
_OTHER_RANK = "a process that the script started is another rank: it was not followed"
_PATIENCE = 60.0  # seconds until a process is not a rank: it has neither joined a group nor used the GPU
_LINES, _COLUMNS = 24, 80
_Process: Any = multiprocessing.process.BaseProcess


class Processes:
    """Watches the processes of a script.

    `failed` gets an exception that ended a training process. `joined` says whether a process group was made, and `used`
    whether the GPU was used.
    """

    def __init__(
        self,
        note: Callable[[str, str], None],
        failed: Callable[[BaseException], Any],
        joined: Callable[[], bool] = lambda: False,
        used: Callable[[], bool] = lambda: True,
    ) -> None:
        self._note, self._failed, self._joined, self._used = note, failed, joined, used
        self._started: dict[Any, list[threading.Thread]] = {}  # by their functions
        self.commands: list[str] = []
        self._watching = True

    def install(self, replacements: Replacements) -> None:
        sys.addaudithook(self._audit)  # which cannot be removed
        replacements.on_undo(lambda: setattr(self, "_watching", False))
        contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        originals = dict(contexts)
        contexts.update(dict.fromkeys(originals, originals["fork"]))
        replacements.on_undo(lambda: contexts.update(originals))
        self._say_how_large_the_terminal_is(replacements)
        self._call_one_process_here(replacements)
        self._run_training_processes_here(replacements)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("subprocess.Popen", "os.system") or not self._watching:
            return
        command = args[1] if event == "subprocess.Popen" else os.fsdecode(args[0])
        text = command if isinstance(command, str) else " ".join(map(str, command))
        if event == "subprocess.Popen":
            self.commands.append(text)
        if "nvidia-smi" in text:
            self._note("nvml", MADE_UP)

    def _say_how_large_the_terminal_is(self, replacements: Replacements) -> None:
        """Report a terminal size if there is none: progress bars of scripts divide by it."""
        popen, size = os.popen, os.get_terminal_size

        def open_pipe(cmd: str, *args: Any, **options: Any) -> Any:
            known = isinstance(cmd, str) and cmd.split() == ["stty", "size"]
            return popen(f"echo {_LINES} {_COLUMNS}" if known else cmd, *args, **options)

        def terminal_size(*args: Any) -> os.terminal_size:
            try:
                return size(*args)
            except OSError:
                return os.terminal_size((_COLUMNS, _LINES))

        replacements.put_all(os, {"popen": open_pipe, "get_terminal_size": terminal_size})

    def _call_one_process_here(self, replacements: Replacements) -> None:
        def spawn(
            fn: Any,
            args: Any = (),
            nprocs: int = 1,
            join: bool = True,
            daemon: bool = False,
            start_method: str = "spawn",
        ) -> Any:
            fn(min(int(os.environ.get("LOCAL_RANK", 0)), nprocs - 1), *args)
            return None if join else _Joined()

        replacements.put(torch.multiprocessing, "spawn", spawn)
        replacements.put(sys.modules["torch.multiprocessing.spawn"], "spawn", spawn)

    def _run_training_processes_here(self, replacements: Replacements) -> None:
        original = {name: getattr(_Process, name) for name in ("start", "join", "is_alive", "terminate", "close")}

        def start(process: Any) -> None:
            if process.daemon or os.getpid() != process._parent_pid:
                original["start"](process)
                return
            siblings = self._started.setdefault(process._target, [])
            process._code, process._thread = 0, threading.Thread(target=lambda: None)
            if self._is_other_rank(siblings):
                self._note("processes", _OTHER_RANK)
            else:
                self._note("processes", _AS_THREAD)
                process._thread = threading.Thread(target=self._run, args=(process,), daemon=True)
            siblings.append(process._thread)
            process._thread.start()

        def of_thread(name: str, here: Callable[..., Any]) -> Any:
            def call(process: Any, *args: Any, **options: Any) -> Any:
                if "_thread" in process.__dict__:
                    return here(process._thread, *args, **options)
                return original[name](process, *args, **options)

            return call

        exit_code = _Process.exitcode.fget
        replacements.put(_Process, "start", start)
        replacements.put(_Process, "join", of_thread("join", threading.Thread.join))
        replacements.put(_Process, "is_alive", of_thread("is_alive", threading.Thread.is_alive))
        for name in ("terminate", "close"):
            replacements.put(_Process, name, of_thread(name, lambda thread: None))
        replacements.put(
            _Process,
            "exitcode",
            property(
                lambda process: process.__dict__.get("_code") if "_thread" in process.__dict__ else exit_code(process)
            ),
        )

    def _is_other_rank(self, siblings: list[threading.Thread]) -> bool:
        """Return whether a new process is a rank that is not followed: one before it, with the same function, has
        joined a process group. Of a machine's ranks, that of LOCAL_RANK is followed."""
        if len(siblings) < int(os.environ.get("LOCAL_RANK", 0)):
            return True
        end = time.monotonic() + _PATIENCE
        while any(thread.is_alive() for thread in siblings) and time.monotonic() < end:
            if self._joined() or self._used():
                break
            time.sleep(0.01)
        return bool(siblings) and self._joined()

    def wait(self) -> None:
        """Wait for the processes that the script started, as Python does at its end."""
        for thread in [thread for siblings in self._started.values() for thread in siblings]:
            thread.join()

    def _run(self, process: Any) -> None:
        process._code = 1
        try:
            process.run()
            process._code = 0
        except SystemExit as error:
            process._code = error.code if isinstance(error.code, int) else 0
        except BaseException as error:
            self._failed(error)


class _Joined:
    """The result of `spawn(..., join=False)`; its process has already ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


_ALONE = "accelerate started one process, the default; to change it: --num_processes N"
Follow = Callable[[], None]


class Launching:
    """Runs a script, or a function of it, as a launcher would in each of its processes."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._follow: Follow | None = None

    def install(self, replacements: Replacements) -> None:
        """Follow one rank if `torch.distributed.launcher` would start all: torchrun, accelerate, notebooks."""
        if not torch.distributed.is_available():
            return
        from torch.distributed.launcher import api

        original = api.elastic_launch.__call__

        def call(launch: Any, *args: Any) -> Any:
            config, entry = launch._config, launch._entrypoint
            size = config.nproc_per_node * config.min_nodes
            rank = Rank(size, min(int(os.environ.get("RANK", 0)), size - 1), config.min_nodes)
            if callable(entry):
                with rank.entered():
                    return {rank.number: entry(*args)}
            if self._follow is None:
                return original(launch, *args)
            with rank.entered():
                self._follow()
            return {}

        replacements.put(api.elastic_launch, "__call__", call)

    def run(self, launcher: list[str], script: list[str], follow: Follow) -> None:
        """Run `accelerate launch` with a script's words after its own; `follow` runs the script here."""
        launch: Any = importlib.import_module("accelerate.commands.launch")

        def alone(args: Any) -> None:
            if args.num_processes == 1 and not {"--num_processes", "--num-processes"} & {
                word.partition("=")[0] for word in launcher
            }:
                self._note("launcher", _ALONE)
            os.environ.update(launch.prepare_simple_launcher_cmd_env(args)[1])
            follow()

        self._follow = follow
        launch.simple_launcher = alone
        sys.argv = [*launcher[1:], *script]
        launch.launch_command(launch.launch_command_parser().parse_args([*launcher[2:], *script]))
