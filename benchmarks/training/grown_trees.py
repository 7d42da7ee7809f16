"""Decision trees grown by a compiled loop (`grow_tree.c`): as scikit-learn's, and as fast with thousands of classes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


class _Node(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "end", "feature", "place", "left", "right")),
        ("gain", ctypes.c_double),
    )


class Shares:
    """The samples of each class in a node, as scikit-learn's `tree_.value`."""

    def __init__(self, labels: Any, starts: Any, ends: Any, classes: int) -> None:
        self._labels, self._starts, self._ends, self._classes = labels, starts, ends, classes

    def __getitem__(self, node: int) -> Any:
        members = self._labels[self._starts[node] : self._ends[node]]
        return np.bincount(members, minlength=self._classes).astype(np.float64)[None]


class Grower:
    """`table.grow` with the compiled loop; what it returns has what `table.export` reads."""

    def __init__(self, folder: Path) -> None:
        library = folder / f"grow_tree_{os.getpid()}.so"
        source = Path(__file__).with_name("grow_tree.c")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
        self._grow = ctypes.CDLL(str(library.resolve())).grow
        self._grow.restype = ctypes.c_int64

    def grow(self, rows: Any, labels: Any, trees: int, leaves: int, tried: float = 1.0, least: int = 1) -> list[Any]:
        """Trees on rows of features, each with others tried at its nodes: so many of all. A leaf has `least` rows."""
        columns = [np.unique(column, return_inverse=True) for column in rows.T]
        ranks = np.ascontiguousarray([places for _, places in columns], dtype=np.int32)
        classes, targets = np.unique(labels, return_inverse=True)
        targets = targets.astype(np.int32)
        limits = int(tried * rows.shape[1]), len(classes), leaves, least
        return [self._tree(columns, ranks, targets, classes, limits, seed) for seed in range(trees)]

    def _tree(self, columns: Any, ranks: Any, targets: Any, classes: Any, limits: tuple[int, ...], seed: int) -> Any:
        features, samples = ranks.shape
        order = np.arange(samples, dtype=np.int64)
        nodes = (_Node * (2 * limits[2]))()
        numbers = (samples, features, *limits)
        count = self._grow(
            *(ctypes.c_void_p(array.ctypes.data) for array in (ranks, targets)),
            *(ctypes.c_int64(number) for number in numbers),
            ctypes.c_uint64(seed),
            ctypes.c_void_p(order.ctypes.data),
            nodes,
        )
        made = nodes[:count]
        thresholds = np.zeros(count)
        for number, node in enumerate(made):
            if node.left >= 0:
                values = columns[node.feature][0]
                inside = ranks[node.feature][order[node.start : node.end]]
                above = inside[inside > node.place].min()
                thresholds[number] = (values[node.place] + values[above]) / 2
        inner = SimpleNamespace(
            children_left=np.array([node.left for node in made]),
            children_right=np.array([node.right for node in made]),
            feature=np.array([node.feature for node in made]),
            threshold=thresholds,
            value=Shares(targets[order], [n.start for n in made], [n.end for n in made], len(classes)),
        )
        return SimpleNamespace(tree_=inner, classes_=classes)


def named(tree: Any, rows: Any) -> Any:
    """The class that a tree names for each row: the commonest one of its leaf."""
    inner = tree.tree_
    left, right = inner.children_left, inner.children_right
    node = np.zeros(len(rows), np.int64)
    while (open_ := np.flatnonzero(left[node] >= 0)).size:
        at = node[open_]
        goes_left = rows[open_, inner.feature[at]] <= inner.threshold[at]
        node[open_] = np.where(goes_left, left[at], right[at])
    leaves, back = np.unique(node, return_inverse=True)
    return tree.classes_[np.array([int(inner.value[leaf][0].argmax()) for leaf in leaves])][back]
