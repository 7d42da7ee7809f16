"""Work without the garbage collector, and imports."""

import gc

import pytest

from ullage.sandbox.gc_control import gc_disabled, importing


def test_imported_modules_are_not_checked():
    with importing():
        assert not gc.isenabled()
        kept = [[]]
    assert gc.isenabled() and not any(thing is kept for thing in gc.get_objects())


def test_the_collector_is_as_before_when_an_import_fails():
    with pytest.raises(ImportError), importing():
        kept = [[]]
        raise ImportError
    assert gc.isenabled() and any(thing is kept for thing in gc.get_objects())
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
