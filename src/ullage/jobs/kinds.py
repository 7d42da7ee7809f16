"""Kinds of sources: a model's name, a function, a script, or a summary of a model.

This imports nothing else, so that misspelt names are reported fast.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue

MODEL, FUNCTION, SCRIPT, SUMMARY = "model", "function", "script", "summary"
SUMMARY_ENDINGS = (".txt", ".model", ".summary")


def kind_of(source: Any, module: bool = False) -> str:
    """Return whether a source is a model's name, a function, a script, or a text file with a model summary."""
    if callable(source):
        return FUNCTION
    if not isinstance(source, str | Path) or not str(source):
        raise InvalidValue(
            "source must be a model's name such as torchvision:resnet50, a function that trains on 'cuda', or the path "
            f"of a script, got {source!r}"
        )
    name = str(source)
    if module:
        return SCRIPT
    if is_summary(name):
        return SUMMARY
    return SCRIPT if name.endswith(".py") or Path(name).is_file() else MODEL


def is_summary(name: str) -> bool:
    """Return whether a name is that of a file with a model summary; a colon outside of a path is that of a model."""
    return name.endswith(SUMMARY_ENDINGS) and (":" not in name or os.sep in name)


def check_script(path: str | os.PathLike[str], module: bool = False) -> None:
    """Refuse a script, a folder or a module that Python would not run."""
    if module:
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(str(path))
        except (ImportError, ValueError, AttributeError):
            spec = None
        finally:
            sys.path.pop(0)
        if spec is None:
            raise InvalidValue(f"-m must name a module that Python finds from this folder, got {str(path)}")
        return
    file = Path(path)
    if (file / "__main__.py").is_file() or file.is_file():
        return
    what, folder = ("is a folder", file) if file.is_dir() else ("does not exist", file.parent)
    near = ", ".join(sorted(child.name for child in folder.glob("*.py"))[:8])
    raise InvalidValue(f"SOURCE must be a script; {path} {what}" + (f" (in {folder}: {near})" if near else ""))
