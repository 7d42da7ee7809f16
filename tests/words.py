"""Refuse words and names that are gone: `python tests/words.py`.

`words.toml` lists phrases, which prose and help texts avoid, names, which code does not bind, and exceptions by file.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "tests/README.md", "docs/**/*.md", "lab/docs/*.md", "benchmarks/**/*.md"]
SOURCES = ["src", "lab/src", "benchmarks", "examples"]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|<!--.*?-->", re.MULTILINE | re.DOTALL)


def phrase_pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern for a phrase as whole words, also across a line break; `/.../` is a pattern itself."""
    if phrase.startswith("/"):
        return re.compile(phrase.strip("/"))
    return re.compile(r"\b" + r"\s+".join(map(re.escape, phrase.split())) + r"\b", re.IGNORECASE)


def prose_faults(text: str, phrases: dict[str, str]) -> Iterator[str]:
    """Yield the line of each refused phrase outside of code, with the word to use instead."""
    plain = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    for phrase, instead in phrases.items():
        for match in phrase_pattern(phrase).finditer(plain):
            yield f"{plain[: match.start()].count(chr(10)) + 1}: {match[0]!r}; write {instead}"


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the name and the line of everything that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def code_faults(text: str, names: dict[str, str], allowed: Collection[str] = ()) -> Iterator[str]:
    """Yield the line of each refused name that a module binds, except those allowed there."""
    for line, name in bound_names(ast.parse(text)):
        if name in names and name not in allowed:
            yield f"{line}: the name {name}; choose {names[name]}"


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield every command and its help, with the help of its options."""
    from ullage.cli import all_commands

    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        if not command.hidden:
            yield name, "\n".join([command.help or "", *(item.help or "" for item in command.params)])
            for word, inner in getattr(command, "commands", {}).items():
                yield from walk(inner, f"{name} {word}")

    return walk(all_commands(), "ullage")


def refused() -> dict[str, Any]:
    """Return the refused phrases and names, and the names allowed by file."""
    return tomllib.loads((ROOT / "tests/words.toml").read_text())


def main() -> None:
    """Print each fault, and exit with 1 if there is one."""
    phrases, names, allowed = (refused()[part] for part in ("phrases", "names", "allowed"))
    faults = [f"`{name} --help`, line {fault}" for name, text in help_texts() for fault in prose_faults(text, phrases)]
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            faults += [f"{page.relative_to(ROOT)}:{fault}" for fault in prose_faults(page.read_text(), phrases)]
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            faults += [f"{path}:{fault}" for fault in code_faults(file.read_text(), names, allowed.get(path, ()))]
    print("\n".join(faults) or "no refused words")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
