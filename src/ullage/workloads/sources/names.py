"""The models that a package has, found by reading its files, because importing it takes seconds.

Shell completion and the suggestions for a misspelled name need the names at once.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

_TIMM = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)
_TORCHVISION = re.compile(r"^@register_model\(\)\n(?:.*\n)*?def (\w+)\(", re.MULTILINE)
_TRANSFORMERS = re.compile(r'"([A-Z]\w+)"')
_TRANSFORMERS_AUTO = re.compile(r"^class (AutoModel\w*)", re.MULTILINE)


@cache
def model_names(source: str) -> tuple[str, ...]:
    """The names in `source` ("torchvision", "timm" or "hf"); none if the package is not installed.

    >>> "resnet50" in model_names("torchvision") or not model_names("torchvision")
    True
    """
    if source == "hf":
        text = _text(_folder("transformers"), "models/auto/modeling_auto.py")
        return tuple(sorted({*_TRANSFORMERS.findall(text), *_TRANSFORMERS_AUTO.findall(text)}))
    pattern = {"torchvision": _TORCHVISION, "timm": _TIMM}[source]
    folder = _folder(source)
    files = sorted(folder.glob("models/**/*.py")) if folder else []
    return tuple(sorted({name for file in files for name in pattern.findall(file.read_text())}))


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]) if folders else None


def _text(folder: Path | None, file: str) -> str:
    return (folder / file).read_text() if folder and (folder / file).is_file() else ""
