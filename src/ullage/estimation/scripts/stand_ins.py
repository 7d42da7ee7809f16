"""Stand-ins for downloads whose shapes are known: metrics and data sets.

A metric, as in `evaluate.load("accuracy")`, is code of the hub that runs on the CPU. Its stand-in takes the predictions
and returns zeros, because scores have no effect on memory. A data set of torchvision whose images all have one size
becomes images of noise. The three graphs of `Planetoid` have the right numbers of nodes, edges and features, drawn at
random.
"""

import functools
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ullage.virtual.call.replacements import Replacements

Note = Callable[[str, str], Any]


def install_stand_ins(note: Note, replacements: Replacements) -> None:
    """Let a script use stand-ins for metrics and data sets that it can neither find nor download."""
    _install_metrics(note, replacements)
    replacements.when_imported("torchvision.datasets", lambda module: _install_pictures(module, note, replacements))
    replacements.when_imported(
        "torch_geometric.datasets.planetoid", lambda module: _install_graphs(module, note, replacements)
    )


def _install_metrics(note: Note, replacements: Replacements) -> None:

    def watch(evaluate: ModuleType) -> None:
        load = evaluate.load

        @functools.wraps(load)
        def load_or_stand_in(path: str, *args: Any, **options: Any) -> Any:
            try:
                return load(path, *args, **options)
            except (FileNotFoundError, ConnectionError):
                if path.startswith((".", "/")) or path.endswith(".py"):
                    raise
            note("metrics", f"the metric {path} was not downloaded: its scores are zeros")
            return _Metric(path)

        replacements.put(evaluate, "load", load_or_stand_in)

    replacements.when_imported("evaluate", watch)


class _Metric:
    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, *args: Any, **options: Any) -> None:
        """Take one prediction."""

    add_batch = add

    def compute(self, *args: Any, **options: Any) -> dict[str, float]:
        return _Scores({self.name: 0.0})


class _Scores(dict[str, float]):
    def __missing__(self, name: str) -> float:
        return 0.0


# Data sets of torchvision: how many pictures their parts have, and what fills them.

_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 27, "digits": 10, "mnist": 10}
_EMNIST = {
    **dict.fromkeys(("byclass", "bymerge"), (697_932, 116_323)),
    **{"balanced": (112_800, 18_800), "letters": (124_800, 20_800)},
    **{"digits": (240_000, 40_000), "mnist": (60_000, 10_000)},
}
_SVHN = {"train": 73_257, "test": 26_032, "extra": 531_131}
_SAME = "a set of as many pictures of noise of its size ({:,})"
_STL10 = {"train": 5_000, "test": 8_000, "unlabeled": 100_000, "train+unlabeled": 105_000}


def _install_pictures(datasets: ModuleType, note: Note, replacements: Replacements) -> None:
    kinds = {"CIFAR10": _fill_cifar, "MNIST": _fill_mnist, "SVHN": _fill_svhn, "STL10": _fill_stl10}
    for name, fill in kinds.items():
        _open_or_fill(getattr(datasets, name), fill, note, replacements)


def _open_or_fill(kind: Any, fill: Callable[[Any], str], note: Note, replacements: Replacements) -> None:
    """Fill a data set, or one of a derived class, that cannot be opened."""
    begin = kind.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        try:
            begin(self, *args, **options)
        except (RuntimeError, OSError):  # not found, or not to be downloaded
            note("data", f"{type(self).__name__} is not in {self.root}: {fill(self)} replaced it")

    replacements.put(kind, "__init__", __init__)


def _noise(count: int, *shape: int) -> Any:
    """Return different images in little memory: each begins some bytes after the one before.

    Black ones have no deviation, and a script may divide by the deviation of its data.
    """
    import numpy as np

    size, apart = math.prod(shape), 7
    drawn = np.random.default_rng(0).integers(0, 256, size + apart * count, np.uint8)
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return np.lib.stride_tricks.as_strided(drawn, (count, *shape), (apart, *strides))


def _fill_cifar(data: Any) -> str:
    count = 50_000 if data.train else 10_000
    classes = 100 if data.base_folder == "cifar-100-python" else 10
    data.data = _noise(count, 32, 32, 3)
    data.targets = [place % classes for place in range(count)]
    data.classes = [str(number) for number in range(classes)]
    data.class_to_idx = {name: number for number, name in enumerate(data.classes)}
    return _SAME.format(count)


def _fill_mnist(data: Any) -> str:
    import torch

    split = getattr(data, "split", "mnist")
    count = _EMNIST[split][0 if data.train else 1]
    data.data = torch.from_numpy(_noise(count, 28, 28))
    data.targets = torch.arange(count) % _CLASSES[split]
    return _SAME.format(count)


def _fill_svhn(data: Any) -> str:
    return _fill_with_labels(data, _SVHN[data.split], 32)


def _fill_stl10(data: Any) -> str:
    data.classes = [str(number) for number in range(10)]
    return _fill_with_labels(data, _STL10[data.split], 96)


def _fill_with_labels(data: Any, count: int, size: int) -> str:
    import numpy as np

    data.data = _noise(count, 3, size, size)
    data.labels = np.arange(count) % 10
    return _SAME.format(count)


# Graphs of PyTorch Geometric: nodes, features, edges in one direction, and classes.

_PLANETOID = {
    "cora": (2_708, 1_433, 5_278, 7),
    "citeseer": (3_327, 3_703, 4_552, 6),
    "pubmed": (19_717, 500, 44_324, 3),
}
_LABELLED, _VALIDATION, _TEST = 20, 500, 1_000  # nodes of a class to train on, and of all classes


def _install_graphs(planetoid: ModuleType, note: Note, replacements: Replacements) -> None:
    kind = planetoid.Planetoid
    download, process = kind.download, kind.process

    def download_or_not(self: Any) -> None:
        try:
            download(self)
        except Exception:  # each of its ways to reach a server has its own
            if self.name.lower() not in _PLANETOID:
                raise

    def process_or_make_up(self: Any) -> None:
        if all(map(os.path.exists, self.raw_paths)):
            process(self)
            return
        note("data", f"{self.name} is not in {self.root}: a synthetic graph of the same size replaced it")
        graph = _graph(*_PLANETOID[self.name.lower()])
        self.save([graph if self.pre_transform is None else self.pre_transform(graph)], self.processed_paths[0])

    replacements.put(kind, "download", download_or_not)
    replacements.put(kind, "process", process_or_make_up)


def _graph(nodes: int, features: int, edges: int, classes: int) -> Any:
    import torch
    from torch_geometric.data import Data  # type: ignore[import-not-found, unused-ignore]

    drawn = torch.Generator().manual_seed(0)
    ends = torch.randint(nodes, (2, edges), generator=drawn)
    labels = torch.arange(nodes) % classes
    masks = [torch.zeros(nodes, dtype=torch.bool) for _ in range(3)]
    trained_on = _LABELLED * classes
    parts = ((0, trained_on), (trained_on, trained_on + _VALIDATION), (nodes - _TEST, nodes))
    for mask, (begin, end) in zip(masks, parts, strict=True):
        mask[begin:end] = True
    return Data(
        x=(torch.rand((nodes, features), generator=drawn) < 0.01).float(),
        edge_index=torch.cat([ends, ends.flip(0)], 1),
        y=labels,
        train_mask=masks[0],
        val_mask=masks[1],
        test_mask=masks[2],
    )
