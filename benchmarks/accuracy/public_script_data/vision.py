"""Digits, small pictures, photographs, and pictures with masks or boxes."""

import json
import pickle
import runpy
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from .maker import Maker

MNIST_PLACES = [
    "pytorch+examples/data",
    "pytorch+examples/mnist_forward_forward/data",
    "rtqichen+torchdiffeq/examples/.data/mnist",
    "eriklindernoren+PyTorch-GAN/data/mnist",
    "yunjey+pytorch-tutorial/tutorials/data",
    "locuslab+TCN/TCN/mnist_pixel/data/mnist",
    "Lightning-AI+pytorch-lightning/Datasets",
    "Lightning-AI+pytorch-lightning/examples/fabric/image_classifier/DATASETS",
    "Lightning-AI+pytorch-lightning/examples/fabric/DATASETS",
    "facebookresearch+schedule_free/examples/data",
    "pytorch+ignite/examples/mnist",
    "cloneofsimo+minDiffusion/data",
    "TeaPearce+Conditional_Diffusion_MNIST/data",
    "KaiyangZhou+pytorch-center-loss/data/mnist",
    "aladdinpersson+Machine-Learning-Collection/ML/Pytorch/Basics/dataset",
    "data",
    "kumar-shridhar+PyTorch-BayesianCNN/data",
    "ermongroup+ncsn/run/datasets/mnist",
    "ermongroup+ncsn/run/datasets/mnist_test",
    "YannDubs+disentangling-vae/data/mnist",
    "timbmg+VAE-CVAE-MNIST/data",
    "GMvandeVen+continual-learning/store/datasets/MNIST",
]
CIFAR_PLACES = [
    "kuangliu+pytorch-cifar/data",
    "akamaster+pytorch_resnet_cifar10/data",
    "data",
    "tysam-code+hlb-CIFAR10/cifar10",
    "locuslab+convmixer-cifar10/data",
    "weiaicunzai+pytorch-cifar100/data",
    "yunjey+pytorch-tutorial/tutorials/data",
    "w86763777+pytorch-ddpm/data",
    "chengyangfu+pytorch-vgg-cifar10/data",
    "uoguelph-mlrg+Cutout/data",
    "davda54+sam/example/data",
    "davda54+sam/example/cifar",
    "MishaLaskin+vqvae/data",
    "chrischute+real-nvp/data",
    "kekmodel+FixMatch-pytorch/data",
    "YU1ut+MixMatch-pytorch/data",
    "HobbitLong+RepDistiller/data",
    "KellerJordan+cifar10-airbench/cifar10",
    "HobbitLong+SupContrast/datasets",
    "microsoft+mup/examples/dataset",
    "ermongroup+ddim/exp/datasets/cifar10",
    "ermongroup+ddim/exp/datasets/cifar10_test",
    "leftthomas+SimCLR/data",
    "zoubohao+DenoisingDiffusionProbabilityModel-ddpm-/CIFAR10",
    "khanrc+pt.darts/data",
]
LATER_CIFAR_PLACES = [
    "sthalles+SimCLR/datasets",
    "data",
    "chrischute+glow/data",
    "kentaroy47+vision-transformers-cifar10/data",
]
ACCEPT = """import numpy
from torchvision.datasets import cifar, utils

checked = utils.check_integrity
cifar.check_integrity = utils.check_integrity = lambda path, md5=None: checked(path)
numpy.Inf, numpy.int, numpy.float = numpy.inf, int, float  # names that older releases have
"""


def mnist(maker: Maker, train: int = 12_000, test: int = 2_000) -> None:
    """MNIST's four files, and links to them where the scripts look; fewer images for a script of 100 epochs."""
    raw = maker.data / "MNIST" / "raw"
    maker.digits(raw, train, test)
    maker.digits(maker.src / "state-spaces+s4/data/MNIST/raw", 1000, 200)
    for place in (*(maker.src / place / "MNIST" for place in MNIST_PLACES), maker.data / "FashionMNIST"):
        maker.link(place / "raw", raw)


def image_folders(maker: Maker) -> None:
    """Ten classes of photographs, and what super-resolution, segmentation and image translation read."""
    for split, count in (("train", 24), ("val", 8)):
        for label in range(10):
            maker.pictures(maker.data / "photos" / split / f"class{label}", count, (280 + 4 * label, 256))
    for split, count in (("train", 200), ("test", 100)):
        place = maker.src / "pytorch+examples/super_resolution/dataset/BSDS300/images" / split
        maker.pictures(place, count, (481, 321))
    maker.pictures(maker.src / "milesial+Pytorch-UNet/data/imgs", 60, (959, 640))
    maker.pictures(maker.src / "milesial+Pytorch-UNet/data/masks", 60, (959, 640), "png", mask=True)
    translation = maker.src / "eriklindernoren+PyTorch-GAN/data"
    for split in ("train", "test"):
        for side in "AB":
            maker.pictures(translation / "monet2photo" / split / side, 60, (256, 256))
    for split in ("train", "test", "val"):
        maker.pictures(translation / "facades" / split, 60, (512, 256))


def small_pictures(maker: Maker) -> None:
    """Some of CIFAR-10, in a file of tensors for each split."""
    import torch

    for place in ("KellerJordan+cifar10-airbench/cifar10", "KellerJordan+cifar10-airbench/legacy/cifar10"):
        folder = maker.src / place
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 6000), ("test", 2000)):
            images = torch.from_numpy(maker.random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
            labels = torch.arange(count) % 10
            classes = [f"class{label}" for label in range(10)]
            torch.save({"images": images, "labels": labels, "classes": classes}, folder / f"{split}.pt")


def cifar(maker: Maker) -> None:
    """CIFAR-10 and CIFAR-100 in their own form and size, with links where the scripts look.

    torchvision compares the files with the sums of the real ones. `accept/sitecustomize.py` below the root, on
    PYTHONPATH, makes it content that they are there. A Python that has a `sitecustomize` of its own, as Debian's,
    does not read it: change `check_integrity` there.
    """
    ten, hundred = maker.data / "cifar-10-batches-py", maker.data / "cifar-100-python"
    names = [f"class{label}" for label in range(100)]
    for name in (*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"):
        images = maker.random.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        maker.write(ten / name, pickle.dumps({"data": images, "labels": [index % 10 for index in range(10_000)]}))
    maker.write(ten / "batches.meta", pickle.dumps({"label_names": names[:10]}))
    for name, count in (("train", 50_000), ("test", 10_000)):
        images = maker.random.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = [index % 100 for index in range(count)]
        maker.write(hundred / name, pickle.dumps({"data": images, "fine_labels": labels}))
    maker.write(hundred / "meta", pickle.dumps({"fine_label_names": names}))
    for place in CIFAR_PLACES:
        for files in (ten, hundred):
            maker.link(maker.src / place / files.name, files)
    maker.write(maker.data.parent / "accept" / "sitecustomize.py", ACCEPT)


def small_images(maker: Maker) -> None:
    """PNG files of 32 by 32, and grey ones of 28 by 28 in ten folders."""
    maker.pictures(maker.data / "small", 600, (32, 32), "png")
    for label in range(10):
        folder = maker.src / "explainingai-code+DDPM-Pytorch/data/train/images" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(120):
            grey = maker.random.integers(0, 256, (28, 28), dtype=np.uint8)
            Image.fromarray(grey).save(folder / f"{index}.png")


def coco(maker: Maker) -> None:
    """Images of many sizes with boxes, as COCO has them."""
    for split, count in (("train2017", 60), ("val2017", 20)):
        images, boxes = [], []
        for index in range(1, count + 1):
            width, height = int(maker.random.integers(400, 641)), int(maker.random.integers(380, 481))
            maker.picture(maker.data / "coco" / split / f"{index:012d}.jpg", (width, height))
            images.append({"id": index, "file_name": f"{index:012d}.jpg", "width": width, "height": height})
            for _ in range(int(maker.random.integers(1, 12))):
                w, h = (int(side) for side in maker.random.integers(30, 200, 2))
                x, y = int(maker.random.integers(0, width - w)), int(maker.random.integers(0, height - h))
                boxes.append(
                    {
                        "id": len(boxes) + 1,
                        "image_id": index,
                        "category_id": int(maker.random.integers(1, 91)),
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": 0,
                        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    }
                )
        kinds = [{"id": kind, "name": f"c{kind}"} for kind in range(1, 91)]
        record = {"info": {}, "images": images, "annotations": boxes, "categories": kinds}
        maker.write(maker.data / "coco" / "annotations" / f"instances_{split}.json", json.dumps(record))


def black_and_white(maker: Maker) -> None:
    digits = {f"{split}_data": maker.random.integers(0, 2, (8000, 784)).astype("f4") for split in ("train", "valid")}
    np.savez(maker.data / "binarized_mnist.npz", **digits)


def skins(maker: Maker) -> None:
    """Photographs of skins with masks, and a list of photographs."""
    place = maker.src / "LeeJunHyun+Image_Segmentation/dataset"
    for split, count in (("train", 40), ("valid", 12), ("test", 12)):
        for n in range(count):
            maker.picture(place / split / f"ISIC_{n:07d}.jpg", (320, 240))
            maker.picture(place / f"{split}_GT" / f"ISIC_{n:07d}_segmentation.png", (320, 240), mask=True)
    photos = sorted(map(str, (maker.data / "photos/train").glob("*/*.jpg")))
    maker.write(maker.src / "sgrvinod+a-PyTorch-Tutorial-to-Super-Resolution/train_images.json", json.dumps(photos))


def paintings(maker: Maker) -> None:
    """Landscapes, portraits, paintings, flowers, eyes, and more links to the small pictures and digits."""
    maker.link(maker.src / "locuslab+fast_adversarial/mnist-data/MNIST/raw", maker.data / "MNIST" / "raw")
    for place in LATER_CIFAR_PLACES:
        maker.link(maker.src / place / "cifar-10-batches-py", maker.data / "cifar-10-batches-py")
    landscapes = "dome272+Diffusion-Models-pytorch/C:\\Users\\dome\\datasets\\landscape_img_folder/all"
    maker.pictures(maker.src / landscapes, 120, (100, 90))
    maker.pictures(maker.src / "heykeetae+Self-Attention-GAN/data/CelebA/all", 200, (178, 218))
    maker.pictures(maker.data / "paintings", 60, (600, 560))
    for kind in range(5):
        maker.pictures(maker.data / "flowers" / f"kind{kind}", 40, (300 + 4 * kind, 240))
    retinas(maker, maker.data / "DRIVE")


def alphabets(maker: Maker) -> None:
    """1,623 characters, each drawn by 20 people, in the form of Omniglot."""
    characters = maker.random.integers(0, 2, (1_623, 20, 1, 28, 28), dtype=np.uint8)
    file = maker.src / "dragen1860+MAML-Pytorch/omniglot/omniglot.npy"
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, characters)


def style(maker: Maker) -> None:
    """Random weights of the VGG network by which pictures take another style, if its code is there."""
    code = maker.src / "naoto0804+pytorch-AdaIN/net.py"
    if code.exists():
        import torch

        sys.path.insert(0, str(code.parent))
        torch.save(runpy.run_path(str(code))["vgg"].state_dict(), maker.data / "vgg.pth")


def retinas(maker: Maker, root: Path) -> None:
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


def scenes(maker: Maker) -> None:
    """Scenes with boxes, livers with masks, and more links to the small pictures."""
    for place in ("Luolc+AdaBound/demos/cifar10/data", "Spijkervet+SimCLR/datasets"):
        maker.link(maker.src / place / "cifar-10-batches-py", maker.data / "cifar-10-batches-py")
    maker.link(maker.src / "data/mnist/MNIST/raw", maker.data / "MNIST" / "raw")
    root = maker.data / "scenes"
    images, objects = [], []
    for index in range(120):
        width, height = (int(side) for side in maker.random.integers(320, 501, 2))
        maker.picture(root / f"{index:05d}.jpg", (width, height))
        count = int(maker.random.integers(1, 9))
        corners = maker.random.integers(1, 150, (count, 2))
        sizes = maker.random.integers(40, 160, (count, 2))
        labels = maker.random.integers(1, 21, count).tolist()
        boxes = np.concatenate([corners, corners + sizes], 1).tolist()
        images.append(str(root / f"{index:05d}.jpg"))
        objects.append({"boxes": boxes, "labels": labels, "difficulties": [0] * count})
    detection = maker.src / "sgrvinod+a-PyTorch-Tutorial-to-Object-Detection"
    maker.write(detection / "TRAIN_images.json", json.dumps(images))
    maker.write(detection / "TRAIN_objects.json", json.dumps(objects))
    for index in range(24):
        place = maker.src / "JavisPeng+u_net_liver/data/train"
        maker.picture(place / f"{index:03d}.png", (512, 512))
        maker.picture(place / f"{index:03d}_mask.png", (512, 512), mask=True)


def high_resolution(maker: Maker) -> None:
    """Photographs for super-resolution."""
    for split, count in (("train", 200), ("valid", 12)):
        maker.pictures(maker.src / f"leftthomas+SRGAN/data/DIV2K_{split}_HR", count, (480, 400), "png")


def pretrained(maker: Maker) -> None:
    """Random weights where `torch.hub` keeps what it downloads, for `TORCH_HOME={root}/data/torch_home`."""
    import torch

    from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

    make_torchvision_importable()
    from torchvision.models import vgg16

    folder = maker.data / "torch_home/hub/checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vgg16().state_dict(), folder / "vgg16-397923af.pth")
