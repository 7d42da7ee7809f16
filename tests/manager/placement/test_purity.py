"""The room is pure: no clock, no files, no processes, no PyTorch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ullage.manager.placement

ROOM = Path(ullage.manager.placement.__file__).parent
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "functools",
    "itertools",
    "enum",
    "math",
    "operator",
    "typing",
}
PURE = ("ullage.manager.placement", "ullage.units", "ullage.errors", "ullage.fields")


@pytest.mark.parametrize("file", sorted(ROOM.glob("*.py")), ids=lambda file: file.name)
def test_a_file_imports_only_what_is_pure(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name in ALLOWED or name.startswith(PURE), name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval", "__import__"}


def test_importing_the_room_does_not_import_pytorch() -> None:
    code = "import sys, ullage.manager.placement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
