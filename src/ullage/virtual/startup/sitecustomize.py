"""Run by every Python process that a job starts: as soon as it imports PyTorch, "cuda" is a virtual card.

This folder is first on the job's PYTHONPATH (`ullage.virtual.cards.environment`). A process that never imports PyTorch
only pays for the few lines below, so nothing is imported here that is not there anyway, and the file stays readable
for older Pythons, which a job may start for other purposes.
"""

import os
import sys


class _WhenTorchIsImported:
    """Stands before all finders; the first import of PyTorch is let through, and followed by the virtual card."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module):
                execute(module)
                _install()

            spec.loader.exec_module = execute_and_install
        return spec


def _install():
    sources = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    if sources not in sys.path:
        sys.path.append(sources)  # last: a job's own packages come first
    from ullage.virtual.job import install

    install()


def _run_the_other_one():
    """Another sitecustomize, which this one hides, is run too."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = PathFinder.find_spec(__name__, others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(sys.modules[__name__])


if os.environ.get("ULLAGE_CARDS"):
    sys.meta_path.insert(0, _WhenTorchIsImported())
_run_the_other_one()
