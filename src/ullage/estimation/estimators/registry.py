"""The list of estimators: each has a name, a source, the kinds of request that it supports, and a function.

An estimator is a function with the decorator `@estimator(...)` in a module of this package, or in one that a package
names as an entry point of the group `ullage.estimators`: ullage-lab has those of the literature. All of them take a
`JobRequest` and return an `Estimate`; figures that an estimator cannot know are `None`, and a note says what its figure
means.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from ullage.errors import InvalidValue, UnknownName, pip_install
from ullage.jobs.job import JobRequest
from ullage.virtual.releases import refuse_if_unserved

if TYPE_CHECKING:
    from ullage.estimation.result import Estimate
    from ullage.hardware import GPU

# Name: the module of this package that has it. A table, so that the names are known without importing PyTorch.
HOMES = {
    "ullage": "virtual_run",
    "horus": "horus",
    "faketensor": "faketensor",
    "faketensor+margin": "faketensor",
    "gpumemnet": "gpumemnet.estimator",
    "gpumemnet+transformer": "gpumemnet.estimator",
}
GROUP = "ullage.estimators"


Supports = Callable[[JobRequest], str | None]
Run = Callable[[JobRequest, "GPU"], "Estimate"]


@dataclass(frozen=True)
class Estimator:
    """An estimator. `supports` returns `None`, or the reason why it cannot estimate a request."""

    name: str
    title: str
    source: str
    needs: str
    supports: Supports
    run: Run

    def estimate(self, request: JobRequest, gpu: "GPU") -> "Estimate":
        """Return the estimate, or refuse a request that is not supported with the reason."""
        reason = self.supports(request)
        if reason is not None:
            raise InvalidValue(f"the estimator {self.name} cannot estimate this: {reason}")
        answer = self.run(request, gpu)
        return answer if request.source is None else dataclasses.replace(answer, source=request.source)


_REGISTERED: dict[str, Estimator] = {}


def _quantized(request: JobRequest) -> str | None:
    """Refuse quantized weights, which the published estimators do not know."""
    kind = request.model and request.model.quantize
    return f"it does not know weights in {kind}" if kind else None


def estimator(name: str, *, title: str, source: str, needs: str, supports: Supports) -> Callable[[Run], Run]:
    """Register the decorated function as the estimator `name`; each name can be used once."""

    def register(run: Run) -> Run:
        if name in _REGISTERED:
            raise InvalidValue(f"an estimator {name!r} already exists")
        known = supports if name == "ullage" else lambda request: _quantized(request) or supports(request)
        _REGISTERED[name] = Estimator(name, title, source, needs, known, run)
        return run

    return register


def estimators() -> list[str]:
    return list(dict.fromkeys([*HOMES, *_others(), *_REGISTERED]))


@functools.cache
def _others() -> dict[str, EntryPoint]:
    """Return the entry points of other packages, without importing them."""
    return {point.name: point for point in entry_points(group=GROUP)}


def check_name(name: str) -> None:
    """Refuse a name that no estimator has, without importing PyTorch."""
    if name not in HOMES and name not in estimators():
        more = "" if _others() else f"; for those of the literature, type: {pip_install('ullage_lab')}"
        raise UnknownName("estimator", name, estimators(), hint="all: " + ", ".join(estimators()) + more)


def find(name: str) -> Estimator:
    check_name(name)
    if name not in _REGISTERED:
        refuse_if_unserved()
        if name in HOMES:
            importlib.import_module(f"{__package__}.{HOMES[name]}")
        else:
            _others()[name].load()
    return _REGISTERED[name]
