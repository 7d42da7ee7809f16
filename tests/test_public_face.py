"""Public names and options are those of tests/data/public_face.txt, so that to add one is a decision.

`python -m tests.test_public_face` writes the file anew. A commit that adds a line says why.
"""

import dataclasses
import inspect
from pathlib import Path

from tests.test_options import COMMANDS

import ullage

KEPT = Path(__file__).parent / "data" / "public_face.txt"
CORE = [path for path in COMMANDS if not path.startswith("lab ")]


def lines():
    """A line for each public name with each of its parameters or fields, and for each option of the core's commands."""
    for name in sorted(ullage.__all__):
        value = getattr(ullage, name)
        yield f"ullage.{name}"
        if dataclasses.is_dataclass(value):
            yield from (f"ullage.{name}.{field.name}" for field in dataclasses.fields(value) if field.name[0] != "_")
        elif inspect.isfunction(value):
            yield from (f"ullage.{name}({parameter})" for parameter in inspect.signature(value).parameters)
    for path in sorted(CORE):
        yield f"ullage {path}"
        for option in COMMANDS[path].params:
            if option.param_type_name == "option" and not option.hidden:
                yield from (f"ullage {path} {name}" for name in option.opts if name.startswith("--"))


def test_public_names_and_options_are_those_agreed_on():
    agreed, now = KEPT.read_text().splitlines(), [*lines()]
    assert now == agreed, "if this is meant: python -m tests.test_public_face"


def test_there_are_fifteen_public_names():
    assert len(ullage.__all__) == 15


if __name__ == "__main__":
    KEPT.write_text("".join(f"{line}\n" for line in lines()))
