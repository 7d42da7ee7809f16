"""Turn the garbage collector off while many objects are made.

It would scan all of them again and again: a tenth of a second for every second of importing PyTorch.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import many modules without the garbage collector, which ignores their functions and classes from then on."""
    with gc_disabled():
        yield
        gc.freeze()
