"""The examples in docstrings print what they say: a test for each module that has some."""

import doctest
import importlib

import pytest
from tests.test_rooms import FILES

WITH_EXAMPLES = [name for name, file in FILES.items() if ">>> " in file.read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name):
    module = importlib.import_module("ullage" if name == "__init__" else f"ullage.{name}")
    assert not doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed
