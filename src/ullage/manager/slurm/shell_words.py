"""Expands the words of a shell script as Bash does, and evaluates its tests.

Bash itself expands the words. It gets the variables that they name, can only start a few programs that print, and
cannot write. A word that depends on anything else is `Unknown`.
"""

import fnmatch
import functools
import operator
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ullage.errors import MissingPackage


class Unknown(str):
    """A word whose value only the running script knows; its text is the source in the script."""


_FILE_TESTS = {"-f": os.path.isfile, "-d": os.path.isdir} | dict.fromkeys(("-e", "-r", "-s", "-x"), os.path.exists)
Value = str | tuple[str, ...]  # of a variable; a tuple is an array

_PRINTING = ("basename", "dirname", "readlink", "realpath", "seq", "whoami")  # programs that only print
_HARMLESS = re.compile(rf"(?:pwd|hostname|whoami|(?:date|echo|{'|'.join(_PRINTING)})\s.*)", re.S)
# Bash formats the date, since the program `date` can set the clock. Other arguments run a command that does not exist.
_DATE = 'date() { case "$#$1" in *%N*) date-of-now ;; 1+*) printf "%(${1#+})T" -1 ;; *) date-of-now ;; esac; }'
_PLAIN = re.compile(r"[\w./:=,@%+-]+")  # text that Bash leaves as it is
_SECONDS, _KIB = 5.0, 400_000  # limits of time and memory for one expansion
_OWN = b"_ullage_"  # prefix of variables, so that none is one of Bash's own
_AT_RUN_TIME = re.compile(r"\$|!|-|0|RANDOM|SECONDS|SLURM\w*|BASH\w*")  # variables that only the running script has


@dataclass
class ShellState:
    """The state of a shell at one place of a script. `folder` is `None` if unknown."""

    variables: dict[str, Value]
    exported: set[str]
    folder: str | None
    arguments: tuple[str, ...] = ()
    functions: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> "ShellState":
        return replace(
            self, variables=dict(self.variables), exported=set(self.exported), functions=dict(self.functions)
        )

    def environment(self) -> dict[str, str]:
        known = ((name, self.variables.get(name)) for name in sorted(self.exported))
        return {name: value for name, value in known if isinstance(value, str) and not isinstance(value, Unknown)}

    def knows(self, name: str) -> bool:
        """Whether it is known which value a variable has, or that it has none."""
        value = self.variables.get(name)
        if value is None:
            return not _AT_RUN_TIME.fullmatch(name)
        return not any(isinstance(each, Unknown) for each in ((value,) if isinstance(value, str) else value))


def parse(text: bytes) -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise MissingPackage(str(error.name), "batch scripts") from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(text).root_node


def text_of(node: Any) -> str:
    text: bytes = node.text
    return text.decode(errors="surrogateescape")


def fields(node: Any, state: ShellState) -> list[str]:
    """Return the words into which Bash splits a word, with matching files."""
    return _expanded(node, state, b'for value in %s; do printf "%%s\\0" "$value"; done')


def single(node: Any, state: ShellState) -> str:
    """Return the value of a word without splitting, as after `=`."""
    return _expanded(node, state, b'value=%s; printf "%%s\\0" "$value"')[0]


def _expanded(node: Any, state: ShellState, script: bytes) -> list[str]:
    text = text_of(node)
    if _PLAIN.fullmatch(text):
        return [text]
    try:
        references = sorted(_references(node, state))
        word = node.text
        for place, name in reversed(references):
            if name.isidentifier():
                at = place - node.start_byte
                word = word[:at] + _OWN + word[at:]
        return _printed(script % word, {name for _, name in references}, state)
    except _Unknowable:
        return [Unknown(text[1:-1] if node.type == "string" else text)]


class _Unknowable(Exception):
    """Only the running script knows the value of a word."""


def _references(node: Any, state: ShellState, numeric: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the places and names of variables in a word. In arithmetic, they must hold numbers."""
    kind, text = node.type, text_of(node)
    indirect = kind == "expansion" and re.match(r"\$\{!|.*@\w\}$", text)
    if indirect or kind == "process_substitution" or kind == "command_substitution" and not _only_prints(node, state):
        raise _Unknowable
    references = [(0, text)] if kind in ("variable_name", "special_variable_name") else []
    if kind == "word" and node.parent.type == "subscript" and text.isidentifier():
        references = [(0, text)]
    elif kind == "regex":  # variables in a pattern are not in the tree
        references = [(match.start(1), match[1].decode()) for match in re.finditer(rb"\$\{?(\w+)", node.text)]
    for place, name in references:
        if not state.knows(name) or numeric and not re.fullmatch(r"\s*-?\d*\s*", str(state.variables.get(name, ""))):
            raise _Unknowable
        yield node.start_byte + place, name
    for place, child in enumerate(node.children):
        inside = kind == "arithmetic_expansion" or kind == "subscript" and place > 0
        yield from _references(child, state, numeric or inside)


def _only_prints(node: Any, state: ShellState) -> bool:
    """Whether `$(command)` is one of the few commands that only print, with the same result here."""
    inside = [child for child in node.children if child.is_named]
    simple = len(inside) == 1 and inside[0].type == "command" and state.folder is not None
    return simple and _HARMLESS.fullmatch(text_of(inside[0])) is not None


@functools.cache
def _confined() -> str:
    """Return the lines after which Bash can only start programs that print, and cannot write files."""
    programs = {name: shutil.which(name, path=os.defpath) for name in _PRINTING}
    known = [f"hash -p {path} {name}" for name, path in programs.items() if path is not None]
    limits = f"ulimit -v {_KIB}; shopt -s extglob; enable -n kill; hostname() {{ echo $HOSTNAME; }}"
    return "\n".join([limits, _DATE, "PATH=/nonexistent", *known, "set -r"])


def _printed(script: bytes, names: set[str], state: ShellState) -> list[str]:
    folder = state.folder if state.folder is not None and os.path.isdir(state.folder) else None
    given = [f"pwd() {{ echo {shlex.quote(state.folder or '')}; }}", f"set -- {shlex.join(state.arguments)}"]
    given += [] if folder else ["set -f"]
    for name in names & state.variables.keys():
        value = state.variables[name]
        quoted = shlex.quote(value) if isinstance(value, str) else f"({shlex.join(value)})"
        given.append(f"{_OWN.decode()}{name}={quoted}")
    lines = "\n".join([*given, _confined(), ""]).encode(errors="surrogateescape")
    home = state.variables.get("HOME")
    env = {"LC_ALL": "C.UTF-8"} | ({"HOME": home} if isinstance(home, str) else {})
    bash = ["bash", "--norc", "--noprofile"]
    try:
        text = lines + script + b" && printf ."
        done = subprocess.run(bash, input=text, capture_output=True, env=env, cwd=folder or "/", timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        raise _Unknowable from None
    if done.stderr or not done.stdout.endswith(b"."):
        raise _Unknowable
    return [os.fsdecode(word) for word in done.stdout[:-1].split(b"\0")[:-1]]


def test(node: Any, state: ShellState) -> bool | None:
    """Evaluate `[ ... ]` or `[[ ... ]]` with one simple expression; `None` if only the running script knows."""
    inside = [child for child in node.children if child.is_named]
    return _expression(inside[0], state) if len(inside) == 1 else None


def _expression(node: Any, state: ShellState) -> bool | None:
    if node.type == "parenthesized_expression":
        return test(node, state)
    if node.type == "unary_expression":
        sign = text_of(node.children[0])
        if sign == "!":
            verdict = _expression(node.children[-1], state)
            return None if verdict is None else not verdict
        word = single(node.children[-1], state)
        if isinstance(word, Unknown) or sign not in ("-z", "-n", *_FILE_TESTS):
            return None
        if sign in ("-z", "-n"):
            return bool(word) is (sign == "-n")
        if state.folder is None and not os.path.isabs(word):
            return None
        return _FILE_TESTS[sign](os.path.join(state.folder or "/", word))
    if node.type == "binary_expression" and len(node.children) == 3:
        return _comparison(node, state)
    if node.type in ("word", "string", "raw_string", "simple_expansion", "expansion", "concatenation", "number"):
        word = single(node, state)
        return None if isinstance(word, Unknown) else bool(word)
    return None


def _comparison(node: Any, state: ShellState) -> bool | None:
    sign = text_of(node.children[1])
    if sign in ("&&", "||", "-a", "-o"):
        both = [_expression(node.children[place], state) for place in (0, 2)]
        wanted = sign in ("||", "-o")
        if wanted in both:
            return wanted
        return None if None in both else not wanted
    first, second = (single(node.children[place], state) for place in (0, 2))
    if isinstance(first, Unknown) or isinstance(second, Unknown):
        return None
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(first, second)
    if sign == "!=":
        return not fnmatch.fnmatchcase(first, second)
    try:
        left, right = int(first), int(second)
    except ValueError:
        return None
    # Bash's comparisons have the names of Python's functions: -eq, -ne, -lt, -le, -gt, -ge.
    return getattr(operator, sign[1:])(left, right) if re.fullmatch("-(eq|ne|[lg][te])", sign) else None


def joined(first: str, second: str) -> str:
    both = str(first) + str(second)
    return Unknown(both) if isinstance(first, Unknown) or isinstance(second, Unknown) else both
