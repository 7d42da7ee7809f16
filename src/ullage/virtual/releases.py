"""Differences between PyTorch's releases that affect memory: attention kernels and workspaces.

Only 2.11 was measured on a GPU. The rules of other releases were read from their source, or answered by their own
compiled code (`tests/virtual/test_releases.py`). `ULLAGE_PYTORCH=2.13` selects the release to follow.
"""

import os
from typing import NamedTuple

from ullage.errors import InvalidValue, UnsupportedPlatform
from ullage.sandbox import boot
from ullage.units import KIB

VARIABLE = "ULLAGE_PYTORCH"
KEPT, SHARED, TAKEN_EACH_TIME = "kept", "shared", "taken each time"


class Release(NamedTuple):
    """A release of PyTorch, with the CUDA, the cuDNN and the Triton of its build on PyPI."""

    version: tuple[int, int]
    cuda: str
    cudnn: int
    triton: str

    @property
    def name(self) -> str:
        return boot.dotted(self.version)

    # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp

    def prefers_cudnn_attention(self, capability: tuple[int, int]) -> bool:
        """check_prefer_cudnn_attention, which 2.6 to 2.9 do not use: Hopper and data-centre Blackwell, with cuDNN after
        9.15."""
        return self.version >= (2, 10) and self.cudnn > 91500 and capability[0] in (9, 10)

    @property
    def cudnn_drops_sixteenths_only(self) -> bool:
        """check_cudnn_dropout: other probabilities than multiples of 1/16 use another kernel."""
        return self.version >= (2, 12)

    def cudnn_takes_heads(self, sizes: tuple[int, int], capability: tuple[int, int], trains: bool) -> bool:
        """check_cudnn_tensor_shapes and check_cudnn_d256_bprop_head_dim: sizes of a query's and of a value's head."""
        data_centre = capability[0] in (9, 10)
        limit = 128
        if self._cudnn_takes_256 and data_centre:
            if trains and max(sizes) > 128:
                return sizes in ((192, 128), (256, 256))
            limit = 256
        elif self.version >= (2, 8) and capability == (9, 0) and self.cudnn >= 90501:
            limit = 256
        elif self.version >= (2, 9) and data_centre and sizes == (192, 128) and self.cudnn >= 91100:
            limit = 192
        return max(sizes) <= limit and not sizes[0] % 8 and not sizes[1] % 8

    @property
    def _cudnn_takes_256(self) -> bool:
        return self.version >= (2, 14) and self.cudnn > 92200

    @property
    def efficient_attention_groups_heads(self) -> bool:
        """can_use_mem_efficient_attention: fewer heads of keys than of queries."""
        return self.version >= (2, 14)

    @property
    def efficient_attention_needs_aligned_offsets(self) -> bool:
        """check_data_ptr_alignment_mem_efficient"""
        return self.version >= (2, 14)

    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp

    @property
    def keeps_what_is_sent(self) -> bool:
        """stashed_for_allocator_safety_: an asynchronous collective keeps its tensors; before, `record_stream` did."""
        return self.version >= (2, 8)

    # aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp

    @property
    def cublas_workspace(self) -> str:
        """Whether cuBLAS's workspace is kept after a matrix product or freed."""
        return KEPT if self.version < (2, 15) else TAKEN_EACH_TIME

    @property
    def cublas_lt_workspace(self) -> str:
        """Whether cuBLASLt keeps its own workspace, shares cuBLAS's, or allocates one for each product."""
        if (2, 9) <= self.version < (2, 12):
            return KEPT
        return SHARED if (2, 12) <= self.version < (2, 15) else TAKEN_EACH_TIME

    def cublas_workspace_size(self, capability: tuple[int, int]) -> int:
        """parseChosenWorkspaceSize: bytes, unless `CUBLAS_WORKSPACE_CONFIG` says otherwise."""
        large = (9, 10, 12) if self.version >= (2, 12) else (9,)
        return 4096 * 8 * KIB if capability[0] in large else 2 * 4096 * KIB + 8 * 16 * KIB


# The builds that `pip install torch` brings on Linux: torch.version.cuda, cudnnGetVersion() and the Triton it needs.
RELEASES = (
    Release((2, 6), "12.4", 90100, "3.2"),
    Release((2, 7), "12.6", 90501, "3.3"),
    Release((2, 8), "12.8", 91002, "3.4"),
    Release((2, 9), "12.8", 91002, "3.5"),
    Release((2, 10), "12.8", 91002, "3.6"),
    Release((2, 11), "13.0", 91900, "3.6"),
    Release((2, 12), "13.0", 92000, "3.7"),
    Release((2, 13), "13.0", 92000, "3.7"),
    Release((2, 14), "13.0", 92400, "3.8"),
    Release((2, 15), "13.2", 92600, "3.9"),
)
MEASURED_CUDNN = "9.19"  # its choices are known; other versions choose differently
MEASURED, NEWEST = RELEASES[5], RELEASES[-1]


def release_of(version: str) -> Release:
    """Return the rules of a version of PyTorch; a version newer than all known ones has those of the newest."""
    wanted = tuple(int(part) for part in version.split(".")[:2])
    known = [release for release in RELEASES if release.version <= wanted]
    if not known:
        raise UnsupportedPlatform(f"PyTorch must be {RELEASES[0].name} or newer, got {version}")
    return known[-1]


def followed(version: str, runs_on_gpus: bool) -> Release:
    """Return the release to follow with this version installed: the one that `ULLAGE_PYTORCH` names, or its own. A
    build for CPUs does not tell which release the GPU machine has: none newer than the measured one is followed
    then."""
    written = os.environ.get(VARIABLE, "")
    if written:
        return named(written)
    release = release_of(version)
    return release if runs_on_gpus else min(release, MEASURED)


def named(name: str) -> Release:
    for release in RELEASES:
        if release.name == name:
            return release
    names = ", ".join(release.name for release in RELEASES)
    raise InvalidValue(f"release of PyTorch (--pytorch, {VARIABLE}) must be one of {names}, got {name!r}")


def as_measured() -> None:
    os.environ.setdefault(VARIABLE, MEASURED.name)


def follow(version: str) -> None:
    """Follow the release of this version of PyTorch, unless another is named."""
    os.environ.setdefault(VARIABLE, release_of(version).name)


def note_on(version: str, release: Release) -> str | None:
    """Return a note on the rules that were followed; nothing for the measured release."""
    if release.version < MEASURED.version:
        return f"PyTorch {version} is followed by the rules in its source; kernels were measured with {MEASURED.name}"
    if tuple(int(part) for part in version.split(".")[:2]) > NEWEST.version:
        return f"PyTorch {version} is newer than this Ullage: it is followed by the rules of {NEWEST.name}"
    return None


def refuse_if_unserved() -> None:
    """Raise `UnsupportedPlatform` if this Python has no PyTorch, or one that is too old; PyTorch is not imported."""
    problem = boot.problem()
    if problem:
        raise UnsupportedPlatform(problem)
