"""Run by every Python process that a job starts: as soon as it imports PyTorch, "cuda" is a virtual card.

This folder is first on the job's PYTHONPATH (`ullage.virtual.shared_card.cards.environment`). A process that never
imports PyTorch only pays for the few lines below, so nothing is imported here that is not there anyway, and the file
stays readable for older Pythons, which a job may start for other purposes.
"""

import os
import sys


class _WhenTorchIsImported:
    """The first of all finders: it installs the virtual card right after the first import of PyTorch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: object) -> None:
                execute(module)  # type: ignore[arg-type]
                _install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _install() -> None:
    """Import Ullage from this file's own location, because the job's Python may lack it, and install the card."""
    if "ullage" not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        home = os.path.abspath(__file__)
        for _ in ("startup", "shared_card", "virtual", "ullage"):
            home = os.path.dirname(home)
        file = os.path.join(home, "__init__.py")
        spec = spec_from_file_location("ullage", file, submodule_search_locations=[home])
        if spec is None or spec.loader is None:
            raise ImportError("no Ullage in " + home)
        sys.modules["ullage"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["ullage"])
    from ullage.virtual.shared_card.job import install

    install()


def _run_the_other_one() -> None:
    """Run another sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "") == "PathFinder":
            spec = finder.find_spec(__name__, others)
            if spec is not None and spec.loader is not None:
                other = type(sys)(__name__)
                other.__spec__, other.__loader__, other.__file__ = spec, spec.loader, spec.origin
                spec.loader.exec_module(other)


if __name__ == "sitecustomize":
    if os.environ.get("ULLAGE_CARDS"):
        sys.meta_path.insert(0, _WhenTorchIsImported())  # type: ignore[arg-type]
    _run_the_other_one()
