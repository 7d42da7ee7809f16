"""Imports of many modules, PyTorch above all, without the garbage collector.

It would look at each of their functions and classes again and again, a tenth of a second for every second of imports,
though they stay until the process ends.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Inside this `with` no garbage is looked for, and what is made in it is not looked at later either.

    >>> with without_collector():
    ...     gc.isenabled()
    False
    >>> gc.unfreeze()
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if before:
            gc.enable()
