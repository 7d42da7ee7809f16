"""Keeps PyTorch's compiler from being loaded by processes that only train step by step.

The first step of an optimizer imports `torch._dynamo`, to tell the compiler where to stop: 880 modules and four seconds
of processor time in every process, where a whole run takes one. It cannot be imported once by the parent of the
processes, because its import asks for the GPU, after which a fork has no use of it. Without a compiler at work the two
functions that optimizers call do nothing. A model that compiles itself cannot be trained in such a process.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

NAME = "torch._dynamo"


class StandIn(types.ModuleType):
    """What optimizers ask of the compiler when nothing is compiled; any other question loads the real one."""

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Where compiled code would be cut."""

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """A function that must not be compiled is itself."""
        return function if function is not None else lambda inner: inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def no_compiler() -> None:
    """Take the stand-in, in this process and those forked from it, unless the compiler is loaded already.

    >>> no_compiler()
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1); optimizer.zero_grad()
    """
    if NAME not in sys.modules:
        stand_in = StandIn(NAME)
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in
