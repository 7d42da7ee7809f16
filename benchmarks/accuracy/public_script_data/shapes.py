"""Clouds of points, and views of a scene."""

import json

import numpy as np

from .maker import Maker


def points(maker: Maker) -> None:
    """Clouds of 2,600 points in two classes, in the form of ShapeNet's parts."""
    root, names = maker.data / "shapes", {"Chair": "03001627", "Lamp": "03636649"}
    maker.write(root / "synsetoffset2category.txt", "".join(f"{name}\t{place}\n" for name, place in names.items()))
    files = []
    for place in names.values():
        for index in range(96):
            cloud = maker.random.standard_normal((2_600, 3)).round(4)
            maker.write(root / place / "points" / f"{index}.pts", "\n".join(" ".join(map(str, at)) for at in cloud))
            parts = maker.random.integers(1, 5, 2_600)
            maker.write(root / place / "points_label" / f"{index}.seg", "\n".join(map(str, parts)))
            files.append(f"shape_data/{place}/{index}")
    for split in ("train", "test", "val"):
        maker.write(root / "train_test_split" / f"shuffled_{split}_file_list.json", json.dumps(files))


def scene(maker: Maker) -> None:
    scene = maker.src / "krrish94+nerf-pytorch/cache/tiny_nerf_data.npz"
    scene.parent.mkdir(parents=True, exist_ok=True)
    poses = np.tile(np.eye(4, dtype="f4"), (106, 1, 1))
    np.savez(scene, images=maker.random.random((106, 100, 100, 3), "f4"), poses=poses, focal=np.array(138.9))


def clouds(maker: Maker) -> None:
    """Clouds of 1,100 points with normals in ten classes, in the form of ModelNet."""
    root = maker.src / "yanx27+Pointnet_Pointnet2_pytorch/data/modelnet40_normal_resampled"
    kinds = [f"kind{index}" for index in range(10)]
    maker.write(root / "modelnet10_shape_names.txt", "\n".join(kinds) + "\n")
    for split, begin, end in (("train", 1, 25), ("test", 25, 30)):
        names = [f"{kind}_{index:04d}" for kind in kinds for index in range(begin, end)]
        maker.write(root / f"modelnet10_{split}.txt", "\n".join(names) + "\n")
        for name in names:
            rows = maker.random.standard_normal((1_100, 6)).round(4)
            maker.write(root / name.split("_")[0] / f"{name}.txt", "\n".join(",".join(map(str, row)) for row in rows))
