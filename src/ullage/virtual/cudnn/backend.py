"""Queries of cuDNN: the plans that it has for a convolution, and the workspace of each.

Queries use cuDNN's backend interface, with the graph that PyTorch builds for the problem
(aten/src/ATen/native/cudnn/Conv_v8.cpp). A query needs no tensor and runs no kernel: 0.5 ms for the first choice, 5
ms for all candidates.

cuDNN's licence is for machines with NVIDIA's GPUs, so cuDNN is only queried where PyTorch runs on a real one, also
about another GPU, given its description.
"""

import ctypes
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ullage.errors import UllageError
from ullage.sandbox.fd_channel import FdChannel
from ullage.virtual import current
from ullage.virtual.cudnn.formulas import DATA, FILTER, FORWARD, CandidatePlan, ConvolutionProblem
from ullage.virtual.cudnn.layouts import strides_of

# cudnn_graph.h: types of descriptors, names of attributes, types of attributes, and values.
_CONVOLUTION, _ENGINE, _ENGINE_CONFIG, _HEURISTICS, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 15, 17, 38
_OPERATIONS = {FORWARD: 10, FILTER: 11, DATA: 12}
_FIRST_ATTRIBUTE = {FORWARD: 700, DATA: 706, FILTER: 712}  # alpha, beta, convolution, w, x, y; of FILTER w, x, y, too
_HANDLE_TYPE, _DATA_TYPE, _INT64_TYPE, _FLOAT_TYPE, _MODE_TYPE, _HEURISTIC_TYPE = 0, 1, 3, 4, 7, 8
_NOTE_TYPE, _DESCRIPTOR_TYPE, _INT32_TYPE, _CHAR_TYPE = 11, 15, 23, 24
_DATA_TYPES = {"f32": 0, "f64": 1, "f16": 2, "bf16": 9}
_CROSS_CORRELATION = 1
INSTANT, FALLBACK = 0, 2
_ALIGNMENT = 32  # PyTorch's value for tensors that begin at a block of its allocator


class CudnnError(UllageError):
    """cuDNN declined a query."""


class Cudnn:
    """The cuDNN of this process. `description` is JSON for another GPU than the machine's own."""

    def __init__(self, description: str | None = None) -> None:
        if current() is not None or not torch.cuda.is_available():
            raise CudnnError("cannot ask cuDNN: PyTorch finds no NVIDIA GPU on this machine")
        one = torch.zeros(1, 1, 1, 1, device="cuda")
        torch.conv2d(one, one)  # loads the library
        self._library = _loaded_library()
        self._handle = ctypes.c_void_p()
        self._check(self._library.cudnnCreate(ctypes.byref(self._handle)), "cudnnCreate")
        self._device: ctypes.c_void_p | None = None
        if description is not None:
            self._device = self._create(_DEVICE)
            text = description.encode()
            self._set(self._device, 2702, _CHAR_TYPE, ctypes.create_string_buffer(text, len(text)))
            self._finalize(self._device, "the description of a GPU")

    @property
    def version(self) -> int:
        """The version, such as 91900."""
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        return int(self._library.cudnnGetVersion())

    def description(self) -> dict[str, Any]:
        device = self._create(_DEVICE)
        try:
            self._set(device, 2700, _INT32_TYPE, (ctypes.c_int32 * 1)(torch.cuda.current_device()))
            self._finalize(device, "the GPU")
            text = (ctypes.c_char * 65536)()
            self._get(device, 2702, _CHAR_TYPE, text)
            described: dict[str, Any] = json.loads(text.value.decode())
            return described
        finally:
            self._destroy(device)

    def first(self, problem: ConvolutionProblem, tf32: bool = True) -> int | None:
        """Return the workspace of PyTorch's plan without `cudnn.benchmark`; `None` if cuDNN has no plan."""
        for candidate in self.candidates(problem, modes=(INSTANT,)):
            if candidate.allowed(problem.kind, tf32):
                return candidate.workspace
        return None

    def candidates(
        self, problem: ConvolutionProblem, modes: Sequence[int] = (INSTANT, FALLBACK)
    ) -> list[CandidatePlan]:
        """Return the plans that PyTorch would try, in its order."""
        with ExitStack() as stack:
            graph = self._graph(problem, stack)
            return [candidate for mode in modes for candidate in self._results(graph, mode)]

    def _graph(self, problem: ConvolutionProblem, stack: ExitStack) -> ctypes.c_void_p:
        kind, last = _DATA_TYPES[problem.kind], problem.channels_last
        x = self._tensor("x", problem.source, kind, last, stack)
        w = self._tensor("w", problem.weight, kind, last, stack)
        y = self._tensor("y", problem.out, kind, last, stack)
        convolution = self._made(_CONVOLUTION, stack)
        compute = _DATA_TYPES["f64"] if problem.kind == "f64" else _DATA_TYPES["f32"]
        self._set(convolution, 106, _INT64_TYPE, _int64s([len(problem.stride)]))
        self._set(convolution, 100, _DATA_TYPE, (ctypes.c_int * 1)(compute))
        self._set(convolution, 101, _MODE_TYPE, (ctypes.c_int * 1)(_CROSS_CORRELATION))
        self._set(convolution, 105, _INT64_TYPE, _int64s(problem.padding))
        self._set(convolution, 104, _INT64_TYPE, _int64s(problem.padding))
        self._set(convolution, 102, _INT64_TYPE, _int64s(problem.dilation))
        self._set(convolution, 103, _INT64_TYPE, _int64s(problem.stride))
        self._finalize(convolution, "the convolution")
        operation, first = self._made(_OPERATIONS[problem.direction], stack), _FIRST_ATTRIBUTE[problem.direction]
        for name, part in zip(range(first + 2, first + 6), (convolution, w, x, y), strict=True):
            self._set(operation, name, _DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(part.value))
        self._set(operation, first, _FLOAT_TYPE, (ctypes.c_float * 1)(1.0))
        self._set(operation, first + 1, _FLOAT_TYPE, (ctypes.c_float * 1)(0.0))
        self._finalize(operation, "the operation")
        graph = self._made(_GRAPH, stack)
        self._set(graph, 801, _DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(operation.value))
        if self._device is None:
            self._set(graph, 800, _HANDLE_TYPE, (ctypes.c_void_p * 1)(self._handle.value))
        self._finalize(graph, "the graph")
        return graph

    def _tensor(
        self, name: str, size: tuple[int, ...], kind: int, channels_last: bool, stack: ExitStack
    ) -> ctypes.c_void_p:
        tensor = self._made(_TENSOR, stack)
        self._set(tensor, 901, _DATA_TYPE, (ctypes.c_int * 1)(kind))
        self._set(tensor, 902, _INT64_TYPE, _int64s(size))
        self._set(tensor, 903, _INT64_TYPE, _int64s(strides_of(size, channels_last)))
        self._set(tensor, 906, _INT64_TYPE, _int64s([ord(name)]))
        self._set(tensor, 900, _INT64_TYPE, _int64s([_ALIGNMENT]))
        self._finalize(tensor, f"tensor {name}")
        return tensor

    def _results(self, graph: ctypes.c_void_p, mode: int) -> list[CandidatePlan]:
        with ExitStack() as stack:
            heuristics = self._made(_HEURISTICS, stack)
            self._set(heuristics, 201, _DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(graph.value))
            self._set(heuristics, 200, _HEURISTIC_TYPE, (ctypes.c_int * 1)(mode))
            if self._device is not None:
                self._set(heuristics, 204, _DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(self._device.value))
            self._finalize(heuristics, "the heuristics")
            known = self._get(heuristics, 202, _DESCRIPTOR_TYPE, ())
            configurations = [self._made(_ENGINE_CONFIG, stack) for _ in range(known)]
            if not configurations:
                return []
            several = (ctypes.c_void_p * len(configurations))(*(one.value for one in configurations))
            count = self._get(heuristics, 202, _DESCRIPTOR_TYPE, several)
            return [self._candidate(one) for one in configurations[:count]]

    def _candidate(self, configuration: ctypes.c_void_p) -> CandidatePlan:
        size, number = (ctypes.c_int64 * 1)(), (ctypes.c_int64 * 1)()
        self._get(configuration, 303, _INT64_TYPE, size)
        engine = self._create(_ENGINE)
        try:
            self._get(configuration, 300, _DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(engine.value))
            self._get(engine, 1301, _INT64_TYPE, number)
            notes = (ctypes.c_int * 32)()
            count = self._get(engine, 1303, _NOTE_TYPE, notes)
            return CandidatePlan(number[0], sum(1 << note for note in set(notes[:count])), size[0])
        finally:
            self._destroy(engine)

    def _create(self, kind: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)), f"descriptor {kind}")
        return made

    def _made(self, kind: int, stack: ExitStack) -> ctypes.c_void_p:
        made = self._create(kind)
        stack.callback(self._destroy, made)
        return made

    def _destroy(self, descriptor: ctypes.c_void_p) -> None:
        self._library.cudnnBackendDestroyDescriptor(descriptor)

    def _set(self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Any) -> None:
        count = ctypes.c_int64(len(values))
        self._check(self._library.cudnnBackendSetAttribute(descriptor, name, kind, count, values), f"attribute {name}")

    def _get(self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Any) -> int:
        count = ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(
            descriptor, name, kind, ctypes.c_int64(len(values)), ctypes.byref(count), values or None
        )
        self._check(status, f"attribute {name}")
        return count.value

    def _finalize(self, descriptor: ctypes.c_void_p, what: str) -> None:
        self._check(self._library.cudnnBackendFinalize(descriptor), what)

    def _check(self, status: int, what: str) -> None:
        if status:
            text = (ctypes.c_char * 2048)()
            self._library.cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
            reason = text.value.decode(errors="replace").strip()
            raise CudnnError(f"cuDNN declined {what}: status {status}{f'; {reason}' if reason else ''}")


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _loaded_library() -> ctypes.CDLL:
    """Return the cuDNN that PyTorch has loaded, and no other."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for name in ("libcudnn.so", "libcudnn_graph.so"):
        for path in sorted(path for path in mapped if Path(path).name.startswith(name)):
            library = ctypes.CDLL(path)
            if hasattr(library, "cudnnBackendCreateDescriptor") and hasattr(library, "cudnnCreate"):
                return library
    raise CudnnError("cannot ask cuDNN: this PyTorch has not loaded it")


def serve(request: dict[str, Any]) -> None:
    """Report which cuDNN and card this process has, then answer another process (`cudnn_query.CudnnAsker`) until the
    line is closed."""
    line, cudnn = FdChannel(request["line"]), Cudnn()
    line.send({"cudnn": cudnn.version, "gpu": torch.cuda.get_device_name()})
    while (message := line.receive()) is not None:
        answers: list[list[CandidatePlan] | None] = []
        for values in message[0]["problems"]:
            try:
                answers.append(cudnn.candidates(ConvolutionProblem.of(values)))
            except CudnnError:
                answers.append(None)
        line.send({"answers": answers})
