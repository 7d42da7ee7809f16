"""Optimizers by a short name (`adamw_fused`) or by any class name of `torch.optim` (`NAdam`)."""

from __future__ import annotations

from typing import Any

import torch

from ullage.errors import InvalidValue, UnknownName
from ullage.workloads.configuration import OPTIMIZER_ALIASES, OPTIMIZERS

_FORMS = {"_fused": {"fused": True}, "_foreach": {"foreach": True}, "_single": {"foreach": False}}
_WITHOUT_CLOSURE = "a training step without a closure"


def optimizer_class(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and its arguments. `_fused`, `_foreach` and `_single` after a name choose PyTorch's implementation.

    >>> optimizer_class("nadam_foreach")
    (<class 'torch.optim.nadam.NAdam'>, {'foreach': True})
    """
    name = OPTIMIZER_ALIASES.get(name, name)
    if name in OPTIMIZERS:
        known, options = OPTIMIZERS[name]
        return getattr(torch.optim, known), dict(options)
    for ending, form in _FORMS.items():
        if name.endswith(ending):
            made, options = optimizer_class(name.removesuffix(ending))
            return made, options | form
    classes = {known.casefold(): made for known, made in _classes().items()}
    if name.casefold() not in classes:
        raise UnknownName("optimizer", name, [*OPTIMIZERS, *_classes()])
    if classes[name.casefold()] is torch.optim.LBFGS:
        raise InvalidValue(f"LBFGS cannot be taken: needed an optimizer for {_WITHOUT_CLOSURE}; estimate a function")
    return classes[name.casefold()], {}


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name: made
        for name, made in vars(torch.optim).items()
        if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
    }


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer over these parameters."""
    made, options = optimizer_class(name)
    try:
        return made(parameters, **options)
    except TypeError as error:
        raise InvalidValue(f"optimizer {name!r} cannot be made: {error}") from None
