"""Features of sounds, and the sounds themselves."""

import numpy as np

from .maker import Maker


def sounds(maker: Maker) -> None:
    """What `rnnoise` and the neural coders of Opus read: 98, 20 and 36 features a frame, and samples of 16 bits."""
    for name, frames, features in (("rnnoise", 200 * 500, 98), ("plc", 120_000, 20), ("opus", 40_000, 36)):
        values = maker.random.standard_normal((frames, features)).astype("f4")
        maker.write(maker.data / "sounds" / f"{name}.f32", values.tobytes())
    samples = maker.random.integers(-20_000, 20_000, 39_000 * 160).astype(np.int16)
    maker.write(maker.data / "sounds" / "opus.s16", samples.tobytes())
