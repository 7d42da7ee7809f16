"""Finds the models of a package by reading its files, because importing it takes seconds.

Shell completion and the suggestions for a misspelled name need the names fast.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ullage.errors import UnknownName

_PACKAGES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}
_TIMM = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)
_TORCHVISION = re.compile(r"^@register_model\(\)\n(?:.*\n)*?def (\w+)\(", re.MULTILINE)
_TRANSFORMERS = re.compile(r'"([A-Z]\w+)"')
_TRANSFORMERS_AUTO = re.compile(r"^class (AutoModel\w*)", re.MULTILINE)


@cache
def model_names(source: str) -> tuple[str, ...]:
    """Return the names in `source` ("torchvision", "timm" or "hf"); none if the package is not installed."""
    if source == "hf":
        text = _text(_folder("transformers"), "models/auto/modeling_auto.py")
        return tuple(sorted({*_TRANSFORMERS.findall(text), *_TRANSFORMERS_AUTO.findall(text)}))
    pattern = {"torchvision": _TORCHVISION, "timm": _TIMM}[source]
    folder = _folder(source)
    files = sorted(folder.glob("models/**/*.py")) if folder else []
    return tuple(sorted({name for file in files for name in pattern.findall(file.read_text())}))


def check_model_name(source: str, name: str) -> None:
    """Refuse a name that is in none of a package's files, without importing the package or PyTorch.

    The package itself must check that a known name is a model's. Once it is imported, it checks every name, since
    models may have been registered with it.
    """
    package = _PACKAGES.get(source, "")
    base = name.partition(".")[0]  # timm: NAME.WEIGHTS
    if not package or package in sys.modules or not base.isidentifier() or not (folder := _folder(package)):
        return
    word = re.compile(rf"\b{base}\b".encode())
    if not any(word.search(file.read_bytes()) for file in _files(source, folder)):
        raise UnknownName("transformers class" if source == "hf" else f"{source} model", name, model_names(source))


def _files(source: str, folder: Path) -> Iterator[Path]:
    """Yield the files that may name a model, likely ones first."""
    if source == "hf":
        yield folder / "models/auto/modeling_auto.py"
        yield from folder.glob("models/*/modeling_*.py")
    else:
        yield from folder.glob("models/**/*.py")


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]) if folders else None


def _text(folder: Path | None, file: str) -> str:
    return (folder / file).read_text() if folder and (folder / file).is_file() else ""
