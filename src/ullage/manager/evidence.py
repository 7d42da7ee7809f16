"""What the end of a job's output says about why it ended: the words of PyTorch, TensorFlow, JAX, CUDA and Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ullage.manager.states import Cause
from ullage.units import parse_bytes

_GPU_MEMORY = re.compile(
    r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(?:STATUS_)?ALLOC_FAILED"
    r"|OOM when allocating tensor|Allocator \(GPU_\d+_bfc\) ran out of memory"
    r"|RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)|RESOURCE_EXHAUSTED:.*?(?:allocating|allocate)"
)
_HOST_MEMORY = re.compile(
    r"^MemoryError\b|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc"
    r"|Cannot allocate memory|numpy\._core\._exceptions\._ArrayMemoryError|unable to mmap .*Cannot allocate"
    r"|DataLoader worker .* is killed by signal: (?:Killed|Bus error)",
    re.MULTILINE,
)
_MPS_LOST = re.compile(
    r"cudaErrorMps\w+|CUDA_ERROR_MPS_\w+|MPS (?:server|client|control daemon|RPC)[^\n]{0,80}"
    r"(?:fail|not ready|terminat|lost|exceeded|connect)",
    re.IGNORECASE,
)
_GPU_LOST = re.compile(
    r"GPU is lost|fallen off the bus|uncorrectable ECC error|cudaErrorECCUncorrectable"
    r"|is/are busy or unavailable|cudaErrorDevicesUnavailable|CUDA_ERROR_DEVICE_UNAVAILABLE"
    r"|cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_NOT_READY|Unable to determine the device handle"
)
# How a Python program that was not caught says goodbye: the name of an exception at the beginning of a line.
_LAST_WORDS = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Exhausted))\b.*$", re.MULTILINE
)
# Exceptions that only pass on that another process failed.
_MESSENGERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException"})
_TRIED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_IN_USE = re.compile(r"this process has ([\d.]+ [KMGT]iB) memory in use")

_KINDS = (
    (Cause.GPU_MEMORY, _GPU_MEMORY),
    (Cause.MPS_LOST, _MPS_LOST),
    (Cause.GPU_LOST, _GPU_LOST),
    (Cause.HOST_MEMORY, _HOST_MEMORY),
)


@dataclass(frozen=True)
class Words:
    """The cause that the output names, the line that does, and the GPU memory that the job would have needed."""

    cause: Cause
    line: str
    needed: int | None = None


def read_output(text: str) -> Words | None:
    """The last thing in the output that explains an end, or `None`; an error that was overcome does not count.

    >>> read_output("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ... "
    ...             "Including non-PyTorch memory, this process has 4.00 GiB memory in use.").needed == 6 << 30
    True
    >>> read_output("CUDA out of memory. Trying a smaller batch\\nValueError: no such file") is None
    True
    """
    found = [(match.start(), cause, match) for cause, pattern in _KINDS for match in pattern.finditer(text)]
    if not found:
        return None
    place, cause, _ = max(found, key=lambda item: item[0])
    if _something_else_came_later(text, place):
        return None
    line = _line_at(text, place)
    return Words(cause, line, needed_memory(text) if cause is Cause.GPU_MEMORY else None)


def needed_memory(text: str) -> int | None:
    """What PyTorch had and what it asked for in its last out-of-memory message.

    >>> needed_memory("nothing of the kind") is None
    True
    """
    tried, in_use = list(_TRIED.finditer(text)), list(_IN_USE.finditer(text))
    if not tried or not in_use:
        return None
    return parse_bytes(tried[-1][1]) + parse_bytes(in_use[-1][1])


def _something_else_came_later(text: str, place: int) -> bool:
    """Whether the program ended by another exception than the one at that place."""
    after = text.find("\n", place)
    if after < 0:
        return False
    own_names = {"OutOfMemoryError", "ResourceExhaustedError", "XlaRuntimeError", "JaxRuntimeError", *_MESSENGERS}
    words = [match for match in _LAST_WORDS.finditer(text, after + 1) if match[1] not in own_names]
    return bool(words) and not any(pattern.search(words[-1][0]) for _, pattern in _KINDS)


def _line_at(text: str, place: int) -> str:
    begin, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
    return text[begin : end if end >= 0 else len(text)].strip()[:500]
