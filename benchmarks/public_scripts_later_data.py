"""More random data for `public_scripts.py`, for the scripts that were drawn last."""

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from public_scripts_data import Maker

PICTURES = (
    "sthalles+SimCLR/datasets", "data", "chrischute+glow/data", "kentaroy47+vision-transformers-cifar10/data",
)  # fmt: skip


def make_later_data(maker: "Maker") -> None:
    """Everything that these scripts read, if `Maker` has made its pictures, digits and tables."""
    data, src, random = maker.data, maker.src, maker.random
    link(src / "locuslab+fast_adversarial/mnist-data/MNIST/raw", data / "MNIST" / "raw")
    for place in PICTURES:
        link(src / place / "cifar-10-batches-py", data / "cifar-10-batches-py")
    places = src / "dome272+Diffusion-Models-pytorch/C:\\Users\\dome\\datasets\\landscape_img_folder"
    maker.pictures(places / "all", 120, (100, 90))
    maker.pictures(src / "heykeetae+Self-Attention-GAN/data/CelebA/all", 200, (178, 218))
    maker.pictures(data / "paintings", 60, (600, 560))
    for kind in range(5):
        maker.pictures(data / "flowers" / f"kind{kind}", 40, (300 + 4 * kind, 240))
    retinas(maker, data / "DRIVE")
    traffic(src, random)
    series = random.random((2_600, 137)).round(4)
    maker.write(data / "solar.txt", "\n".join(",".join(map(str, row)) for row in series) + "\n")
    (src / "nnzhan+MTGNN/model").mkdir(parents=True, exist_ok=True)
    films = [f"{user} {film}" for user in range(1, 2_001) for film in random.integers(1, 3_417, int(20 + user % 150))]
    maker.write(src / "pmixer+SASRec.pytorch/python/data/ml-1m.txt", "\n".join(films) + "\n")
    alphabets = src / "dragen1860+MAML-Pytorch/omniglot/omniglot.npy"
    alphabets.parent.mkdir(parents=True, exist_ok=True)
    np.save(alphabets, random.integers(0, 2, (1_623, 20, 1, 28, 28), dtype=np.uint8))
    clouds(maker, src / "yanx27+Pointnet_Pointnet2_pytorch/data/modelnet40_normal_resampled")
    style = src / "naoto0804+pytorch-AdaIN/net.py"
    if style.exists():
        import torch

        sys.path.insert(0, str(style.parent))
        torch.save(runpy.run_path(str(style))["vgg"].state_dict(), data / "vgg.pth")


def link(place: Path, target: Path) -> None:
    """A link, with the folders above it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(target)


def traffic(src: Path, random: np.random.Generator) -> None:
    """Speeds at 207 places, and flows at 307."""
    near = (random.random((207, 207)) < 0.05).astype("f4")
    stgcn = src / "FelixOpolka+STGCN-PyTorch/data"
    stgcn.mkdir(parents=True, exist_ok=True)
    np.save(stgcn / "adj_mat.npy", near)
    np.save(stgcn / "node_values.npy", random.random((1_500, 207, 2), "f4"))
    flows = src / "LeiBAI+AGCRN/data/PeMSD4/pems04.npz"
    flows.parent.mkdir(parents=True, exist_ok=True)
    np.savez(flows, data=random.random((1_800, 307, 3), "f4"))


def retinas(maker: "Maker", root: Path) -> None:
    """Pictures of eyes with vessels and a field of view, in the form of DRIVE."""
    seen = np.full((584, 565), 255, np.uint8)
    for split in ("training", "test"):
        for index in range(1, 13):
            maker.picture(root / split / "images" / f"{index:02d}_{split}.tif", (565, 584))
            vessels = (255 * maker.random.integers(0, 2, (584, 565))).astype(np.uint8)
            for name, grey in ((f"1st_manual/{index:02d}_manual1", vessels), (f"mask/{index:02d}_{split}_mask", seen)):
                file = root / split / f"{name}.gif"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(grey).save(file)


def clouds(maker: "Maker", root: Path) -> None:
    """Clouds of 1,100 points with normals in ten classes, in the form of ModelNet."""
    kinds = [f"kind{index}" for index in range(10)]
    maker.write(root / "modelnet10_shape_names.txt", "\n".join(kinds) + "\n")
    for split, begin, end in (("train", 1, 25), ("test", 25, 30)):
        names = [f"{kind}_{index:04d}" for kind in kinds for index in range(begin, end)]
        maker.write(root / f"modelnet10_{split}.txt", "\n".join(names) + "\n")
        for name in names:
            rows = maker.random.standard_normal((1_100, 6)).round(4)
            maker.write(root / name.split("_")[0] / f"{name}.txt", "\n".join(",".join(map(str, row)) for row in rows))
