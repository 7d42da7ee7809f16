"""The error of a request that the card cannot serve, with the numbers of PyTorch's message."""

from __future__ import annotations

from .constants import GIB, KIB, MIB


class OutOfMemory(RuntimeError):
    """What ``malloc`` raises where PyTorch raises torch.OutOfMemoryError; all numbers are bytes.

    ``requested`` is what was asked for, ``rounded`` the block it needs, ``segment_size`` what was asked of
    the driver, ``allowed`` the limit set by a memory fraction (None without one), ``device_free`` what the
    driver still had, ``device_total`` the card's memory.

    >>> str(OutOfMemory(2**31, 2**31, 2**31, None, 0, 0, 2**30, 2**30))[:54]
    'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 '
    """

    def __init__(
        self,
        requested: int,
        rounded: int,
        segment_size: int,
        allowed: int | None,
        reserved: int,
        allocated: int,
        device_free: int,
        device_total: int,
    ) -> None:
        super().__init__(requested, rounded, segment_size, allowed, reserved, allocated, device_free, device_total)
        self.requested = requested
        self.rounded = rounded
        self.segment_size = segment_size
        self.allowed = allowed
        self.reserved = reserved
        self.allocated = allocated
        self.device_free = device_free
        self.device_total = device_total

    def __str__(self) -> str:
        return self.message()

    def message(self, device: int = 0, process: str = "") -> str:
        """PyTorch's sentence; ``process`` is its part about processes on the card, which needs NVML.

        >>> OutOfMemory(512, 512, 2**21, 2**20, 0, 0, 2**30, 2**30).message(device=1)[:60]
        'CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a '
        """
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_size)}. "
            f"GPU {device} has a total capacity of {format_size(self.device_total)} "
            f"of which {format_size(self.device_free)} is free. {process}{allowed}"
            f"Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, "
            f"and {format_size(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )


def format_size(size: int) -> str:
    """Print bytes as PyTorch's messages do (c10's format_size).

    >>> format_size(1023), format_size(2 * 2**20)
    ('1023 bytes', '2.00 MiB')
    """
    if size <= 1024:
        return f"{size} bytes"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB")):
        if size <= unit * 1024:
            return f"{size / unit:.2f} {name}"
    return f"{size / GIB:.2f} GiB"
