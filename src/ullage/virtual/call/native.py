"""Makes PyTorch's C++ core accept tensors of type "cuda" without CUDA.

Two things stop such a tensor from training: autograd asks the registry of device guards for CUDA's guard, which a CPU
build lacks, and asks the CUDA hooks whether the device has a context. Both are plain pointers in exported C++ objects.
While a virtual GPU is in use they point to PyTorch's no-op guard (the one of FakeTensor; versions without one get one)
and to a copy of the hooks' table with two answers changed, whose places are found by watching which entries PyTorch
calls. Nothing is compiled, and all builds and machines take the same path. Not covered: Windows (other names for the
same symbols).
"""

import contextlib
import ctypes
import functools
import mmap
import platform
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.errors import UnsupportedPlatform
from ullage.virtual.distributed.rank import local_rank

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10/core/impl/DeviceGuardImplInterface.h
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # aten/src/ATen/detail/CUDAHooksInterface.h
_CUDA = 1  # c10/core/DeviceType.h: the place of CUDA in the registry of guards
_GUARD_LENGTH = 24  # fewer than a device guard has virtual functions, in any release
_LONGEST_STORAGE = 12  # words, no more than a StorageImpl has
_TABLE_LENGTH = 96  # more than the hooks have virtual functions (about 60)
_Pointer = ctypes.c_void_p


class CUDAStandIn:
    """Makes "cuda" tensors possible with `install` and restores PyTorch with `remove`."""

    def __init__(self) -> None:
        self._guards, self._hooks = _find_native_objects()
        self._real_guard = self._guards[_CUDA]
        self._real_table: int = self._hooks.value
        self._noop_guard = self._with_streams(self._make_noop_guard())
        self._table = self._make_table()
        self._listen()

    def install(self) -> None:
        self._guards[_CUDA] = self._noop_guard
        self._hooks.value = ctypes.addressof(self._table)

    def remove(self) -> None:
        self._guards[_CUDA] = self._real_guard
        self._hooks.value = self._real_table

    def _make_noop_guard(self) -> int:
        """Let PyTorch make its guard, which it does if the present guard counts no devices."""
        if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # PyTorch 2.8, say
            self._native_guard = _native_guard()
            return ctypes.addressof(self._native_guard[0])
        no_devices = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 0)
        table = (_Pointer * 64)(*[ctypes.cast(no_devices, _Pointer).value] * 64)
        counts_none = (_Pointer * 1)(ctypes.addressof(table))
        self._guards[_CUDA] = ctypes.addressof(counts_none)
        try:
            torch._C._ensureCUDADeviceGuardSet()
            guard = self._guards[_CUDA]
        finally:
            self._guards[_CUDA] = self._real_guard
        if guard is None or guard == ctypes.addressof(counts_none):
            raise UnsupportedPlatform(_advice("PyTorch made no device guard for CUDA"))
        return int(guard)

    def _with_streams(self, guard: int) -> int:
        """Add the streams of the virtual GPU to the guard: autograd runs a node on the stream of its forward pass (on
        machines other than x86-64, on the current stream)."""
        self._guard_with_streams: Any = None
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return guard
        functions = (_Pointer * _GUARD_LENGTH).from_address(_Pointer.from_address(guard).value or 0)
        table = (_Pointer * _GUARD_LENGTH)(*functions)
        self._code = {place: _native_function(code) for place, code in _STREAM_FUNCTIONS.items()}
        for place, code in self._code.items():
            table[place] = ctypes.addressof(ctypes.c_char.from_buffer(code))
        self._guard_with_streams = (_Pointer * 1)(ctypes.addressof(table)), table
        return ctypes.addressof(self._guard_with_streams[0])

    def _listen(self) -> None:
        """Listen to the guard's `recordDataPtrOnStream`, which autograd calls for a gradient that a node on another
        stream will use (torch/csrc/autograd/input_buffer.cpp). Find its place by watching for the gradient's storage.
        """
        if self._guard_with_streams is None:
            return
        table = self._guard_with_streams[1]
        originals = list(table)
        gradient = tensor_without_data((1,), (1,), torch.float32)
        home = gradient.untyped_storage()._cdata
        heard: list[tuple[int, int]] = []  # places, and how far behind the storage's begin the pointer was

        def watch(place: int) -> Any:
            behind = _GuardFunction(originals[place])

            def note(*words: int | None) -> int | None:
                if words[1] is not None and 0 < words[1] - home < 8 * _LONGEST_STORAGE:
                    heard.append((place, words[1] - home))
                return behind(*words)  # type: ignore[no-any-return]

            return _GuardFunction(note)

        watchers = {place: watch(place) for place in range(max(_STREAM_FUNCTIONS) + 1, _GUARD_LENGTH)}
        self.install()
        try:
            for place, watcher in watchers.items():
                table[place] = ctypes.cast(watcher, _Pointer).value
            _smallest_backward(gradient, stream=1)
        finally:
            table[:] = originals
            self.remove()
        if heard:
            place, offset = heard[0]
            self._listener = _GuardFunction(functools.partial(_hear, offset))
            table[place] = ctypes.cast(self._listener, _Pointer).value

    def _make_table(self) -> Any:
        """Return a copy of the hooks' table that says: CUDA is there, and no device has a context yet."""
        original = (_Pointer * _TABLE_LENGTH).from_address(self._real_table)
        table = (_Pointer * _TABLE_LENGTH)(*original)
        watched: list[int] = []

        def note_call(entry: int) -> int:
            watched.append(entry)
            return 0

        answer = ctypes.CFUNCTYPE(ctypes.c_long)
        self._watchers = [answer(functools.partial(note_call, entry)) for entry in range(_TABLE_LENGTH)]
        watching = (_Pointer * _TABLE_LENGTH)(*[ctypes.cast(watcher, _Pointer).value for watcher in self._watchers])
        # Two functions of the interpreter that answer 1 and 0 for any arguments.
        python: Any = ctypes.pythonapi
        finalizing = python["Py_IsFinalizing" if hasattr(python, "Py_IsFinalizing") else "_Py_IsFinalizing"]
        yes, no = (ctypes.cast(answer, _Pointer).value for answer in (python.Py_IsInitialized, finalizing))
        try:
            self._guards[_CUDA] = self._noop_guard
            self._hooks.value = ctypes.addressof(watching)
            with contextlib.suppress(RuntimeError):  # older versions raise an error if there is none
                torch._C._accelerator_getAccelerator()
            for entry in set(watched):
                table[entry] = watching[entry] = yes
            watched.clear()
            _smallest_backward()
        except RuntimeError as error:
            raise UnsupportedPlatform(_advice(f"a backward pass failed: {error}")) from error
        finally:
            self.remove()
        for entry in set(watched):
            table[entry] = no
        return table


_installed: CUDAStandIn | None = None


def cuda_stand_in() -> CUDAStandIn:
    """Return the `CUDAStandIn` of this process, made on first use in a few milliseconds."""
    global _installed
    if _installed is None:
        _installed = CUDAStandIn()
    return _installed


class _Wrapper(torch.Tensor):
    """A tensor without data, used only on the way to a plain one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} of a tensor that should be plain by now")


_DEVICE = torch.device("cuda", 0)
_make_wrapper = torch.Tensor._make_wrapper_subclass
_without_subclasses = torch._C._DisableTorchDispatch  # the first call to a subclass imports a second's worth of modules
storage_of: Any = torch._C.TensorBase.untyped_storage
_empty, _CPU = torch.empty, torch.device("cpu")  # named, because the script may have set another default


def is_gpu(device: torch.device) -> bool:
    """Check whether a device is the virtual GPU; a second GPU raises PyTorch's error."""
    if device.type != "cuda":
        return False
    check_device(device.index or 0)
    return True


def any_on_gpu(values: Iterable[Any]) -> bool:
    """Check for a GPU tensor, also in lists, or a GPU as a device."""
    return any(
        any_on_gpu(value)
        if isinstance(value, list | tuple)
        else getattr(value, "is_cuda", False) or (isinstance(value, torch.device) and value.type == "cuda")
        for value in values
    )


def check_device(index: int) -> None:
    """Raise PyTorch's error for any device but the first, which also has the number of this rank."""
    if index > 0 and index != local_rank():
        raise getattr(torch, "AcceleratorError", RuntimeError)(  # PyTorch before 2.8 has no name for it
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
            "The virtual GPU is one GPU, cuda:0."
        )


def tensor_without_data(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a plain `torch.Tensor` on cuda:0 with its own storage of the right length and no data."""
    tensor = _empty(0, device=_CPU)
    with _without_subclasses():
        tensor.data = _make_wrapper(_Wrapper, size, stride, dtype=dtype, device=_DEVICE)
    return tensor


def same_memory(base: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the storage of `base`, with its own version counter until autograd joins them."""
    view = _empty(0, device=_CPU)
    view.data = base
    return view


def view_without_data(base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return same_memory(base).as_strided_(size, stride, offset)


def view_as_type(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the storage of `base` as a vector of another type."""
    if dtype is base.dtype:
        return same_memory(base)
    length = storage_of(base).nbytes() // max(dtype.itemsize, base.dtype.itemsize)
    numbers = view_without_data(base, (length * max(1, dtype.itemsize // base.dtype.itemsize),), (1,), 0)
    with _without_subclasses():
        view: torch.Tensor = torch.ops.aten.view.dtype(numbers, dtype)
    return view


def set_length(storage: Any, nbytes: int) -> None:
    """Set a storage's length in bytes; PyTorch's own way would ask the device for memory."""
    words = (ctypes.c_int64 * _LONGEST_STORAGE).from_address(storage._cdata)
    words[_place_of_length()] = nbytes


@functools.cache
def _place_of_length() -> int:
    """Find where a storage (c10/core/StorageImpl.h) keeps its length, by looking for known lengths."""
    places = set(range(_LONGEST_STORAGE))
    for nbytes in (123_457, 987_653):
        storage = torch.UntypedStorage(nbytes, device=_CPU)
        words = (ctypes.c_int64 * _LONGEST_STORAGE).from_address(storage._cdata)
        places &= {place for place, word in enumerate(words) if word == nbytes}
    if len(places) != 1:
        raise UnsupportedPlatform(_advice("the length of a storage was not found"))
    return places.pop()


def backward_in_calling_thread() -> Any:
    """Return a context in which autograd starts no thread for the GPU: their number is fixed at the first backward
    pass."""
    return torch.autograd.set_multithreading_enabled(False)


def thread_on_gpu() -> int | str:
    """Return the thread of the current code on a real GPU."""
    return "backward" if in_backward() else threading.get_ident()


def in_backward() -> bool:
    """Check whether autograd runs the current code; on a real GPU that is another thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class GPUMode(TorchDispatchMode):
    """A dispatch mode that the compiler disables while it compiles; compiled code runs under it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper against torch.compile costs microseconds a call and a second to import

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _find_native_objects() -> tuple[Any, Any]:
    libraries = Path(torch.__file__).parent / "lib"
    try:
        suffix = "so" if (libraries / "libc10.so").exists() else "dylib"
        guards = (_Pointer * 20).in_dll(ctypes.CDLL(str(libraries / f"libc10.{suffix}")), _GUARDS)
        get_hooks = ctypes.CDLL(str(libraries / f"libtorch_cpu.{suffix}"))[_HOOKS]
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedPlatform(_advice(str(error))) from error
    get_hooks.restype = _Pointer
    return guards, _Pointer.from_address(get_hooks())


# Machine code of a function that returns 1 in the first and 0 in the second register for results.
_ONE_AND_ZERO = {"x86_64": bytes.fromhex("b801000000 31d2 c3"), "aarch64": bytes.fromhex("200080d2 010080d2 c0035fd6")}


def _native_guard() -> Any:
    """Return a device guard whose functions all answer 1 and 0.

    Read as a kind of device, that is CUDA; as a device, cuda:0; as a stream, its default stream; as a number of
    devices, one; as an answer, yes. Keep the result as long as it is in use.
    """
    machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
    if machine not in _ONE_AND_ZERO:
        raise UnsupportedPlatform(_advice(f"it has no device guard for CUDA on {machine}"))
    page = _native_function(_ONE_AND_ZERO[machine])
    table = (_Pointer * 64)(*[ctypes.addressof(ctypes.c_char.from_buffer(page))] * 64)
    guard = (_Pointer * 1)(ctypes.addressof(table))
    return guard, table, page


def _native_function(code: bytes) -> mmap.mmap:
    """Return memory with machine code, to be kept as long as it is in use."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    return page


# The number of the stream that is current on the virtual GPU, where native code can read and write it; and machine code
# (x86-64) for two functions of c10/core/impl/DeviceGuardImplInterface.h, by their place among its virtual functions.
# A stream is returned in two registers, its device (cuda:0 is 1) and its number.
current_stream = ctypes.c_int64(0)
_WHERE = b"\x48\xb9" + ctypes.addressof(current_stream).to_bytes(8, "little")  # mov rcx, the address
_STREAM_FUNCTIONS = {
    5: _WHERE + bytes.fromhex("488b11 b801000000 c3"),  # getStream: rdx = [rcx], eax = 1
    9: _WHERE + bytes.fromhex("488b01 488911 4889c2 b801000000 c3"),  # exchangeStream: rdx is the new, then the old one
}


# A function of the guard with as many arguments as fit in registers; the first is the guard.
_GuardFunction = ctypes.CFUNCTYPE(_Pointer, *[_Pointer] * 6)
when_sent_to_stream: list[Callable[[Any, int], None]] = []
"""The last of these gets each storage that autograd sends to a node on another stream, and that stream."""


def _hear(offset: int, guard: int | None, pointer: int, stream: int, *rest: int | None) -> None:
    """Handle `recordDataPtrOnStream`: the pointer is inside the storage; a stream is a device and a number."""
    if when_sent_to_stream:
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(pointer - offset)
        when_sent_to_stream[-1](storage, ctypes.c_int64.from_address(stream + 8).value)


def _smallest_backward(grad: torch.Tensor | None = None, stream: int = 0) -> None:
    """Run a backward pass with no operator but `detach`, on a stream."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    leaf = tensor_without_data((1,), (1,), torch.float32).requires_grad_()
    grad = tensor_without_data((1,), (1,), torch.float32) if grad is None else grad
    now, current_stream.value = current_stream.value, stream
    try:
        out = Same.apply(leaf)
    finally:
        current_stream.value = now
    with backward_in_calling_thread():
        run_backward((out,), (grad,), False, False, (leaf,), False, accumulate_grad=False)


def _advice(problem: str) -> str:
    return (
        f"this PyTorch ({torch.__version__}) cannot host a virtual GPU: {problem}; "
        "Ullage is tested on Linux with PyTorch 2.13: pip install torch==2.13.0"
    )
