"""Puts the parts of `torch.compile` in place; without Triton, the eager code."""

from __future__ import annotations

import importlib.util

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.compiler import dynamo, graph_trees, inductor, without_triton
from ullage.virtual.state import GPUState


def install(gpu: GPUState, replacements: Replacements) -> None:
    if importlib.util.find_spec("triton") is None:
        without_triton.install(gpu, replacements)
        return
    for part in (graph_trees, inductor, dynamo):  # what was compiled is forgotten before the rest is taken away
        part.install(gpu, replacements)
