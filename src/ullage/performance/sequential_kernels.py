"""Operators of PyTorch whose kernels work on samples one after the other, however large a GPU is.

Interpolation has a thread for each place of an image, which goes through all samples and channels and waits for memory
in each round (`UpSampleBilinear2d.cu`). `im2col` launches a kernel for each sample (`Im2Col.cu`). A batch norm has a
block for each channel (`Normalization.cuh`): of few channels, most SMs have none. No program fits the figures: they
come from 132 timed calls (benchmarks/results/utilization.md; 3 to 25 % off by operator) and from profiled steps.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# Threads of a block, and seconds of a round on an H200: if tensors stay in its cache, and if they do not.
_INTERPOLATING = {
    "upsample_linear1d": (1024, 0.17e-6, 0.25e-6),
    "upsample_linear1d_backward": (1024, 0.17e-6, 0.3e-6),
    "upsample_bilinear2d": (1024, 0.175e-6, 0.33e-6),
    "upsample_bicubic2d": (512, 0.29e-6, 0.52e-6),
    "upsample_trilinear3d": (512, 0.26e-6, 0.28e-6),
    "upsample_trilinear3d_backward": (256, 0.58e-6, 0.58e-6),
}
_CACHED = 12_000_000  # bytes
# Gradients are added up in memory: seconds of an addition by a block (bicubic) and by the whole GPU (bilinear).
_ADDED_BY_BLOCK_S, _ADDED_S = 0.3e-9, 3e-12
# Seconds of an im2col kernel for one sample with a window of one place, and the power of the window by which they grow;
# and the host time of each further kernel, as a share of that of a call with one kernel.
_SAMPLE_S, _BY_WINDOW, _OF_A_LAUNCH = 1.3e-6, 0.6, 0.22
_BLOCK = 1024  # threads of a block of im2col
# The least seconds for each number of a channel, by steps that were profiled, and the argument that selects statistics.
_NORMS = {
    "native_batch_norm": (0.8e-9, 5),
    "native_batch_norm_backward": (1.5e-9, 7),
    "cudnn_batch_norm": (0.5e-9, 5),
    "cudnn_batch_norm_backward": (1e-9, None),
}


class Serial(NamedTuple):
    """The least `seconds` of a call, its `blocks` on the GPU at once, and its host time in `launches`."""

    seconds: float
    blocks: int
    launches: float = 1.0


def serial_of(name: str, call: Mapping[str, Any], moved: int) -> Serial | None:
    """Return the sequential part of a call that reads and writes `moved` bytes; `None` for most calls.

    >>> image, larger = ({"shape": [64, 1024, side, side], "dtype": "float32"} for side in (7, 14))
    >>> serial = serial_of("upsample_bilinear2d", {"args": [image], "outputs": [larger]}, 64 * 1024 * (49 + 196) * 4)
    >>> serial.blocks, serial.seconds > 0.01
    (1, True)
    """
    if not name.startswith(("upsample_", "im2col", "native_batch_norm", "cudnn_batch_norm")):
        return None
    if not all(values and "shape" in (values[0] or ()) for values in (call["args"], call["outputs"])):
        return None  # arguments by name, or no output
    if name.startswith("upsample_"):
        return _interpolated(name, call["args"][0], call["outputs"][0], moved)
    if name == "im2col" and len(call["args"][0]["shape"]) == 4:
        samples, channels = call["args"][0]["shape"][:2]
        windows, each = call["outputs"][0]["shape"][-1], math.prod(call["args"][1])
        launches = 1 + _OF_A_LAUNCH * (samples - 1)
        return Serial(samples * _SAMPLE_S * each**_BY_WINDOW, -(-channels * windows // _BLOCK), launches)
    if name in _NORMS and "stride" not in call["args"][0]:  # in another layout, blocks take many channels
        seconds, place = _NORMS[name]
        samples, channels, *places = call["args"][0]["shape"]
        if place is None or call["args"][place]:
            return Serial(samples * math.prod(places) * seconds, channels)
    return None


def _interpolated(name: str, given: Mapping[str, Any], made: Mapping[str, Any], moved: int) -> Serial | None:
    larger = given if name.endswith("backward") else made
    rounds, places = math.prod(larger["shape"][:2]), math.prod(larger["shape"][2:])
    if name == "upsample_bicubic2d_backward":
        threads = 512
        return Serial(rounds * 16 * _ADDED_BY_BLOCK_S * min(places, threads), -(-places // threads))
    if name == "upsample_bilinear2d_backward":
        return Serial(rounds * places * 4 * _ADDED_S, rounds * places)
    channels_last = "stride" in given and given["stride"][1] == 1 and given["shape"][1] > 1
    if name not in _INTERPOLATING or name == "upsample_bilinear2d" and channels_last:
        return None  # other kernels have a thread for each number
    threads, cached, beyond = _INTERPOLATING[name]
    return Serial(rounds * (cached if moved < _CACHED else beyond), -(-places // threads))
