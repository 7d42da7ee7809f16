"""A recorded history of PyTorch's allocator."""

from pathlib import Path
from typing import NamedTuple, Self


class History(NamedTuple):
    """What an allocator did: actions (`blocks.ALLOC` and the others), addresses, and sizes as requested (segments: as
    taken)."""

    action: list[int]
    addr: list[int]
    size: list[int]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a history from an `.npz` file with these arrays; needs NumPy."""
        import numpy

        with numpy.load(path) as arrays:
            return cls(*(arrays[name].astype("int64").tolist() for name in cls._fields))
