"""Temporary replacements of attributes, also in modules that are imported later."""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

_MISSING = object()
Action = Callable[[ModuleType], None]


class Replacements:
    """A list of replacements that `undo` restores in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any] | Callable[[], Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class; `undo` removes one that did not exist."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def put_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.put(owner, name, value)

    def put_existing(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute if it exists, for those of only some versions of PyTorch."""
        if hasattr(owner, name):
            self.put(owner, name, value)

    def put_item(self, table: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set an item of a mapping; `undo` removes one that did not exist."""
        before = table.get(key, _MISSING)
        table[key] = value
        self.on_undo(lambda: table.pop(key) if before is _MISSING else table.__setitem__(key, before))

    def put_inside(self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        original = vars(owner)[name]

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            with context():
                return original(*args, **options)

        self.put(owner, name, call)

    def put_class(self, homes: Sequence[Any], name: str, kind: Any) -> None:
        """Replace a class, also for code that imported it before."""
        original = getattr(homes[0], name)
        if original is not kind:
            self.put(original, "__new__", staticmethod(lambda cls, *args, **named: kind(*args, **named)))
        for home in homes:
            self.put(home, name, kind)

    def on_undo(self, action: Callable[[], Any]) -> None:
        """Add an action for `undo`, at its place among the others."""
        self._undo.append(action)

    def when_undone(self, action: Callable[[], None]) -> None:
        """Add an action for the end of `undo`."""
        self._undo.insert(0, action)

    def forget_answers(self, module: ModuleType) -> None:
        """Clear the caches of a module's functions, now and at `undo`."""

        def forget() -> None:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

        forget()
        self.on_undo(forget)

    def when_imported(self, module: str, action: Action) -> None:
        """Call `action` with a module now, or as soon as it is imported."""
        loaded = sys.modules.get(module)
        if loaded is not None:
            action(loaded)
        else:
            self.on_undo(after_import(module, action))

    def undo(self) -> None:
        while self._undo:
            entry = self._undo.pop()
            if not isinstance(entry, tuple):
                entry()
                continue
            owner, name, value = entry
            if value is _MISSING:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


_waiting: dict[str, list[Action]] = {}


def after_import(module: str, action: Action) -> Callable[[], None]:
    """Call `action` with a module right after its import; return a function that cancels this."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _waiting.setdefault(module, []).append(action)

    def call_off() -> None:
        actions = _waiting.get(module, [])
        if action in actions:
            actions.remove(action)
        if not actions:
            _waiting.pop(module, None)
        if not _waiting and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)

    return call_off


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that wraps the loaders of modules with waiting actions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in list(_waiting.get(module.__name__, ())):
            action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder = _Finder()
