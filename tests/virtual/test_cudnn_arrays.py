"""The files that cuDNN's tables and trees are kept in."""

import sys
from pathlib import Path

import numpy
import pytest

from ullage.errors import UnsupportedPlatform
from ullage.virtual.cudnn.arrays import read_arrays, read_header, write_arrays


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_arrays_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"some.{suffix}"
    arrays = {
        "w_steps": numpy.arange(0, 10**6, 997, dtype=numpy.uint32),
        "header": numpy.frombuffer(b'{"gpu": "H200"}', dtype=numpy.uint8),
        "w_formulas": numpy.arange(-9, 9, dtype=numpy.int64).reshape(2, 9),
        "x_formulas": numpy.zeros((0, 9), dtype=numpy.int64),
        "w_scale": numpy.array(0.5, dtype=numpy.float16),
    }
    write_arrays(path, arrays)
    found = read_arrays(path)
    assert found.keys() == arrays.keys() and read_header(path) == {"gpu": "H200"}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert (found[name] == array).all(), name


def test_a_python_without_xz_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(UnsupportedPlatform, match="liblzma-dev"):
        read_arrays(tmp_path / "trees.xz")
