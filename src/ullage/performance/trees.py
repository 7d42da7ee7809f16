"""Regression trees as plain arrays, all evaluated at once: LightGBM's results without LightGBM."""

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_AT_ONCE = 64  # rows
_LEVELS = 3  # after which rows that have reached a leaf are set aside
_ARRAYS = ("feature", "threshold", "left", "right", "value", "depth")


@dataclass(frozen=True)
class Trees:
    """Arrays [trees, nodes]: a node sends values up to its threshold left; a leaf has a value and points to itself."""

    feature: npt.NDArray[np.int32]
    threshold: Floats
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: Floats
    depth: int

    def sum(self, features: Floats) -> float:
        """Return the sum of the leaves that these features reach."""
        return float(self.leaves(features).sum())

    def leaves(self, features: Floats) -> Floats:
        """Return the value of the leaf that these features reach in each tree."""
        node = np.zeros(len(self.feature), dtype=np.int32)
        tree = np.arange(len(node))
        for _ in range(self.depth):
            goes_left = features[self.feature[tree, node]] <= self.threshold[tree, node]
            node = np.where(goes_left, self.left[tree, node], self.right[tree, node])
        return self.value[tree, node]

    def sums(self, rows: Floats) -> Floats:
        """Return `sum` for each row of features."""
        if not len(rows):
            return np.zeros(0)
        return np.concatenate([self._walked(rows[begin : begin + _AT_ONCE]) for begin in range(0, len(rows), _AT_ONCE)])

    @functools.cached_property
    def _flat(self) -> tuple[Any, Floats, Any, Floats, Any]:
        """The nodes of all trees, numbered together: feature, threshold, both next nodes, value, whether a leaf."""
        first = (np.arange(len(self.feature)) * self.feature.shape[1])[:, None]
        left, right = (self.left + first).ravel(), (self.right + first).ravel()
        ends = (left == right) & (left == np.arange(len(left)))
        feature = self.feature.ravel().astype(np.intp)  # NumPy's type for indices, which avoids conversions
        return feature, self.threshold.ravel(), np.column_stack([right, left]).ravel(), self.value.ravel(), ends

    def _walked(self, rows: Floats) -> Floats:
        feature, threshold, followers, value, ends = self._flat
        trees, nodes = self.feature.shape
        node = np.tile(np.arange(trees) * nodes, len(rows))
        begin = np.repeat(np.arange(len(rows)) * rows.shape[1], trees)
        numbers = rows.ravel()
        reached, places = node, np.arange(len(node))
        for level in range(1, self.depth + 1):
            goes_left = numbers.take(feature.take(node) + begin) <= threshold.take(node)
            node = followers.take(2 * node + goes_left)
            if level % _LEVELS == 0:  # most are at a leaf long before the deepest one is
                reached[places] = node
                on = np.flatnonzero(~ends.take(node))
                node, begin, places = node.take(on), begin.take(on), places.take(on)
        reached[places] = node
        return np.asarray(value.take(reached).reshape(len(rows), trees).sum(axis=1))

    def arrays(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        links = {"feature": self.feature, "left": self.left, "right": self.right}
        return {
            f"{prefix}.{name}": each.astype(np.min_scalar_type(int(each.max()))) for name, each in links.items()
        } | {
            f"{prefix}.threshold": self.threshold.astype(np.float32),
            f"{prefix}.value": self.value.astype(np.float32),
            f"{prefix}.depth": np.array([self.depth], dtype=np.int32),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], prefix: str) -> Self:
        feature, threshold, left, right, value, depth = (arrays[f"{prefix}.{name}"] for name in _ARRAYS)
        links = [array.astype(np.int32) for array in (feature, left, right)]
        return cls(links[0], threshold.astype(np.float64), links[1], links[2], value.astype(np.float64), int(depth[0]))
