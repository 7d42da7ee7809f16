"""Optimizers by a short name (`adamw_fused`) or by any class name of `torch.optim` (`NAdam`).

PyTorch is imported only if a class is needed, since shell completion needs the short names fast.
"""

from typing import TYPE_CHECKING, Any

from ullage.errors import InvalidValue, UnknownName

if TYPE_CHECKING:
    import torch

# Short name: class of torch.optim and its arguments. Other classes of torch.optim have their own names.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgdm": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 1e-4}),
    "adamw": ("AdamW", {"lr": 1e-4}),
    "sgd_fused": ("SGD", {"lr": 1e-3, "fused": True}),
    "sgdm_fused": ("SGD", {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "adam_fused": ("Adam", {"lr": 1e-4, "fused": True}),
    "adamw_fused": ("AdamW", {"lr": 1e-4, "fused": True}),
    "rmsprop": ("RMSprop", {"lr": 1e-4}),
    "adagrad": ("Adagrad", {"lr": 1e-4}),
    "adafactor": ("Adafactor", {"lr": 1e-4}),
}
OPTIMIZER_ALIASES = {
    "momentum": "sgdm",
    "sgd_momentum": "sgdm",
    "fused_adam": "adam_fused",
    "fused_adamw": "adamw_fused",
}
_FORMS = {"_fused": {"fused": True}, "_foreach": {"foreach": True}, "_single": {"foreach": False}}


def check_optimizer(name: str) -> None:
    """Refuse a name that is not an optimizer; PyTorch is imported only for a name without a short form."""
    if name not in OPTIMIZERS and name not in OPTIMIZER_ALIASES:
        optimizer_class(name)


def optimizer_class(name: str) -> "tuple[type[torch.optim.Optimizer], dict[str, Any]]":
    """Return the class and its arguments. The suffixes `_fused`, `_foreach` and `_single` choose the implementation."""
    import torch

    name = OPTIMIZER_ALIASES.get(name, name)
    if name in OPTIMIZERS:
        known, options = OPTIMIZERS[name]
        return getattr(torch.optim, known), dict(options)
    for ending, form in _FORMS.items():
        if name.endswith(ending):
            made, options = optimizer_class(name.removesuffix(ending))
            return made, options | form
    classes = {
        known: made
        for known, made in vars(torch.optim).items()
        if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
    }
    optimizer = {known.casefold(): made for known, made in classes.items()}.get(name.casefold())
    if optimizer is None:
        raise UnknownName("optimizer", name, [*OPTIMIZERS, *classes])
    if optimizer is torch.optim.LBFGS:
        raise InvalidValue("LBFGS needs a closure, which the standard training loop does not have; estimate a function")
    return optimizer, {}


def make_optimizer(name: str, parameters: Any) -> "torch.optim.Optimizer":
    made, options = optimizer_class(name)
    try:
        return made(parameters, **options)
    except TypeError as error:
        raise InvalidValue(f"cannot create the optimizer {name!r}: {error}") from None
