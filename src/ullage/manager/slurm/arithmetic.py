"""Whole numbers as a shell computes them in `$((...))`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_LARGEST = 1 << 62
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, two: int(one / two),
    ast.Mod: lambda one, two: one - two * int(one / two),
}


def value_of(text: str) -> int | None:
    """The value of an expression of numbers; `None` if it is something else.

    >>> value_of("2 * (3 + 4) % 5"), value_of("-7 / 2"), value_of("1 / 0"), value_of("x + 1")
    (4, -3, None, None)
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < _LARGEST:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(found) < _LARGEST:
            return found
    raise ValueError("not a number")
