"""Operators of PyTorch whose kernels work on samples one after the other, however large a GPU is.

Interpolation has a thread for each place of an image. It goes through all samples and channels one by one, and waits
for memory in each round (`UpSampleBilinear2d.cu` and its neighbours). Fifty places of a thousand channels keep a single
SM busy. `im2col` launches a kernel for each sample (`Im2Col.cu`). Nothing here imports PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# Threads of a block, and seconds of a round: what an H200 takes to read from its memory and to write there.
_INTERPOLATING = {
    "upsample_linear1d": (1024, 0.3e-6), "upsample_linear1d_backward": (1024, 0.3e-6),
    "upsample_bilinear2d": (1024, 0.3e-6), "upsample_bicubic2d": (512, 0.3e-6),
    "upsample_bicubic2d_backward": (512, 0.3e-6), "upsample_trilinear3d": (512, 0.3e-6),
    "upsample_trilinear3d_backward": (256, 0.3e-6),
}  # fmt: skip
_KERNEL_S = 2e-6  # a small kernel after another one
_OF_A_LAUNCH = 0.25  # of what the host takes for a call with one kernel, what it takes for each further one
_BLOCK = 1024  # threads of a block of im2col


class Serial(NamedTuple):
    """A call that takes `seconds` at least, and has so many `blocks` on the GPU at once.

    The host takes `launches` times as long for it as for one that launches a single kernel.
    """

    seconds: float
    blocks: int
    launches: float = 1.0


def serial_of(name: str, call: Mapping[str, Any]) -> Serial | None:
    """What of a call is done one after the other; `None` for most.

    >>> image, larger = ({"shape": [64, 1024, side, side], "dtype": "float32"} for side in (7, 14))
    >>> found = serial_of("upsample_bilinear2d", {"args": [image], "outputs": [larger]})
    >>> found.blocks, found.seconds > 0.01
    (1, True)
    """
    if name in _INTERPOLATING:
        image = call["args"][0]
        places = (image if name.endswith("backward") else call["outputs"][0])["shape"][2:]
        if name == "upsample_bilinear2d" and _channels_last(image):
            return None  # another kernel, with a thread for each number
        threads, seconds = _INTERPOLATING[name]
        samples, channels = image["shape"][:2]
        return Serial(samples * channels * seconds, -(-math.prod(places) // threads))
    if name == "im2col" and len(call["args"][0]["shape"]) == 4:
        samples, channels = call["args"][0]["shape"][:2]
        windows = call["outputs"][0]["shape"][-1]
        launches = 1 + _OF_A_LAUNCH * (samples - 1)
        return Serial(samples * _KERNEL_S, -(-channels * windows // _BLOCK), launches)
    return None


def _channels_last(image: Mapping[str, Any]) -> bool:
    return "stride" in image and image["stride"][1] == 1 and image["shape"][1] > 1
