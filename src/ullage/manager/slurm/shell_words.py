"""The words of a shell script: what becomes of quotes and variables, what a command prints, whether a test holds."""

from __future__ import annotations

import ast
import codecs
import datetime
import fnmatch
import getpass
import glob
import operator
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ullage.errors import MissingPackage

_LARGEST = 1 << 62
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, two: int(one / two),
    ast.Mod: lambda one, two: one - two * int(one / two),
}


class Unknown(str):
    """A word that only the running script knows; its text is how the script writes it."""


_FILE_TESTS = {"-f": os.path.isfile, "-d": os.path.isdir} | dict.fromkeys(("-e", "-r", "-s", "-x"), os.path.exists)
Value = str | tuple[str, ...]  # of a variable; a tuple is an array


@dataclass
class ShellState:
    """What a shell knows at one place of a script. `folder` is `None` where it is not known."""

    variables: dict[str, Value]
    exported: set[str]
    folder: str | None
    arguments: tuple[str, ...] = ()
    functions: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> ShellState:
        """One that changes by itself."""
        return replace(
            self, variables=dict(self.variables), exported=set(self.exported), functions=dict(self.functions)
        )

    def environment(self) -> dict[str, str]:
        """What a program is given, as far as it is known."""
        known = ((name, self.variables.get(name)) for name in sorted(self.exported))
        return {name: value for name, value in known if isinstance(value, str) and not isinstance(value, Unknown)}


def parse(text: bytes) -> Any:
    """The tree of a script."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise MissingPackage(str(error.name), "batch scripts") from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(text).root_node


def text_of(node: Any) -> str:
    """What the script has at a node of the tree."""
    found: bytes = node.text
    return found.decode(errors="surrogateescape")


class ShellWords:
    """Turns words of a script into what a program is given, by what a shell knows at that place."""

    def single(self, node: Any, state: ShellState) -> str:
        """What a word is where it is not split: behind `=`."""
        if node.type in ("simple_expansion", "expansion"):
            return one(self.fields(node, state, quoted=True))
        if node.type == "concatenation":
            return all_joined(self.single(child, state) for child in node.children)
        return one(self.fields(node, state))

    def fields(self, node: Any, state: ShellState, quoted: bool = False) -> list[str]:
        """The words that become of one."""
        kind = node.type
        if kind in ("word", "number", "extglob_pattern", "variable_name", "special_variable_name", "regex"):
            return self._word(node, state)
        if kind == "raw_string":
            return [text_of(node)[1:-1]]
        if kind == "ansi_c_string":
            return [codecs.decode(text_of(node)[2:-1].encode("latin-1", "backslashreplace"), "unicode_escape")]
        if kind == "string":
            return self._string(node, state)
        if kind == "concatenation":
            if any(child.type == "brace_expression" for child in node.children):
                return [Unknown(text_of(node))]
            return _concatenated(self.fields(child, state) for child in node.children)
        if kind in ("simple_expansion", "expansion"):
            found = self._expansion(text_of(node), state)
            if quoted:
                return found if isinstance(found, list) else [found]
            words = found if isinstance(found, list) else [found]
            return [piece for word in words for piece in ([word] if isinstance(word, Unknown) else word.split())]
        if kind == "command_substitution":
            told = self._printed(node, state)
            return [told] if quoted or isinstance(told, Unknown) else told.split()
        if kind == "arithmetic_expansion":
            return [self.number(text_of(node)[3:-2], state)]
        if kind == "brace_expression":
            return _braces(text_of(node))
        return [Unknown(text_of(node))]

    def _word(self, node: Any, state: ShellState) -> list[str]:
        """Text without quotes: files, where it is a pattern that some have."""
        text = text_of(node)
        if node.child_count or re.search(r"(?<!\\)\{[^{}]*(,|\.\.)[^{}]*\}", text):
            return [Unknown(text)]
        stands_alone = node.type == "word" and node.parent.type in ("command", "for_statement")
        if stands_alone and re.search(r"(?<!\\)[*?\[]", text):
            here = [] if state.folder is None else sorted(glob.glob(self._plain(text, state), root_dir=state.folder))
            return list(here) or [self._plain(text, state)]
        return [self._plain(text, state)]

    def _plain(self, text: str, state: ShellState) -> str:
        if text == "~" or text.startswith("~/"):
            home = state.variables.get("HOME", os.path.expanduser("~"))
            text = (home if isinstance(home, str) else "~") + text[1:]
        return re.sub(r"\\(\n|.)", lambda match: "" if match[1] == "\n" else match[1], text, flags=re.S)

    def _string(self, node: Any, state: ShellState) -> list[str]:
        """In double quotes: nothing is split, but an array in it is several words."""
        content: bytes = node.text
        start, parts = node.start_byte, []
        at = 1
        for child in node.children[1:-1]:
            if child.type == "string_content":
                continue
            parts.append([_unescaped(content[at : child.start_byte - start])])
            parts.append(self.fields(child, state, quoted=True))
            at = child.end_byte - start
        parts.append([_unescaped(content[at:-1])])
        found = _concatenated(part for part in parts if part != [""])
        empty_array = not found and any(part == [] for part in parts)
        return found or ([] if empty_array else [""])

    def _expansion(self, text: str, state: ShellState) -> str | list[str]:
        """`$NAME` and `${NAME...}`; a list for an array or all arguments."""
        match = re.fullmatch(r"\$\{?(#?)(\w+|[@*#?$!0-9-])(?:\[([^\]]*)\])?(.*?)\}?", text, re.S)
        if match is None:
            return Unknown(text)
        count, name, index, rest = match.groups()
        if not text.startswith("${"):
            index, rest = None, ""
        value = self._variable(name, index, state)
        if count and not rest:
            return Unknown(text) if isinstance(value, Unknown) else str(len(value)) if value is not None else "0"
        if not rest:
            return Unknown(text) if isinstance(value, Unknown) else "" if value is None else value
        return self._changed(text, value, rest, state)

    def _variable(self, name: str, index: str | None, state: ShellState) -> str | list[str] | None:
        if name in "@*":
            return list(state.arguments)
        if name == "#":
            return str(len(state.arguments))
        if name.isdigit():
            if name == "0":
                return Unknown("$0")  # Slurm runs a copy of the script
            return state.arguments[int(name) - 1] if int(name) <= len(state.arguments) else None
        if name in ("?", "$", "!", "-", "RANDOM", "SECONDS") or name.startswith("BASH_SOURCE"):
            return "0" if name == "?" else Unknown(f"${name}")
        value = state.variables.get(name)
        if value is None:
            return Unknown(f"${name}") if name.startswith("SLURM") else None
        if isinstance(value, str):
            return (
                value if index in (None, "0", "@", "*") else Unknown(f"${name}") if isinstance(value, Unknown) else None
            )
        if index in ("@", "*"):
            return list(value)
        place = self.number("0" if index is None else index, state)
        if isinstance(place, Unknown):
            return Unknown(f"${{{name}[{index}]}}")
        return value[int(place)] if -len(value) <= int(place) < len(value) else None

    def _changed(self, text: str, value: str | list[str] | None, rest: str, state: ShellState) -> str | list[str]:
        """`${NAME:-word}`, `${NAME%pattern}` and the like."""
        match = re.match(r":?[-=+?]|%%?|##?|//?", rest)
        if match is None:
            return Unknown(text)
        operator, word = match[0], rest[match.end() :]
        if operator[-1] in "-=+?":
            if isinstance(value, Unknown):
                return Unknown(text)
            given = value is not None if operator[0] != ":" else bool(value)
            if operator[-1] == "+":
                return self._words(word, state) if given else ""
            return value if given and value is not None else self._words(word, state)
        value = "" if value is None else value
        if not isinstance(value, str) or isinstance(value, Unknown):
            return Unknown(text)
        if operator[0] == "/":
            pattern, _, other = word.partition("/")
            before, after = self._words(pattern, state), self._words(other, state)
            if isinstance(before, Unknown) or isinstance(after, Unknown) or re.search(r"[*?\[]", before):
                return Unknown(text)
            return value.replace(before, after, -1 if operator == "//" else 1) if before else value
        pattern = self._words(word, state)
        return Unknown(text) if isinstance(pattern, Unknown) else _cut(value, pattern, operator)

    def _words(self, text: str, state: ShellState) -> str:
        """A piece of text as if it stood in double quotes."""
        root = parse(b'"' + text.encode(errors="surrogateescape") + b'"')
        node = root.children[0] if root.children and not root.has_error else None
        while node is not None and node.type != "string":
            node = node.children[0] if node.children else None
        if node is None:
            return Unknown(text)
        return one(self._string(node, state))

    def number(self, text: str, state: ShellState) -> str:
        def value(match: re.Match[str]) -> str:
            found = self._variable(match[1], None, state)
            return "0" if found in (None, "") else str(found) if not isinstance(found, list | Unknown) else "unknown"

        told = value_of(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, text))
        return Unknown(f"$(({text}))") if told is None else str(told)

    def _printed(self, node: Any, state: ShellState) -> str:
        """What `$(command)` prints, for the few commands that only print what is known here too."""
        inside = [child for child in node.children if child.is_named]
        if len(inside) != 1 or inside[0].type != "command":
            return Unknown(text_of(node))
        words = [word for child in inside[0].children for word in self._command_words(child, state)]
        if not words or any(isinstance(word, Unknown) for word in words):
            return Unknown(text_of(node))
        told = _prints(words, state.folder)
        return Unknown(text_of(node)) if told is None else told

    def _command_words(self, child: Any, state: ShellState) -> list[str]:
        if child.type == "command_name":
            return [word for inner in child.children for word in self.fields(inner, state)]
        return self.fields(child, state) if child.is_named else []

    def test(self, node: Any, state: ShellState) -> bool | None:
        """`[ ... ]` and `[[ ... ]]` with one simple expression in it."""
        inside = [child for child in node.children if child.is_named]
        return self._expression(inside[0], state) if len(inside) == 1 else None

    def _expression(self, node: Any, state: ShellState) -> bool | None:
        if node.type == "parenthesized_expression":
            return self.test(node, state)
        if node.type == "unary_expression":
            operator = text_of(node.children[0])
            if operator == "!":
                told = self._expression(node.children[-1], state)
                return None if told is None else not told
            word = one(self.fields(node.children[-1], state))
            if isinstance(word, Unknown) or operator not in ("-z", "-n", *_FILE_TESTS):
                return None
            if operator in ("-z", "-n"):
                return bool(word) is (operator == "-n")
            if state.folder is None and not os.path.isabs(word):
                return None
            return _FILE_TESTS[operator](os.path.join(state.folder or "/", word))
        if node.type == "binary_expression" and len(node.children) == 3:
            return self._comparison(node, state)
        if node.type in ("word", "string", "raw_string", "simple_expansion", "expansion", "concatenation", "number"):
            word = one(self.fields(node, state))
            return None if isinstance(word, Unknown) else bool(word)
        return None

    def _comparison(self, node: Any, state: ShellState) -> bool | None:
        sign = text_of(node.children[1])
        if sign in ("&&", "||", "-a", "-o"):
            both = [self._expression(node.children[place], state) for place in (0, 2)]
            wanted = sign in ("||", "-o")
            if wanted in both:
                return wanted
            return None if None in both else not wanted
        first, second = (one(self.fields(node.children[place], state)) for place in (0, 2))
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
        # The name of a comparison is that of Python's function: -eq, -ne, -lt, -le, -gt, -ge.
        return getattr(operator, sign[1:])(left, right) if re.fullmatch("-(eq|ne|[lg][te])", sign) else None


def _prints(words: Sequence[str], folder: str | None) -> str | None:
    name, rest = words[0], list(words[1:])
    if name == "pwd":
        return folder
    if name == "echo" and not any(word.startswith("-") for word in rest):
        return " ".join(rest)
    if name == "whoami" and not rest:
        return getpass.getuser()
    if name == "hostname" and not rest:
        return socket.gethostname()
    if name == "date" and len(rest) == 1 and rest[0].startswith("+"):
        return datetime.datetime.now().strftime(rest[0][1:])
    if name in ("dirname", "basename") and len(rest) == 1:
        return os.path.dirname(rest[0]) or "." if name == "dirname" else os.path.basename(rest[0].rstrip("/"))
    paths = [word for word in rest if not word.startswith("-")]
    if name in ("realpath", "readlink") and len(paths) == 1 and folder is not None:
        return os.path.realpath(os.path.join(folder, paths[0]))
    if name == "seq" and 1 <= len(rest) <= 2 and all(re.fullmatch(r"\d{1,4}", word) for word in rest):
        first, last = (1, int(rest[0])) if len(rest) == 1 else (int(rest[0]), int(rest[1]))
        return "\n".join(map(str, range(first, last + 1)))
    return None


def _unescaped(content: bytes) -> str:
    """Text in double quotes."""
    text = content.decode(errors="surrogateescape")
    return re.sub(r'\\(\n|[$`"\\])', lambda match: "" if match[1] == "\n" else match[1], text)


def joined(first: str, second: str) -> str:
    both = str(first) + str(second)
    return Unknown(both) if isinstance(first, Unknown) or isinstance(second, Unknown) else both


def all_joined(parts: Iterable[str]) -> str:
    found = ""
    for part in parts:
        found = joined(found, part)
    return found


def one(words: Sequence[str]) -> str:
    """Words where one is needed."""
    if len(words) == 1:
        return words[0]
    together = " ".join(words)
    return Unknown(together) if any(isinstance(word, Unknown) for word in words) else together


def _concatenated(parts: Iterable[list[str]]) -> list[str]:
    """`a"${list[@]}"b`: the last word of each part and the first of the next are one."""
    found: list[str] = []
    for part in parts:
        if found and part:
            found[-1] = joined(found[-1], part[0])
            found += part[1:]
        else:
            found += part
    return found


def _braces(text: str) -> list[str]:
    """`{1..5}`."""
    match = re.fullmatch(r"\{(-?\d{1,6})\.\.(-?\d{1,6})\}", text)
    if match is None:
        return [Unknown(text)]
    first, last = int(match[1]), int(match[2])
    step = 1 if last >= first else -1
    return [str(number) for number in range(first, last + step, step)]


def _cut(value: str, pattern: str, operator: str) -> str:
    """`%` and `#` cut off the shortest end or beginning that fits, doubled the longest."""
    places = range(len(value), -1, -1) if operator in ("%", "##") else range(len(value) + 1)
    for place in places:
        piece = value[place:] if operator[0] == "%" else value[:place]
        if fnmatch.fnmatchcase(piece, pattern):
            return value[:place] if operator[0] == "%" else value[place:]
    return value


def value_of(text: str) -> int | None:
    """The value of an expression of numbers; `None` if it is something else.

    >>> value_of("2 * (3 + 4) % 5"), value_of("-7 / 2"), value_of("1 / 0"), value_of("x + 1")
    (4, -3, None, None)
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < _LARGEST:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(found) < _LARGEST:
            return found
    raise ValueError("not a number")
