"""Every exception that Ullage raises on purpose.

Running out of the virtual GPU's memory is not one: like a real GPU it raises `torch.cuda.OutOfMemoryError`.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class UllageError(Exception):
    """The base class of Ullage's errors. The text is one message to print; processes can exchange the error."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self.args, vars(self))


def _unpickle(kind: type[UllageError], args: tuple[Any, ...], values: dict[str, Any]) -> UllageError:
    error = kind.__new__(kind, *args)  # __init__ would format the text again
    vars(error).update(values)
    return error


_MOST_LISTED = 20  # valid names in a message


class UnknownName(UllageError, LookupError):
    """A name that is not in a catalogue.

    >>> str(UnknownName("GPU", "H20O", ["H200", "H100-80GB"]))
    "no GPU named 'H20O'; did you mean 'H200'?"
    >>> str(UnknownName("GPU", "Radeon", ["H200", "H100-80GB"], listed_by="ullage gpus"))
    "no GPU named 'Radeon' ('ullage gpus' lists all)"
    >>> str(UnknownName("class", "Nothing", [f"C{number}" for number in range(100)]))[-30:]
    'C23, C24, C25, C26 and 80 more'
    """

    def __init__(
        self,
        kind: str,
        name: str,
        valid: Iterable[str],
        hint: str = "",
        listed_by: str = "",
        near: Iterable[str] = (),
    ) -> None:
        self.kind, self.name, self.valid = kind, name, sorted(valid)
        self.near = nearest(name, self.valid) or list(near)
        advice = ""
        if self.near:
            advice = "; did you mean " + " or ".join(repr(near) for near in self.near) + "?"
        elif self.valid and not listed_by:
            more = len(self.valid) - _MOST_LISTED
            advice = (
                "; valid names: " + ", ".join(self.valid[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
            )
        hint = hint or (f"{listed_by!r} lists all" if listed_by else "")
        super().__init__(f"no {kind} named {name!r}{advice}" + (f" ({hint})" if hint else ""))


class InvalidValue(UllageError, ValueError):
    """An invalid value; the text says "X must be Y, got Z"."""


class ModelLacks(InvalidValue):
    """A model lacks a feature, such as activation checkpointing, however it is run."""


# Packages that `pip install .` leaves out, and the extra that brings each (pyproject.toml).
EXTRAS = {
    "fastapi": "page",
    "nicegui": "page",
    "prometheus_client": "manager",
    "psutil": "manager",
    "pydantic": "manager",
    "pynvml": "gpu",
    "starlette": "manager",
    "timm": "models",
    "torchvision": "models",
    "transformers": "models",
    "tree_sitter": "slurm",
    "tree_sitter_bash": "slurm",
    "triton": "triton",
    "uvicorn": "manager",
}


LABS = ("lightgbm", "polars", "sklearn", "ullage_lab")  # the lab and the packages that only it installs
_SOURCES = dict.fromkeys(LABS, "./lab") | {package: f"'.[{extra}]'" for package, extra in EXTRAS.items()}
UPDATE = "git pull && pip install .  # in a clone of Ullage"  # neither distribution is on PyPI yet


def pip_install(*packages: str) -> str:
    """Return the command that installs packages; an extra or the lab comes from a clone."""
    wanted = dict.fromkeys(_SOURCES.get(name, name) for name in packages)
    return f"pip install {' '.join(wanted)}" + ("  # in a clone of Ullage" if _SOURCES.keys() & set(packages) else "")


class MissingPackage(UllageError, ImportError):
    """An optional package is not installed.

    >>> str(MissingPackage("timm", "models named timm:NAME"))
    "models named timm:NAME need the package timm; type: pip install '.[models]'  # in a clone of Ullage"
    >>> str(MissingPackage("peft", "LoRA adapters", "accelerate"))
    'LoRA adapters need the packages peft and accelerate; type: pip install peft accelerate'
    """

    def __init__(self, package: str, purpose: str, *others: str) -> None:
        names = [package, *others]
        needed = f"packages {', '.join(names[:-1])} and {names[-1]}" if others else f"package {package}"
        super().__init__(f"{purpose} need the {needed}; type: {pip_install(*names)}")
        self.package = package


class UnsupportedOperation(UllageError, NotImplementedError):
    """The virtual GPU does not support an operation; the text names it and says what to do instead."""


class ScriptFailed(UllageError, RuntimeError):
    """A script could not be estimated; the text says why and ends with the last lines of the script's output.

    `own`: the script failed by itself, not because of the virtual GPU.

    >>> print(ScriptFailed("train.py needs data that is not there", "loading data\\nError: no file"))
    train.py needs data that is not there
    <BLANKLINE>
    The script's last lines:
      loading data
      Error: no file
    """

    def __init__(self, text: str, output: str = "", own: bool = False) -> None:
        self.text, self.output, self.own = text, output, own
        shown = "".join(f"\n  {line}" for line in output.splitlines())
        super().__init__(text + (f"\n\nThe script's last lines:{shown}" if shown else ""))


class NoGPUSource(UllageError, RuntimeError):
    """No tool on this machine reports GPU activity; the text names the tried tools, and those to install."""


class DeviceLost(UllageError, RuntimeError):
    """A GPU no longer answers: it fell off the bus, needs a reset, or its MIG instance is gone."""

    def __init__(self, device_id: str, reason: str) -> None:
        super().__init__(f"{device_id} does not answer: {reason}")
        self.device_id, self.reason = device_id, reason


class UnsupportedPlatform(UllageError, RuntimeError):
    """This build of PyTorch or this system cannot host a virtual GPU; the text names the missing part."""


class NestedGPUError(UllageError, RuntimeError):
    """A second virtual GPU was started in another thread while one was in use."""


class Overbooked(UllageError, RuntimeError):
    """The ledger refused a promise; nothing was promised. The text names the request and the free memory."""


class PolicyFailed(UllageError, RuntimeError):
    """A custom policy raised an error or returned an invalid result; the job was not placed."""

    def __init__(self, policy: str, job: int, reason: str) -> None:
        super().__init__(f"the policy {policy} failed for job {job}: {reason}")
        self.policy, self.job, self.reason = policy, job, reason


class StoreDamaged(UllageError, RuntimeError):
    """The daemon's database is damaged; nothing was changed. The text says how to restore it."""


class DamagedRecord(UllageError, RuntimeError):
    """The row of one job cannot be read. It is left as it is, and the daemon goes on with the others."""

    def __init__(self, job: int, reason: str) -> None:
        super().__init__(f"job {job} cannot be read: {reason}. Its row in the database is left as it is")
        self.job, self.reason = job, reason


class DiskFull(UllageError, RuntimeError):
    """Nothing can be written, so the request was not carried out."""


class NotAllowed(UllageError, PermissionError):
    """The user may not do this; the text says who may."""


class JobNotFound(UllageError, LookupError):
    """No job has this number or name."""

    def __init__(self, reference: str) -> None:
        super().__init__(f"no job {reference}; 'ullage queue' and 'ullage queue --over' list them")


class NoDaemon(UllageError, ConnectionError):
    """No daemon runs for this home folder."""


class OtherVersion(UllageError, RuntimeError):
    """The versions of the daemon and of its client are incompatible; nothing was done."""


class AlreadyServing(UllageError, RuntimeError):
    """A daemon already runs for this home folder."""


class SlurmFailed(UllageError, RuntimeError):
    """A command of Slurm failed, did not answer in time, or is not installed."""


def nearest(name: str, valid: Iterable[str], limit: int = 3) -> list[str]:
    """Return the valid names that are most similar to `name`, the best first; case does not matter."""
    folded = name.casefold()
    by_folded = {candidate.casefold(): candidate for candidate in valid}
    beginning = sorted(candidate for candidate in by_folded if folded and candidate.startswith(folded))
    similar = difflib.get_close_matches(folded, by_folded, n=limit, cutoff=0.6)
    best = beginning + [candidate for candidate in similar if candidate not in beginning]
    return [by_folded[candidate] for candidate in best[:limit]]
