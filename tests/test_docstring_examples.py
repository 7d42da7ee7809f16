"""The examples in docstrings print what they say: a test for each module that has some."""

import doctest
import importlib

import pytest
from tests.test_rooms import FILES, module_of

# Whole estimates and trainings, which other tests make too.
LONG = {
    "estimation.asking",
    "estimation.largest_batch",
    "estimation.planning.asking",
    "ullage_lab.train.protocol",
}
WITH_EXAMPLES = [name for name, file in FILES.items() if ">>> " in file.read_text()]


def test_long_examples_are_there():
    assert set(WITH_EXAMPLES) >= LONG


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in WITH_EXAMPLES]
)
def test_examples_print_what_they_say(name):
    module = importlib.import_module(module_of(name))
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed, "none was run, or one printed something else"
