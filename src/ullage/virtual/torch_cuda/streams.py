"""Streams, events, and threads. The allocator keeps free blocks by stream and needs the current one."""

import ctypes
import functools
import threading
import time
from typing import Any

import torch
from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack

from ullage.virtual.call.native import GPUMode, backward_in_calling_thread, current_stream, when_sent_to_stream
from ullage.virtual.call.plan import handler
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.distributed.ordering import Reached
from ullage.virtual.memory.launch_clock import LAUNCH, LaunchClock
from ullage.virtual.memory.libraries import SIDE_STREAMS
from ullage.virtual.memory.tensors import CurrentStream
from ullage.virtual.state import GPUState, gpus_in_use, part_in_use

# Events: they remember the host's time, since nothing runs on the virtual GPU.

_EVENT_HANDLES = 0x5600_0000_0000  # the first imitated cudaEvent_t
_Event: Any = torch.Event


class AnyEvent(_Event):  # type: ignore[misc]
    """`torch.Event` while a virtual GPU is in use: it remembers the host's time."""

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, **named: Any) -> Any:
        kind = torch.device("cuda" if device is None else "cuda:0" if isinstance(device, int) else device).type
        if kind != "cuda":
            return _Event(device=device, enable_timing=enable_timing, **named)
        event = _Event.__new__(cls, device="cuda", enable_timing=enable_timing)
        event._timed, event._when, event._stream, event._reached = enable_timing, None, None, Reached()
        event._moment = None, None
        return event

    def record(self, stream: Any = None) -> None:
        self._when = time.perf_counter()
        if gpus_in_use:
            gpu = gpus_in_use[-1]
            self._stream = gpu.memory.stream if stream is None else stream.stream_id
            self._reached = gpu.communication.reached(self._stream)
            if gpu.calls.launch_clock is not None:
                gpu.calls.launch_clock.record(self._stream)
            self._moment = gpu.memory.moment(self._stream)

    def wait(self, stream: Any = None) -> None:
        if gpus_in_use:
            gpu = gpus_in_use[-1]
            number = gpu.memory.stream if stream is None else stream.stream_id
            gpu.communication.wait(number, self._reached)
            if gpu.calls.launch_clock is not None and self._moment[1] is not None:
                gpu.calls.launch_clock.stream_waits(number, self._moment[1])

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if gpus_in_use:
            gpus_in_use[-1].wait(self._stream, self._moment)

    def elapsed_time(self, end_event: Any) -> float:
        """Return the host's milliseconds between two events; nothing ran on the virtual GPU."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._when is None or end_event._when is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if gpus_in_use:
            note = "the time between CUDA events was read; it is the host's time, not a GPU's"
            gpus_in_use[-1].note("time", note)
        return float(max(1e-3, (end_event._when - self._when) * 1e3))

    def ipc_handle(self) -> Any:
        gpus_in_use[-1].refuse("an event shared between processes", "use one process")

    @property
    def cuda_event(self) -> int:
        """The handle; 0 before the first record."""
        return 0 if self._when is None else _EVENT_HANDLES + (id(self) & 0xFFFF_FFFF)

    event_id = cuda_event


class CudaEvent(AnyEvent):
    """`torch.cuda.Event` while a virtual GPU is in use."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        return super().__new__(cls, enable_timing=enable_timing)

    @property
    def _as_parameter_(self) -> Any:
        return ctypes.c_void_p(self.cuda_event)

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>" if self.cuda_event else "<torch.cuda.Event uninitialized>"


def install_events(gpu: GPUState, replacements: Replacements) -> None:
    replacements.put_class((torch.cuda, torch.cuda.streams), "Event", CudaEvent)
    replacements.put(torch, "Event", AnyEvent)


for _event_kind, _module in ((AnyEvent, "torch"), (CudaEvent, "torch.cuda.streams")):
    _event_kind.__name__ = _event_kind.__qualname__ = "Event"
    _event_kind.__module__ = _module


_CUDA = 1  # c10/core/DeviceType.h
_POOL = 32  # c10/cuda/CUDAStream.cpp, kStreamsPerPool: streams are handed out in turn from pools of 32
_FIRST_EXTERNAL = 1000
_HANDLES = 0x5500_0000_0000  # the first imitated cudaStream_t
_Stream: Any = torch.Stream


_RECORDED = (
    "record_stream: memory is assumed to be free again when the stream would have come so far, with the times of the "
    f"data sheet and {LAUNCH * 1e6:.0f} microseconds of the host for a launch; the bound holds for a GPU that is as "
    "far behind as it can be"
)


class Streams:
    def __init__(self, gpu: GPUState) -> None:
        self.gpu = gpu
        self._made = [0, 0]
        self._external: dict[int, int] = {}

    def new(self, priority: int) -> int:
        """Return the number of a new stream. Each priority has 32, assigned in turn."""
        pool = 1 if priority < 0 else 0
        number = 1 + pool * _POOL + self._made[pool] % _POOL
        self._made[pool] += 1
        self.gpu.libraries.need_beyond(SIDE_STREAMS)
        return number

    def external(self, pointer: int) -> int:
        return self._external.setdefault(pointer, _FIRST_EXTERNAL + len(self._external)) if pointer else 0

    def set_current(self, number: int) -> None:
        self.gpu.memory.current_stream.number = number


class AnyStream(_Stream):  # type: ignore[misc]
    def __new__(cls, device: Any = None, *, priority: int = 0, **named: Any) -> Any:
        if "stream_id" in named:
            return _Stream.__new__(cls, **named)
        kind = torch.device("cuda" if device is None else "cuda:0" if isinstance(device, int) else device).type
        if kind != "cuda":
            return _Stream(device=device, priority=priority)
        number = part_in_use(Streams).new(priority)
        stream = _Stream.__new__(cls, stream_id=number, device_index=0, device_type=_CUDA)
        stream._priority = priority
        return stream

    @property
    def cuda_stream(self) -> int:
        """The handle for other libraries; 0 is the default stream."""
        return _HANDLES + self.stream_id * 64 if self.stream_id else 0

    native_handle = cuda_stream

    @property
    def priority(self) -> int:
        return max(-1, min(0, getattr(self, "_priority", 0)))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        gpus_in_use[-1].wait(self.stream_id)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        gpu = gpus_in_use[-1]
        gpu.communication.wait(self.stream_id, gpu.communication.reached(stream.stream_id))
        if gpu.calls.launch_clock is not None:
            gpu.calls.launch_clock.stream_waits_for(self.stream_id, stream.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = CudaEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Any:
        before = self.__dict__.setdefault("_before", [])
        streams = part_in_use(Streams)
        before.append(streams.gpu.memory.stream)
        streams.set_current(self.stream_id)
        return self

    def __exit__(self, *error: object) -> None:
        part_in_use(Streams).set_current(self._before.pop())


class CudaStream(AnyStream):
    """`torch.cuda.Stream` while a virtual GPU is in use."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Any:
        pointer = named.pop("stream_ptr", None)
        if pointer is not None:
            named = {"stream_id": part_in_use(Streams).external(pointer), "device_index": 0, "device_type": _CUDA}
        return super().__new__(cls, device, priority=priority, **named)

    @property
    def _as_parameter_(self) -> Any:
        return ctypes.c_void_p(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class CudaExternalStream(CudaStream):
    """`torch.cuda.ExternalStream` while a virtual GPU is in use."""

    def __new__(cls, stream_ptr: int, device: Any = None, **named: Any) -> Any:
        return super().__new__(cls, device, stream_ptr=stream_ptr, **named)


def install(gpu: GPUState, replacements: Replacements) -> None:
    streams = Streams(gpu)
    gpu.add_part(streams)
    before, gpu.memory.current_stream = current_stream.value, CurrentStream()
    gpu.memory.current_stream.number = 0
    replacements.on_undo(lambda: setattr(current_stream, "value", before))

    def numbered(number: int) -> Any:
        return CudaStream(stream_id=number, device_index=0, device_type=_CUDA)

    replacements.put_all(
        torch._C,
        {
            "_cuda_getCurrentStream": lambda device=0: (gpu.memory.stream, 0, _CUDA),
            "_cuda_getDefaultStream": lambda device=0: (0, 0, _CUDA),
            "_cuda_getCurrentRawStream": lambda device=0: numbered(gpu.memory.stream).cuda_stream,
            "_cuda_getStreamFromExternal": lambda pointer, device=0: (streams.external(pointer), 0, _CUDA),
            "_cuda_setStream": lambda stream_id, device_index=0, device_type=_CUDA: streams.set_current(stream_id),
            "_accelerator_getStream": lambda device=0: numbered(gpu.memory.stream),
            "_accelerator_setStream": lambda stream: streams.set_current(stream.stream_id),
        },
    )
    for name, kind in (("Stream", CudaStream), ("ExternalStream", CudaExternalStream)):
        replacements.put_class((torch.cuda, torch.cuda.streams), name, kind)
    replacements.put(torch, "Stream", AnyStream)


for _kind, _name, _module in (
    (AnyStream, "Stream", "torch"),
    (CudaStream, "Stream", "torch.cuda.streams"),
    (CudaExternalStream, "ExternalStream", "torch.cuda.streams"),
):
    _kind.__name__ = _kind.__qualname__ = _name
    _kind.__module__ = _module


@handler("aten.record_stream.default")
def record_stream(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _record(gpu, gpu.memory.span_of(args[0]), args[1].stream_id)


def _record(gpu: GPUState, span: Any, stream: int) -> LaunchClock:
    clock = gpu.calls.launch_clock
    if clock is None:
        clock = LaunchClock(gpu.spec, lambda: gpu.memory.stream)
        gpu.memory.waiting.launch_clock = gpu.calls.launch_clock = clock
    gpu.memory.record_stream(span, stream)
    gpu.note("streams", _RECORDED)
    return clock


def install_recording(gpu: GPUState, replacements: Replacements) -> None:
    """Replace the method `record_stream`: FSDP calls it while operators are not dispatched. Autograd does the same with
    a gradient that a node on another stream will use."""
    original: Any = torch.Tensor.record_stream

    def method(self: torch.Tensor, stream: Any) -> None:
        if not self.is_cuda or hasattr(self, "__tensor_flatten__"):
            original(self, stream)
        else:
            _record(gpu, gpu.memory.span_of(self), stream.stream_id)

    def of_gradient(storage: Any, stream: int) -> None:
        _record(gpu, getattr(storage, "ullage", None), stream).join(stream, gpu.memory.stream)

    replacements.put(torch.Tensor, "record_stream", method)
    when_sent_to_stream.append(of_gradient)
    replacements.on_undo(lambda: when_sent_to_stream.remove(of_gradient))


# Dispatch modes belong to a thread, so a thread that pins memory for a DataLoader, or copies ahead, would have none and
# call the real CUDA. Each thread that is started in the `with` statement gets a mode that passes calls on to the
# virtual GPU's.


class _ModeOfThread(GPUMode):
    """The virtual GPU's mode in another thread; after the `with` statement, operators run unchanged."""

    def __init__(self, gpu: GPUState, left: threading.Event) -> None:
        super().__init__()
        self._gpu, self._left = gpu, left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left.is_set():
            return func(*args, **(kwargs or {}))
        return self._gpu.mode.__torch_dispatch__(func, types, args, kwargs)


def install_threads(gpu: GPUState, replacements: Replacements) -> None:
    """Give each new thread its mode at `threading.Thread.start`."""
    original = threading.Thread.start
    left = threading.Event()
    replacements.on_undo(left.set)

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        if "ullage_run" not in self.__dict__:
            run = self.__dict__["ullage_run"] = self.run

            def run_with_mode() -> None:
                mode = _ModeOfThread(gpu, left)  # kept here, since PyTorch 2.6 frees it as it pops it
                with backward_in_calling_thread():
                    _push_on_torch_dispatch_stack(mode)
                    try:
                        run()
                    finally:
                        _pop_torch_dispatch_stack(None)
                        for name in ("run", "ullage_run"):  # a finished thread keeps nothing alive
                            self.__dict__.pop(name, None)

            self.run = run_with_mode  # type: ignore[method-assign]
        original(self)

    replacements.put(threading.Thread, "start", start)
