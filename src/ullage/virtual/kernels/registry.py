"""Where a kernel's rule is found: a dictionary from the operator's name to a function, and a decorator that fills it.

A rule says what the CUDA kernel does that PyTorch's shape inference cannot know: other outputs, temporaries, and the
order of the requests. An operator without a rule takes its outputs in order and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ullage.virtual.kernels.plan import Plan


@dataclass(slots=True)
class Call:
    """One operator call on the virtual GPU: its arguments (metadata only) and what the GPU is set to."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gpu: Any  # the VirtualGPU; a rule may read `gpu.spec` and `gpu.settings`
    infer: Callable[[], Plan]  # what PyTorch's own shape inference says

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument given by place or by name.

        >>> Call(None, (1, 2), {}, None, None).argument(1, "dim")
        2
        """
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


F = TypeVar("F", bound=Callable[..., Any])
Rule = Callable[[Call], Plan]
RULES: dict[str, Rule] = {}


def register(table: dict[str, F], names: tuple[str, ...]) -> Callable[[F], F]:
    """A decorator that enters a function under these names; a name that is taken is refused.

    >>> table = {}
    >>> @register(table, ("a", "b"))
    ... def both(): ...
    >>> sorted(table)
    ['a', 'b']
    """

    def enter(function: F) -> F:
        for name in names:
            if name in table:
                raise ValueError(f"{name} is taken by {table[name].__qualname__}")
            table[name] = function
        return function

    return enter


def kernel(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name, such as `"aten.sum.dim_IntList"`."""
    return register(RULES, names)
