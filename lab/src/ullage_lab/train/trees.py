"""Grows regression trees with LightGBM, as arrays that Ullage walks."""

from typing import Any

import numpy as np

from ullage.errors import InvalidValue, MissingPackage
from ullage.performance.rates import Floats
from ullage.performance.trees import Trees


def grow(features: Floats, target: Floats, options: dict[str, Any], count: int, purpose: str) -> Trees:
    """Grow trees with LightGBM; the same arguments give the same trees."""
    try:
        import lightgbm
    except ImportError:
        raise MissingPackage("lightgbm", purpose) from None
    quiet = {"verbosity": -1}
    options = {"feature_fraction": 0.7, "deterministic": True, "num_threads": 1, **options, **quiet}
    data = lightgbm.Dataset(features, target, params=quiet)
    return from_lightgbm(lightgbm.train(options, data, num_boost_round=count))


def from_lightgbm(booster: Any) -> Trees:
    return from_lists([_nodes(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]])


def from_lists(trees: list[list[dict[str, Any]]]) -> Trees:
    """Return trees from lists of nodes, root first; a leaf has a "value", another node a "feature" and so on."""
    if not trees:
        raise InvalidValue("trees must be a list of at least one tree")
    nodes = max(len(tree) for tree in trees)
    shape = (len(trees), nodes)
    feature, left, right = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    threshold, value = np.zeros(shape), np.zeros(shape)
    for row, tree in enumerate(trees):
        for place, node in enumerate(tree):
            feature[row, place] = node.get("feature", 0)
            threshold[row, place] = node.get("threshold", 0.0)
            left[row, place] = node.get("left", place)
            right[row, place] = node.get("right", place)
            value[row, place] = node.get("value", 0.0)
    return Trees(feature, threshold, left, right, value, max(_depth(tree, 0) for tree in trees))


def _depth(tree: list[dict[str, Any]], place: int) -> int:
    node = tree[place]
    if "left" not in node:
        return 0
    return 1 + max(_depth(tree, node["left"]), _depth(tree, node["right"]))


def _nodes(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return LightGBM's nested tree as a list, root first."""
    nodes: list[dict[str, Any]] = []

    def add(node: dict[str, Any]) -> int:
        place = len(nodes)
        nodes.append({})
        if "leaf_value" in node:
            nodes[place] = {"value": node["leaf_value"]}
            return place
        split = {"feature": node["split_feature"], "threshold": node["threshold"]}
        nodes[place] = split | {"left": add(node["left_child"]), "right": add(node["right_child"])}
        return place

    add(root)
    return nodes
