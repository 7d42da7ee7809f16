"""Processes that a script starts.

Worker processes of DataLoaders are left alone. A training process that the script starts by `multiprocessing` is forked,
whatever start method was asked for, so that it has the virtual GPU too; it gives an answer of its own. With
`torch.multiprocessing.spawn` and one process there is no need for another: the function is called in this one.
Other programs that are started are remembered: a script that only starts them never touches the GPU itself.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

from ullage.errors import UnsupportedOperation
from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual import VirtualGPU

SEVERAL = (
    "{what} of {count} processes: the virtual GPU is one GPU. Run the script for one process and with the batch that "
    "one GPU gets; every GPU of such a run takes about as much"
)


class Processes:
    """Watches what a script starts."""

    def __init__(self, card: VirtualGPU, give_answer: Callable[[], None]) -> None:
        self._card, self._give_answer = card, give_answer
        self.commands: list[str] = []

    def install(self, replacements: Replacements) -> None:
        """Begin to watch."""
        sys.addaudithook(self._audit)
        contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        originals = dict(contexts)
        contexts.update(dict.fromkeys(originals, originals["fork"]))
        replacements.on_undo(lambda: contexts.update(originals))
        multiprocessing.util.register_after_fork(self, Processes._in_forked_process)
        self._call_single_process_here(replacements)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            command = args[1]
            self.commands.append(command if isinstance(command, str) else " ".join(map(str, command)))

    def _in_forked_process(self) -> None:
        """A process of its own has a GPU context and a cache of its own."""
        multiprocessing.util.Finalize(None, self._answer_for_forked_process, exitpriority=1000)

    def _answer_for_forked_process(self) -> None:
        if self._card.memory.requests and not multiprocessing.current_process().daemon:
            self._give_answer()

    def _call_single_process_here(self, replacements: Replacements) -> None:
        def spawn(
            fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, start_method: str = "spawn"
        ) -> Any:
            """`torch.multiprocessing.spawn`."""
            if nprocs != 1:
                raise UnsupportedOperation(SEVERAL.format(what="torch.multiprocessing.spawn", count=nprocs))
            fn(0, *args)
            return None if join else _Joined()

        replacements.put(torch.multiprocessing, "spawn", spawn)
        replacements.put(sys.modules["torch.multiprocessing.spawn"], "spawn", spawn)


class _Joined:
    """What `spawn(..., join=False)` returns: its process is over already."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Nothing to wait for."""
        return True
