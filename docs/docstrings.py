"""Turns the doctests of docstrings into code blocks of the Python reference; they would be quotations otherwise."""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts fences around the doctests of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object once it is known."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Text with its doctests as code blocks; directives for the test runner are left out.

    >>> fenced("Adds.\\n\\n>>> 1 + 1  # doctest: +SKIP\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            out, inside = [*out, "```pycon"], True
        elif inside and not line.strip():
            out, inside = [*out, "```"], False
        out.append(line.split("# doctest:")[0].rstrip() if inside else line)
    return "\n".join([*out, "```"] if inside else out)
