"""What writes random data below a folder."""

import struct
from pathlib import Path

import numpy as np
from PIL import Image


class Maker:
    """Writes data below a folder; the same each time."""

    def __init__(self, root: Path) -> None:
        self.data, self.src = root / "data", root / "src"
        self.random = np.random.default_rng(0)

    def write(self, file: Path, content: str | bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def link(self, place: Path, target: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(target)

    def digits(self, raw: Path, train: int, test: int) -> None:
        """So many images with their labels."""
        for prefix, count in (("train", train), ("t10k", test)):
            images = self.random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (np.arange(count) % 10).astype(np.uint8)
            self.write(raw / f"{prefix}-images-idx3-ubyte", struct.pack(">4I", 0x803, count, 28, 28) + images.tobytes())
            self.write(raw / f"{prefix}-labels-idx1-ubyte", struct.pack(">2I", 0x801, count) + labels.tobytes())

    def picture(self, file: Path, size: tuple[int, int], mask: bool = False) -> None:
        """One image of coarse noise, or a mask of zeros and ones."""
        shape = (size[1] // 8 + 1, size[0] // 8 + 1)
        values = self.random.integers(0, 2, shape) if mask else self.random.integers(0, 256, (*shape, 3))
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.astype(np.uint8)).resize(size, Image.Resampling.NEAREST).save(file)

    def pictures(self, folder: Path, count: int, size: tuple[int, int], kind: str = "jpg", mask: bool = False) -> None:
        for index in range(count):
            self.picture(folder / f"{index:05d}.{kind}", size, mask)

    def words(self, file: Path, count: int, vocabulary: int) -> None:
        """Lines of 5 to 39 words, some of them frequent."""
        rank = self.random.zipf(1.3, count * 2)
        text = [f"w{number}" for number in rank[rank <= vocabulary][:count]]
        lines, begin = [], 0
        while begin < len(text):
            length = int(self.random.integers(5, 40))
            lines.append(" ".join(text[begin : begin + length]))
            begin += length
        self.write(file, "\n".join(lines) + "\n")
