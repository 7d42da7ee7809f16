"""Files of arrays, a fifth smaller than NumPy's own: gzip for millions of numbers, xz for few.

A line of JSON names the arrays, their types and shapes. Their bytes follow, for each array all first bytes of its
numbers, then all second bytes, and so on: the higher ones of neighbours are alike. Needs NumPy.
"""

import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ullage.errors import MissingPackage, UnsupportedPlatform

HEADER = "header"  # the first array in a file, so that it can be read without the rest


def needed_numpy() -> Any:
    """Return NumPy, which the Python of a script may lack; it is needed for convolutions only."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise MissingPackage("numpy", "estimates of convolutions") from None
    return numpy


def _opened(path: Path, mode: str) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, mode, mtime=0)  # type: ignore[return-value]
    try:
        import lzma
    except ModuleNotFoundError:  # some builds of Python lack it
        raise UnsupportedPlatform(
            "estimates of convolutions need Python's module lzma, without which this Python was built; install "
            "liblzma-dev and build it again, or take another Python"
        ) from None
    if mode == "rb":
        return lzma.open(path)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 23, "lc": 0, "lp": 0, "pb": 0}]
    return lzma.open(path, "wb", check=lzma.CHECK_CRC32, filters=filters)


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to a file that ends in .gz or .xz; those with the same end of their names are adjacent."""
    np = needed_numpy()
    names = sorted(arrays, key=lambda name: (name != HEADER, name.rpartition("_")[::-1]))
    columns = [np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape) for name in names]
    listed = [
        (name, column.dtype.newbyteorder("<").str, column.shape) for name, column in zip(names, columns, strict=True)
    ]
    with _opened(path, "wb") as file:
        file.write(json.dumps(listed).encode() + b"\n")
        for column in columns:
            file.write(column.reshape(-1, 1).view(np.uint8).T.tobytes())


def read_arrays(path: Path) -> dict[str, Any]:
    with _opened(path, "rb") as file:
        return {name: _array(file, kind, shape) for name, kind, shape in json.loads(file.readline())}


def read_header(path: Path) -> dict[str, Any]:
    """Return the JSON of a table's first array, without reading the rest of the file."""
    with _opened(path, "rb") as file:
        (_, kind, shape), *_ = json.loads(file.readline())
        return header_of(_array(file, kind, shape))


def header_of(array: Any) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(bytes(array).decode())
    return header


def _array(file: IO[bytes], kind: str, shape: list[int]) -> Any:
    np = needed_numpy()
    dtype = np.dtype(kind)
    planes = np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype=np.uint8)
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype).reshape(shape)
