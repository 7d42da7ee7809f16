"""Every exception that Ullage raises on purpose.

    UllageError
    ├── UnknownName             no such GPU, model, estimator ...; carries the nearest valid names
    ├── InvalidValue            a size, a duration, a setting that cannot be read
    ├── MissingPackage          an optional package is needed; carries the line to type
    ├── UnsupportedOperation    the virtual GPU cannot follow this operator or call
    ├── ScriptFailed            a script that was estimated failed by itself; carries the end of its output
    ├── NoGPUSource             nothing on this machine can say what its GPUs do
    ├── DeviceLost              a GPU was there and does not answer any more
    ├── UnsupportedPlatform     this build of PyTorch or this system cannot host a virtual GPU
    ├── NestedGPUError          a virtual GPU is already in use in another thread
    ├── Overbooked              memory that is already promised cannot be promised again
    ├── StoreDamaged            the manager's database cannot be trusted; carries how to restore it
    ├── StoreFull               nothing could be written, so what was asked for did not happen
    ├── NotAllowed              somebody else's job, or an order for operators
    ├── NoSuchJob               a number or a name that no job has
    ├── NoDaemon                nobody serves in this home
    └── AlreadyServing          somebody does already

Running out of the virtual GPU's memory is not in this tree: like a real GPU it raises `torch.cuda.OutOfMemoryError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UllageError(Exception):
    """The root of the tree; its text is one message for a person. `except UllageError` catches them all."""


class UnknownName(UllageError, LookupError):
    """A name that is not in a catalogue.

    >>> str(UnknownName("GPU", "H20O", ["H200", "H100-80GB"]))
    "no GPU named 'H20O'; did you mean 'H200'?"
    """

    def __init__(self, kind: str, name: str, valid: Iterable[str], hint: str = "") -> None:
        self.kind, self.name, self.valid = kind, name, sorted(valid)
        self.near = nearest(name, self.valid)
        if self.near:
            advice = "did you mean " + " or ".join(repr(near) for near in self.near) + "?"
        else:
            advice = "valid names: " + ", ".join(self.valid[:60])
        super().__init__(f"no {kind} named {name!r}; {advice}" + (f" ({hint})" if hint else ""))


class InvalidValue(UllageError, ValueError):
    """A value that cannot be read; the text says what was needed and what was found."""


# Packages that `pip install ullage` leaves out, and the extra that brings each (pyproject.toml).
EXTRAS = {
    "fastapi": "manager",
    "lightgbm": "research",
    "polars": "research",
    "prometheus_client": "manager",
    "psutil": "manager",
    "pydantic": "manager",
    "pynvml": "gpu",
    "sklearn": "research",
    "starlette": "manager",
    "timm": "models",
    "torchvision": "models",
    "transformers": "models",
    "uvicorn": "manager",
}


class MissingPackage(UllageError, ImportError):
    """An optional package is not installed.

    >>> str(MissingPackage("timm", "models named timm:NAME"))
    "models named timm:NAME need the package timm; type: pip install 'ullage[models]'"
    """

    def __init__(self, package: str, purpose: str) -> None:
        extra = EXTRAS.get(package)
        wanted = f"'ullage[{extra}]'" if extra else package
        super().__init__(f"{purpose} need the package {package}; type: pip install {wanted}")
        self.package = package


class UnsupportedOperation(UllageError, NotImplementedError):
    """Something that the virtual GPU cannot follow; the text names it and says what to do instead."""


class ScriptFailed(UllageError, RuntimeError):
    """A script could not be estimated; the text says why, then come the last lines of the script's own output.

    >>> print(ScriptFailed("train.py needs data that is not there", "loading data\\nError: no file"))
    train.py needs data that is not there
    <BLANKLINE>
    The script's last lines:
      loading data
      Error: no file
    """

    def __init__(self, text: str, output: str = "") -> None:
        self.output = output
        shown = "".join(f"\n  {line}" for line in output.splitlines())
        super().__init__(text + (f"\n\nThe script's last lines:{shown}" if shown else ""))


class NoGPUSource(UllageError, RuntimeError):
    """Nothing on this machine can say what its GPUs do; the text says what was tried and what to type."""


class DeviceLost(UllageError, RuntimeError):
    """A GPU that was there does not answer any more: it fell off the bus, needs a reset, or its MIG instance is gone.

    >>> str(DeviceLost("GPU-1", "GPU is lost"))
    'GPU-1 does not answer: GPU is lost'
    """

    def __init__(self, device_id: str, reason: str) -> None:
        super().__init__(f"{device_id} does not answer: {reason}")
        self.device_id, self.reason = device_id, reason


class UnsupportedPlatform(UllageError, RuntimeError):
    """This PyTorch or this system cannot host a virtual GPU; the text says what was looked for."""


class NestedGPUError(UllageError, RuntimeError):
    """A second virtual GPU was started in another thread while one was in use."""


class Overbooked(UllageError, RuntimeError):
    """The promise ledger refused a promise; nothing was promised. The text says what was asked and what is left."""


class StoreDamaged(UllageError, RuntimeError):
    """The manager's database cannot be trusted; nothing was changed. The text says how to restore it."""


class StoreFull(UllageError, RuntimeError):
    """Nothing can be written: what was asked for did not happen."""


class NotAllowed(UllageError, PermissionError):
    """Somebody asked for what they may not do; the text says who may."""


class NoSuchJob(UllageError, LookupError):
    """A number or a name that no job has.

    >>> str(NoSuchJob("17"))
    "no job 17; 'ullage queue' and 'ullage history' list them"
    """

    def __init__(self, reference: str) -> None:
        super().__init__(f"no job {reference}; 'ullage queue' and 'ullage history' list them")


class NoDaemon(UllageError, ConnectionError):
    """Nobody serves in this home."""


class AlreadyServing(UllageError, RuntimeError):
    """A daemon serves in this home already."""


def nearest(name: str, valid: Iterable[str], limit: int = 3) -> list[str]:
    """The valid names that look most like `name`, best first, whatever their case.

    >>> nearest("a100", ["A100-40GB", "A100-80GB", "V100"])
    ['A100-40GB', 'A100-80GB', 'V100']
    """
    folded = name.casefold()
    by_folded = {candidate.casefold(): candidate for candidate in valid}
    beginning = sorted(candidate for candidate in by_folded if folded and candidate.startswith(folded))
    similar = difflib.get_close_matches(folded, by_folded, n=limit, cutoff=0.6)
    best = beginning + [candidate for candidate in similar if candidate not in beginning]
    return [by_folded[candidate] for candidate in best[:limit]]
