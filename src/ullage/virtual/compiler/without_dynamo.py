"""Keeps code that does not compile from importing PyTorch's compiler, which takes as long as PyTorch itself.

Making an optimizer imports `torch._dynamo`, to exclude functions from compilation; shape inference imports `sympy` and
others, to ask whether a number is a symbol of the compiler. Without a compiler there is nothing to exclude, and no
number is a symbol. Any other access loads the real module.
"""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.fx.experimental

DYNAMO, UTILITIES = "torch._dynamo", "torch._dynamo.utils"
SHAPES, SYMBOLS = "torch.fx.experimental.symbolic_shapes", "sympy"

# Functions that shape inference calls on conditions and sizes, for numbers that are not symbols.
_OF_NUMBERS: dict[str, Callable[..., bool]] = {
    "expect_true": bool,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "statically_known_true": bool,
    "is_nested_int": lambda value: False,
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
    "sym_eq": lambda one, other: one == other,
}
# Functions that it also imports, but calls for symbols only.
_OF_SYMBOLS = ("free_unbacked_symbols", "guarding_hint_or_throw", "has_guarding_hint")


class _StandIn(types.ModuleType):
    """A module with a few functions; any other access loads the real module."""

    def __init__(self, name: str, make_place: Callable[[], None], **functions: Any) -> None:
        super().__init__(name)
        package, _, _ = name.rpartition(".")
        folders = [f"{torch.__path__[0]}/{package.removeprefix('torch').replace('.', '/')}"] if package else None
        self.__spec__ = spec = importlib.machinery.PathFinder.find_spec(name, folders)
        vars(self).update(functions, _make_place=make_place)
        if spec is not None:
            self.__file__ = spec.origin

    def __getattr__(self, name: str) -> Any:
        # Python itself reads names of modules: it reads a package's `__path__` to import a submodule.
        if name.startswith("__") and name != "__version__" and sys.modules.get(self.__name__) is self:
            is_package = self.__spec__ is not None and self.__spec__.submodule_search_locations is not None
            if name != "__path__" or not is_package:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._real(), name, value)

    def _real(self) -> Any:
        self._make_place()
        return importlib.import_module(self.__name__)


class _NoNumber:
    """A class without instances."""


class _NoSymbols(_StandIn):
    """A stand-in for `sympy`: PyTorch's type promotion asks whether a number is a symbol, and none is."""

    def __getattr__(self, name: str) -> Any:
        if name == "Basic" and sys._getframe(1).f_globals.get("__name__") == "torch._prims_common":
            return _NoNumber
        return super().__getattr__(name)


class _NoCompiler:
    """The stand-ins of the compiler, and the functions that were excluded meanwhile."""

    def __init__(self) -> None:
        self._left_alone: WeakSet[Any] = WeakSet()  # some hold tensors
        shapes = {name: self._of_numbers(name, answer) for name, answer in _OF_NUMBERS.items()}
        shapes |= {name: self._real_function(SHAPES, name) for name in _OF_SYMBOLS}
        supported = self._real_function(UTILITIES, "is_compile_supported")
        self._places = [
            (torch, _StandIn(DYNAMO, self.remove, disable=self._disable, graph_break=lambda *_, **__: None)),
            (None, _StandIn(UTILITIES, self.remove, is_compile_supported=supported)),
            (torch.fx.experimental, _StandIn(SHAPES, self.remove, **shapes)),
            (None, _NoSymbols(SYMBOLS, self.remove)),
        ]
        for parent, module in self._places:
            if module.__name__ not in sys.modules:
                sys.modules[module.__name__] = module
                if parent is not None:
                    setattr(parent, module.__name__.rpartition(".")[2], module)

    def remove(self) -> None:
        """Restore the real modules; functions excluded meanwhile then ask the real compiler again."""
        for parent, module in self._places:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
            name = module.__name__.rpartition(".")[2]
            if parent is not None and vars(parent).get(name) is module:
                delattr(parent, name)
        for function in self._left_alone:
            vars(function).pop("__dynamo_disable", None)
        self._left_alone.clear()

    def _disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function unchanged: without a compiler there is nothing to exclude."""
        if function is None:
            return lambda inner: inner
        self._left_alone.add(function)
        return function

    def _real_function(self, module: str, name: str) -> Callable[..., Any]:
        """Return a function that loads the real one when called."""

        def call(*args: Any, **options: Any) -> Any:
            self.remove()
            return getattr(importlib.import_module(module), name)(*args, **options)

        return call

    def _of_numbers(self, name: str, answer: Callable[..., bool]) -> Callable[..., Any]:
        real = self._real_function(SHAPES, name)

        def ask(*values: Any) -> Any:
            return answer(*values) if all(map(_is_plain, values)) else real(*values)

        return ask


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is torch.Size or kind is tuple or kind is list:
        return all(type(item) is int for item in value)
    return kind is bool or kind is int


def no_compiler() -> Callable[[], None]:
    """Install the stand-ins unless the compiler is loaded; return a function that removes them."""
    return (lambda: None) if DYNAMO in sys.modules else _NoCompiler().remove
