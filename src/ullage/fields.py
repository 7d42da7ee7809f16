"""Dataclass fields with help texts, from which the command line makes options and the docs a table.

It imports nothing else of Ullage.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any


def described(value: Any, /, help: str, **shown: Any) -> Any:
    """Return a field with its help, shown with `letter`, `metavar`, `default` (in words) and another `option` name.

    `least` is the least number that is valid; `several` says that the option takes several values.

    >>> from dataclasses import dataclass, fields
    >>> @dataclass
    ... class Crate:
    ...     bottles: int = described(6, "How many bottles are in it.", metavar="N")
    >>> fields(Crate)[0].metadata["help"]
    'How many bottles are in it.'
    """
    metadata = {"help": help, **shown}
    if isinstance(value, Mapping):
        return field(default_factory=lambda: dict(value), metadata=metadata)
    return field(default=value, metadata=metadata)
