"""Events: they remember the host's time, since nothing runs on the virtual GPU."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_HANDLES = 0x5600_0000_0000  # where imitated cudaEvent_t lie
_Event: Any = torch.Event
_in_use: list[VirtualGPU] = []


class AnyEvent(_Event):  # type: ignore[misc]
    """`torch.Event` while a virtual GPU is in use: it remembers the host's time."""

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, **named: Any) -> Any:
        kind = torch.device("cuda" if device is None else "cuda:0" if isinstance(device, int) else device).type
        if kind != "cuda":
            return _Event(device=device, enable_timing=enable_timing, **named)
        event = _Event.__new__(cls, device="cuda", enable_timing=enable_timing)
        event._timed, event._when = enable_timing, None
        return event

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._when = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything is done as soon as it is asked for."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds that the host took between two events; nothing ran on the virtual GPU."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._when is None or end_event._when is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if _in_use:
            note = "the time between CUDA events was asked for; it is the host's, not a GPU's"
            _in_use[-1].note("time", note)
        return float(max(1e-3, (end_event._when - self._when) * 1e3))

    def ipc_handle(self) -> Any:
        """Events are not shared between processes."""
        _in_use[-1].refuse("an event shared between processes", "use one process")

    @property
    def cuda_event(self) -> int:
        """The handle; 0 before the first record."""
        return 0 if self._when is None else _HANDLES + (id(self) & 0xFFFF_FFFF)

    event_id = cuda_event


class CudaEvent(AnyEvent):
    """`torch.cuda.Event` while a virtual GPU is in use."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        return super().__new__(cls, enable_timing=enable_timing)

    @property
    def _as_parameter_(self) -> Any:
        return ctypes.c_void_p(self.cuda_event)

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>" if self.cuda_event else "<torch.cuda.Event uninitialized>"


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Put the events in place."""
    _in_use.append(gpu)
    replacements.on_undo(lambda: _in_use.remove(gpu))
    original: Any = torch.cuda.Event
    if original is not CudaEvent:  # code that imported the class before gets the same events from it
        replacements.put(original, "__new__", staticmethod(lambda cls, *args, **named: CudaEvent(*args, **named)))
    replacements.put(torch.cuda, "Event", CudaEvent)
    replacements.put(torch.cuda.streams, "Event", CudaEvent)
    replacements.put(torch, "Event", AnyEvent)


for _kind, _module in ((AnyEvent, "torch"), (CudaEvent, "torch.cuda.streams")):
    _kind.__name__ = _kind.__qualname__ = "Event"
    _kind.__module__ = _module
