"""Specification of a GPU: one frozen record, the same for a card, a MIG instance and a card that only NVML knows."""

from dataclasses import dataclass, field

# Assumed for unknown figures of a card: those of the H200, on which kernels were measured.
MEASURED_CAPABILITY, _MEASURED_SHARED_KIB, _MEASURED_SMS, _MEASURED_THREADS = (9, 0), 228, 132, 2048

# The minor number matters only if one major number covers two generations.
_GENERATIONS = {
    (6, None): "pascal",
    (7, 5): "turing",
    (7, None): "volta",
    (8, 9): "ada",
    (8, None): "ampere",
    (9, None): "hopper",
    (10, None): "blackwell",
    (11, None): "blackwell",
    (12, None): "blackwell",
}


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU as a job sees it. Sizes are bytes; a figure that is not known is `None`, never 0.

    - `memory` is the total that nvidia-smi prints; `usable` what PyTorch can get (`cudaMemGetInfo`'s total),
      from `usable_source`, which begins with "derived" if no published figure is known.
    - `context` is what a training process takes outside PyTorch's allocator, `context_upper` the most to
      expect, `context_bare` a process that only created its context; `context_measured` says whether these
      were measured on this very card.
    - `*_tflops` are dense rates with 32-bit accumulation, `bandwidth` is in GB/s, `power_w` the watts that the
      board may draw.
    - `parent` and `mig_instances` (how many fit on one card) are set for a MIG instance only.
    - `uuid` is the driver's name of a card in this machine, `None` for a kind of GPU.

    Not covered: clocks, NVLink, what other processes hold now.

    >>> from ullage.hardware import gpu
    >>> card = gpu("A100-40GB")
    >>> card.memory, card.sms, card.generation, card.is_mig
    (42949672960, 108, 'ampere', False)
    """

    name: str
    device_name: str
    memory: int
    usable: int
    usable_source: str
    source: str
    family: str | None = None
    compute_capability: tuple[int, int] | None = None
    sms: int | None = None
    bandwidth: float | None = None
    power_w: float | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    fp16_tflops: float | None = None
    bf16_tflops: float | None = None
    l2_mib: float | None = None
    shared_memory_per_sm_kib: int | None = None
    max_threads_per_sm: int | None = None
    context: int | None = None
    context_bare: int | None = None
    context_upper: int | None = None
    context_source: str | None = None
    context_measured: bool = False
    parent: str | None = None
    mig_instances: int | None = None
    uuid: str | None = field(default=None, compare=False)
    aliases: tuple[str, ...] = ()

    @property
    def generation(self) -> str | None:
        """The architecture, `"pascal"` to `"blackwell"`; `None` if the compute capability is unknown."""
        return None if self.compute_capability is None else generation_of(self.compute_capability)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability by which kernels are chosen; if unknown, the H200's."""
        return self.compute_capability or MEASURED_CAPABILITY

    @property
    def told_capability(self) -> tuple[int, int]:
        """The compute capability that programs read, and by which NCCL and cuBLAS choose; (0, 0) if unknown, so that
        only rules for the oldest GPUs apply."""
        return self.compute_capability or (0, 0)

    @property
    def shared_memory_kib(self) -> int:
        """The shared memory of a multiprocessor by which kernels are chosen, in KiB; if unknown, the H200's."""
        return self.shared_memory_per_sm_kib or _MEASURED_SHARED_KIB

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors by which kernels are chosen; if unknown, the H200's."""
        return self.sms or _MEASURED_SMS

    @property
    def threads_per_sm(self) -> int:
        """The threads that a multiprocessor holds; if unknown, as on the H200."""
        return self.max_threads_per_sm or _MEASURED_THREADS

    @property
    def is_mig(self) -> bool:
        """Whether this is a slice of a card rather than a whole one."""
        return self.parent is not None


def generation_of(compute_capability: tuple[int, int]) -> str | None:
    """Return the generation of a compute capability; `None` for one that is not in the table."""
    major, minor = compute_capability
    return _GENERATIONS.get((major, minor)) or _GENERATIONS.get((major, None))
