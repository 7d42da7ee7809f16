"""Threads that are started while a virtual GPU is in use see it too.

Dispatch modes belong to a thread. A DataLoader's thread that pins memory, or a user's thread that copies
ahead, would have none and ask the real CUDA. Here each gets a mode of its own that passes on to the virtual
GPU's. Not covered: threads that were started before the `with` statement.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.virtual.native import backward_in_calling_thread
from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


class _ModeOfThread(TorchDispatchMode):
    """The virtual GPU's mode in another thread; after the `with` statement, operators run as they are."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, gpu: VirtualGPU, left: threading.Event) -> None:
        super().__init__()
        self._gpu, self._left = gpu, left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left.is_set():
            return func(*args, **(kwargs or {}))
        return self._gpu._mode.__torch_dispatch__(func, types, args, kwargs)


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Let `threading.Thread.start` give the new thread its mode."""
    original = threading.Thread.start
    left = threading.Event()
    replacements.on_undo(left.set)

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        if "ullage_run" not in self.__dict__:
            run = self.__dict__["ullage_run"] = self.run

            def run_with_mode() -> None:
                with backward_in_calling_thread():
                    _push_on_torch_dispatch_stack(_ModeOfThread(gpu, left))
                    try:
                        run()
                    finally:
                        _pop_torch_dispatch_stack(None)
                        for name in ("run", "ullage_run"):  # a thread that is over keeps nothing alive
                            self.__dict__.pop(name, None)

            self.run = run_with_mode  # type: ignore[method-assign]
        original(self)

    replacements.put(threading.Thread, "start", start)
