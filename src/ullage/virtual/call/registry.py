"""Where handlers are registered: functions that carry out an operator themselves, where a kernel rule is not enough.

A handler is called with the virtual GPU, the operator, its arguments and its keyword arguments. It returns what the
operator returns, or `NotImplemented` to let the operator run by its kernel rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ullage.virtual.call.plan import register
from ullage.virtual.state import GPUState

Handler = Callable[[GPUState, Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}


def handler(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for operators by name, such as `"aten.nonzero.default"`, or for all of a library by its."""
    return register(HANDLERS, names)
