"""Packages with kernels for GPUs that the code looks for and that are not installed.

Libraries select kernels by installed packages. On a machine with them other code runs, with other memory, so a note
names the package and how to install it.

Every failed import, `importlib.util.find_spec` and `importlib.metadata.version` reaches the last finder of
`sys.meta_path`. A lookup counts if the script's own code made it, or a library that selects by itself, in a file whose
code then allocated GPU memory.
"""

import functools
import importlib.abc
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.releases import release_of
from ullage.virtual.state import GPUState

_OURS = str(Path(__file__).parents[2])
_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_paths()["stdlib"]
_HELPERS = re.compile(r"_?(is|has|have|find|check|get)_\w*(available|installed|package|spec|triton|version)|wrapper")
_REQUESTS = 20_000  # of memory whose calling code is inspected

# By import name: the command that installs it, if pip can do that without a GPU.
_PURE = {
    "triton": None,
    "fla": "flash-linear-attention",
    "liger_kernel": "liger-kernel",
    "bitsandbytes": "bitsandbytes",
}
_COMPILED = (
    "flash_attn",
    "flash_attn_interface",
    "flash_attn_3",
    "flashinfer",
    "sageattention",
    "xformers",
    "apex",
    "fused_layer_norm_cuda",
    "transformer_engine",
    "cut_cross_entropy",
    "deepspeed",
    "causal_conv1d",
    "mamba_ssm",
)
_OTHER_NAMES = {"flash_linear_attention": "fla", "fla_core": "fla"}  # of distributions
_NONE_BY_THEMSELVES = (
    "torch",
    "torchvision",
    "torchaudio",
    "torchao",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "deepspeed",
    "timm",
    "peft",
    "diffusers",
    "sentence_transformers",
    "datasets",
    "kernels",
    "bitsandbytes",
)
# Packages that these libraries use by themselves; others only by choice of the user. Unlisted libraries may use any.
_BY_THEMSELVES: dict[str, tuple[str, ...]] = {
    "transformers": ("apex", "causal_conv1d", "mamba_ssm", "fla"),
    "trl": ("triton",),
    **dict.fromkeys(_NONE_BY_THEMSELVES, ()),
}

_INSTALL = "the code looks for packages that are not here; where they are installed, other kernels run: {names}"
_NO_INSTALL = (
    "the code looks for packages compiled for GPUs that are not here; where they are installed, other kernels run: "
    "{names}"
)


class Lookups(importlib.abc.MetaPathFinder):
    """The last finder, which finds nothing. Call `on_request` at requests of memory."""

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self._packages_of: dict[str, set[str]] = {}  # by file of a library: the packages that it looked for
        self._looks = 0
        self._missed: list[set[str]] = []  # for each running function that looks for packages
        self.on_request: Callable[[], None] | None = None

    def install(self) -> Callable[[], None]:
        replacements = Replacements()
        replacements.when_imported(
            "transformers.utils.import_utils", functools.partial(self._ask_each_time, replacements)
        )
        sys.meta_path.append(self)
        replacements.on_undo(lambda: sys.meta_path.remove(self))
        return replacements.undo

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> None:
        self._miss(fullname)

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Record a lookup and find nothing."""
        self._miss(getattr(context, "name", None) or "")
        return iter(())

    def _miss(self, name: str) -> None:
        package = name.replace("-", "_")
        package = _OTHER_NAMES.get(package, package)
        if package in _PURE or package in _COMPILED:
            for running in self._missed:
                running.add(package)
            self._ask(package, sys._getframe(2))

    def _ask_each_time(self, replacements: Replacements, module: ModuleType) -> None:
        """Observe repeated lookups: transformers caches its answers."""
        for name, function in list(vars(module).items()):
            if re.fullmatch(r"is_\w+_available", name) and hasattr(function, "cache_clear"):
                replacements.put(module, name, self._asked_each_time(function))

    def _asked_each_time(self, function: Any) -> Any:
        missed: set[str] = set()

        @functools.wraps(function)
        def ask(*args: Any, **options: Any) -> Any:
            self._missed.append(missed)
            try:
                answer = function(*args, **options)
            finally:
                self._missed.pop()
            if not answer:
                for package in missed:
                    self._ask(package, sys._getframe(1))
            return answer

        ask.cache_clear = function.cache_clear  # type: ignore[attr-defined]
        return ask

    def _ask(self, package: str, frame: FrameType | None) -> None:
        for file, function in _frames(frame):
            if file.startswith((_OURS, "<frozen")) or _HELPERS.fullmatch(function):
                continue
            library = _library(file)
            if library is None and file.startswith(_STANDARD):
                continue
            if library is None:
                self._note(package, Path(file).name)
            elif package in _BY_THEMSELVES.get(library, (package,)):
                self._packages_of.setdefault(file, set()).add(package)
                if self._looks < _REQUESTS:
                    self.on_request = self._look
            return

    def _look(self) -> None:
        """Note the packages that running files looked for, as they have allocated memory."""
        self._looks += 1
        for file, _ in _frames(sys._getframe(1)):
            for package in self._packages_of.pop(file, ()):
                self._note(package, _library(file) or Path(file).name)
        if not self._packages_of or self._looks > _REQUESTS:
            self.on_request = None

    def _note(self, package: str, asker: str) -> None:
        if package in _COMPILED:
            self._gpu.note_name("lookups", _NO_INSTALL, f"{package} ({asker})")
            return
        install = _PURE[package] or f"triton=={release_of(torch.__version__).triton}.*"
        self._gpu.note_name("lookups", _INSTALL, f"{package} ({asker}; pip install {install})")


def _frames(frame: FrameType | None) -> Iterable[tuple[str, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def _library(file: str) -> str | None:
    """
    >>> _library("/venv/lib/python3.11/site-packages/trl/kernels/chunked_logprob.py"), _library("/home/me/train.py")
    ('trl', None)
    """
    for folder in _LIBRARIES:
        _, is_inside, below = file.rpartition(f"/{folder}/")
        if is_inside:
            return below.partition("/")[0].removesuffix(".py")
    return None
