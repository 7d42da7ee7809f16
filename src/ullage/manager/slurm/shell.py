"""Follows a shell script without running it: yields each program with its words, variables and folder. Values that only
the running script knows, such as `$(curl ...)`, are `Unknown`."""

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimation.jobs.launchers import launched
from ullage.manager.slurm.shell_words import ShellState, Unknown, Value, fields, joined, parse, single, test, text_of
from ullage.sandbox.conda import in_conda

_DEEPEST = 8  # nested files, functions and `eval`
_LONGEST_LOOP = 64  # iterations to follow
_MOST_PROGRAMS = 2000
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_CONDA = ("conda", "mamba", "micromamba")


@dataclass(frozen=True)
class Program:
    """A program that a script would run. `at_once`: it runs in the background."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str | None
    line: int
    at_once: bool = False


class _End(Exception):
    """The script ends here."""


class _Return(_End):
    """A function or a sourced file ends here."""


def programs_of(
    text: str, environment: Mapping[str, str], folder: str, arguments: Sequence[str] = ()
) -> tuple[list[Program], list[str]]:
    """Return the programs that a script would run, in order, and notes about parts that were not followed.

    >>> found, notes = programs_of("cd /data; for lr in 1 2; do python train.py --lr $lr; done", {}, "/")
    >>> [(program.words, program.folder) for program in found]
    [(('python', 'train.py', '--lr', '1'), '/data'), (('python', 'train.py', '--lr', '2'), '/data')]
    """
    reader = _Reader()
    state = ShellState(dict(environment), set(environment), folder, tuple(arguments))
    reader.read(text, state)
    return reader.programs, list(dict.fromkeys(reader.notes))


class _Reader:
    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.notes: list[str] = []
        self._depth = 0

    def read(self, text: str, state: ShellState) -> None:
        if self._depth >= _DEEPEST:
            self.notes.append(f"scripts inside scripts were followed {_DEEPEST} deep and no further")
            return
        root = parse(text.encode(errors="surrogateescape"))
        if root.has_error:
            raise InvalidValue(f"line {_first_error(root)} cannot be read as a shell script")
        self._depth += 1
        try:
            self._all(root.children, state)
        except _End:
            pass
        finally:
            self._depth -= 1

    # Statements

    def _all(self, nodes: Sequence[Any], state: ShellState) -> None:
        for place, node in enumerate(nodes):
            behind = nodes[place + 1].type if place + 1 < len(nodes) else ""
            if behind == "&":
                first = len(self.programs)
                self._apart(node, state)
                self.programs[first:] = [replace(each, at_once=True) for each in self.programs[first:]]
            else:
                self._statement(node, state)

    def _apart(self, node: Any, state: ShellState) -> None:
        """Follow a statement in a subshell, whose changes are lost."""
        with contextlib.suppress(_End):
            self._statement(node, state.copy())

    def _statement(self, node: Any, state: ShellState) -> None:
        follow = getattr(self, f"_follow_{node.type}", None)
        if follow is not None:
            follow(node, state)

    def _follow_list(self, node: Any, state: ShellState) -> None:
        """Follow `a && b` or `a || b`; programs are assumed to succeed."""
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        verdict = self._judged(left, state)
        wanted = operator == "&&"
        if verdict is None:
            self._branches([lambda mine: self._statement(right, mine), lambda mine: None], state)
        elif verdict is wanted:
            self._statement(right, state)

    def _follow_compound_statement(self, node: Any, state: ShellState) -> None:
        self._all(node.children, state)

    _follow_do_group = _follow_compound_statement

    def _follow_subshell(self, node: Any, state: ShellState) -> None:
        with contextlib.suppress(_End):
            self._all(node.children, state.copy())

    def _follow_pipeline(self, node: Any, state: ShellState) -> None:
        for child in node.children:
            self._apart(child, state)

    def _follow_redirected_statement(self, node: Any, state: ShellState) -> None:
        self._statement(node.children[0], state)

    def _follow_negated_command(self, node: Any, state: ShellState) -> None:
        self._statement(node.children[-1], state)

    def _follow_function_definition(self, node: Any, state: ShellState) -> None:
        state.functions[text_of(node.child_by_field_name("name"))] = node.child_by_field_name("body")

    def _follow_if_statement(self, node: Any, state: ShellState) -> None:
        self._conditional(node, list(node.children), state)

    def _conditional(self, node: Any, children: list[Any], state: ShellState) -> None:
        """Follow `if` or `elif`: the condition before `then`, and the body up to the next clause."""
        then = next(place for place, child in enumerate(children) if child.type == "then")
        later = [child for child in children[then + 1 :] if child.type in ("elif_clause", "else_clause")]
        body = [child for child in children[then + 1 :] if child not in later and child.type != "fi"]
        verdict: bool | None = None
        for condition in [child for child in children[1:then] if child.is_named]:
            verdict = self._judged(condition, state, sure=True)

        def otherwise(mine: ShellState) -> None:
            if later and later[0].type == "elif_clause":
                self._conditional(later[0], [*later[0].children, *later[1:]], mine)
            elif later:
                self._all(later[0].children[1:], mine)

        if verdict is None:
            self._branches([lambda mine: self._all(body, mine), otherwise], state)
        elif verdict:
            self._all(body, state)
        else:
            otherwise(state)

    def _follow_case_statement(self, node: Any, state: ShellState) -> None:
        value = single(node.child_by_field_name("value"), state)
        bodies: list[Callable[[ShellState], None]] = []
        for item in [child for child in node.children if child.type == "case_item"]:
            end = next(place for place, child in enumerate(item.children) if child.type == ")")
            body = item.children[end + 1 :]
            patterns = [single(child, state) for child in item.children[:end] if child.is_named]
            if not isinstance(value, Unknown) and any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                self._all(body, state)
                return
            bodies.append(lambda mine, body=body: self._all(body, mine))  # type: ignore[misc]
        if isinstance(value, Unknown):
            self._branches([*bodies, lambda mine: None], state)

    def _follow_for_statement(self, node: Any, state: ShellState) -> None:
        name = text_of(node.child_by_field_name("variable"))
        body = node.child_by_field_name("body")
        start = next((place for place, child in enumerate(node.children) if child.type == "in"), None)
        words = list(state.arguments)
        if start is not None:
            listed = [child for child in node.children[start + 1 :] if child.is_named and child != body]
            words = [word for child in listed for word in fields(child, state)]
        if len(words) > _LONGEST_LOOP:
            self.notes.append(f"line {_line(node)}: of a loop with {len(words)} rounds {_LONGEST_LOOP} were followed")
        for word in words[:_LONGEST_LOOP]:
            state.variables[name] = word
            self._statement(body, state)

    def _follow_while_statement(self, node: Any, state: ShellState) -> None:
        """Follow the body once; all variables that an iteration may change are unknown."""
        for name in _assigned(node):
            state.variables[name] = Unknown(f"${name}")
        self._branches([lambda mine: self._statement(node.children[-1], mine), lambda mine: None], state)

    _follow_c_style_for_statement = _follow_while_statement

    def _branches(self, ways: Sequence[Callable[[ShellState], None]], state: ShellState) -> None:
        """Follow all possible branches; values that differ after them are unknown."""
        ends = []
        for way in ways:
            mine = state.copy()
            try:
                way(mine)
                ends.append(mine)
            except _End:
                continue
        if not ends:
            raise _End
        for name in {name for end in ends for name in end.variables}:
            values = [end.variables.get(name) for end in ends]
            same = all(value == values[0] for value in values)
            state.variables[name] = values[0] if same and values[0] is not None else Unknown(f"${name}")
        state.exported = set().union(*(end.exported for end in ends))
        state.folder = ends[0].folder if len({end.folder for end in ends}) == 1 else None
        state.functions = {name: body for end in ends for name, body in end.functions.items()}

    def _judged(self, node: Any, state: ShellState, sure: bool = False) -> bool | None:
        """Evaluate a condition; `None` if only the running script knows. Programs are assumed to succeed, except with
        `sure`."""
        if node.type == "negated_command":
            verdict = self._judged(node.children[-1], state, sure)
            return None if verdict is None else not verdict
        if node.type == "test_command":
            return test(node, state)
        if node.type == "list":
            left = self._judged(node.children[0], state, sure)
            wanted = node.children[1].type == "&&"
            if left is not None and left is not wanted:
                return left
            right = self._judged(node.children[-1], state, sure)
            return right if left is wanted else None
        if node.type == "command" and text_of(node) in ("true", ":", "false"):
            return text_of(node) != "false"
        self._statement(node, state)
        return None if sure else True

    # Variables

    def _follow_variable_assignment(self, node: Any, state: ShellState) -> None:
        name, value = self._assignment(node, state)
        if name:
            state.variables[name] = value

    def _follow_variable_assignments(self, node: Any, state: ShellState) -> None:
        for child in node.children:
            self._follow_variable_assignment(child, state)

    def _assignment(self, node: Any, state: ShellState) -> tuple[str, Value]:
        target, given = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None or target.type != "variable_name":
            return "", Unknown(text_of(node))  # one element of an array
        name = text_of(target)
        value: Value = ""
        if given is not None and given.type == "array":
            value = tuple(word for child in given.children if child.is_named for word in fields(child, state))
        elif given is not None:
            value = single(given, state)
        if any(child.type == "+=" for child in node.children):
            before = state.variables.get(name, "" if isinstance(value, str) else ())
            if isinstance(value, tuple):
                value = (*((before,) if isinstance(before, str) else before), *value)
            elif isinstance(before, str):
                value = joined(before, value)
            else:
                value = Unknown(f"${name}")
        return name, value

    def _follow_declaration_command(self, node: Any, state: ShellState) -> None:
        """Run `export`, `declare`, `local` or `readonly`."""
        words = [text_of(child) for child in node.children if child.type == "word"]
        exports = (
            node.children[0].type == "export"
            and "-n" not in words
            or any(re.fullmatch(r"-\w*x\w*", word) for word in words)
        )
        for child in node.children[1:]:
            if child.type == "variable_assignment":
                name, value = self._assignment(child, state)
                if name:
                    state.variables[name] = value
            elif child.type == "variable_name":
                name = text_of(child)
            else:
                continue
            if exports and name:
                state.exported.add(name)

    def _follow_unset_command(self, node: Any, state: ShellState) -> None:
        for child in node.children:
            if child.type == "variable_name":
                state.variables.pop(text_of(child), None)

    # Programs and shell builtins

    def _follow_command(self, node: Any, state: ShellState) -> None:
        words: list[str] = []
        given: dict[str, Value] = {}
        for child in node.children:
            if child.type == "variable_assignment":
                name, value = self._assignment(child, state)
                given[name] = value
            elif child.type == "command_name":
                words += [word for inner in child.children for word in fields(inner, state)]
            elif child.is_named and not child.type.endswith("redirect"):
                words += fields(child, state)
        if words:
            self._run(words, given, _line(node), state)

    def _run(self, words: list[str], given: dict[str, Value], line: int, state: ShellState) -> None:
        name, rest = words[0], words[1:]
        if name == "exec" and rest:
            self._run(rest, given, line, state)
            raise _End
        if name in state.functions:
            self._call(name, rest, state)
        elif (built_in := getattr(self, f"_do_{name}", None)) is not None and name.isidentifier():
            built_in(rest, state)
        elif name == ".":
            self._do_source(rest, state)
        elif name in ("module", "ml"):
            if rest[:1] != ["purge"]:
                self.notes.append(f"line {line}: '{' '.join(words)}' was not followed; what it sets is not known here")
        elif name in _CONDA and rest[:1] == ["activate"] and len(rest) > 1:
            self._activate_conda(rest[1], state)
        elif name in ("command", "builtin") and rest and not rest[0].startswith("-"):
            self._run(rest, given, line, state)
        else:
            mine = state.copy()
            mine.variables.update(given)
            mine.exported.update(given)
            self._external(words, line, mine)

    def _external(self, words: list[str], line: int, state: ShellState) -> None:
        """Add a program or, if it runs a shell script, that script's programs, with the launchers before them."""
        launch = launched(words)
        before, program = words[: len(words) - len(launch.words)], list(launch.words)
        inner = self._shell_script(program, state) if program and launch.refusal is None else None
        if inner is not None:
            text, arguments = inner
            apart = replace(state, arguments=tuple(arguments), functions={})
            apart.variables = {name: state.variables[name] for name in state.exported if name in state.variables}
            apart.variables |= launch.variables
            apart.exported = {*state.exported, *launch.variables}
            first = len(self.programs)
            self.read(text, apart)
            self.programs[first:] = [replace(each, words=(*before, *each.words)) for each in self.programs[first:]]
            return
        if len(self.programs) >= _MOST_PROGRAMS:
            raise InvalidValue(f"it would run more than {_MOST_PROGRAMS} programs")
        self.programs.append(Program(tuple(words), state.environment(), state.folder, line))

    def _shell_script(self, words: list[str], state: ShellState) -> tuple[str, list[str]] | None:
        if os.path.basename(words[0]) in _SHELLS:
            rest = words[1:]
            while rest and re.fullmatch(r"-[eulx]+|--login", rest[0]):
                rest = rest[1:]
            if rest[:1] and re.fullmatch(r"-[eulx]*c", rest[0]) and len(rest) > 1:
                return None if isinstance(rest[1], Unknown) else (rest[1], rest[3:])
            content = self._file(rest[0], state) if rest and not rest[0].startswith("-") else None
            return None if content is None else (content, rest[1:])
        if "/" in words[0] and not words[0].endswith(".py"):
            content = self._file(words[0], state)
            first = re.match(r"#!\s*(\S+)(?:\s+(\S+))?", content or "")
            if content and first and {os.path.basename(part) for part in first.groups("")} & set(_SHELLS):
                return content, words[1:]
        return None

    def _file(self, name: str, state: ShellState) -> str | None:
        if isinstance(name, Unknown) or state.folder is None and not os.path.isabs(name):
            return None
        path = os.path.join(state.folder or "/", name)
        try:
            if os.path.isfile(path) and os.path.getsize(path) < 1 << 20:
                with open(path, "rb") as file:
                    content = file.read()
                return None if b"\0" in content else content.decode(errors="surrogateescape")
        except OSError:
            pass
        return None

    def _call(self, name: str, arguments: list[str], state: ShellState) -> None:
        if self._depth >= _DEEPEST:
            return
        self._depth += 1
        before, state.arguments = state.arguments, tuple(arguments)
        try:
            self._statement(state.functions[name], state)
        except _Return:
            pass
        finally:
            self._depth -= 1
            state.arguments = before

    def _do_cd(self, rest: list[str], state: ShellState) -> None:
        words = [word for word in rest if not word.startswith("-") or word == "-"]
        home = state.variables.get("HOME")
        target = words[0] if words else home if isinstance(home, str) else Unknown("$HOME")
        if isinstance(target, Unknown) or target == "-" or state.folder is None and not os.path.isabs(target):
            state.folder = None
            state.variables["PWD"] = Unknown("$PWD")
        else:
            state.folder = os.path.normpath(os.path.join(state.folder or "/", target))
            state.variables["PWD"] = state.folder

    _do_pushd = _do_cd

    def _do_popd(self, rest: list[str], state: ShellState) -> None:
        state.folder = None

    def _do_source(self, rest: list[str], state: ShellState) -> None:
        if not rest:
            return
        name = os.path.basename(rest[0])
        if name == "activate" and len(rest) > 1:
            self._activate_conda(rest[1], state)
        elif name == "activate" and os.path.basename(os.path.dirname(rest[0])) == "bin":
            self._activate(os.path.dirname(os.path.dirname(rest[0])) or ".", rest[0], state)
        elif name != "conda.sh":  # conda.sh defines `conda activate` and sets nothing
            text = self._file(rest[0], state)
            if text is None:
                self.notes.append(f"'source {rest[0]}' was not followed: there is no such file here")
                return
            try:
                self.read(text, state)
            except InvalidValue:
                self.notes.append(f"'source {rest[0]}' was not followed: it cannot be read as a shell script")

    def _activate(self, folder: str, name: str, state: ShellState) -> None:
        if isinstance(name, Unknown) or state.folder is None and not os.path.isabs(folder):
            state.variables["PATH"] = Unknown("$PATH")
            return
        folder = os.path.normpath(os.path.join(state.folder or "/", folder))
        path = state.variables.get("PATH", "")
        state.variables |= {
            "VIRTUAL_ENV": folder,
            "PATH": joined(f"{folder}/bin:", path if isinstance(path, str) else ""),
        }
        state.exported |= {"VIRTUAL_ENV", "PATH"}

    def _activate_conda(self, name: str, state: ShellState) -> None:
        if isinstance(name, Unknown):
            state.variables["PATH"] = Unknown("$PATH")
            return
        if "/" in name and state.folder is not None:
            name = os.path.normpath(os.path.join(state.folder, os.path.expanduser(name)))
        try:
            variables = in_conda(name, state.environment())
        except LookupError as error:
            self.notes.append(str(error))
            state.variables["PATH"] = Unknown("$PATH")
            return
        state.variables.update(variables)
        state.exported.update(variables)

    def _do_eval(self, rest: list[str], state: ShellState) -> None:
        text = " ".join(rest)
        if any(isinstance(word, Unknown) for word in rest):
            if not re.search(r"\b(conda|mamba|micromamba)\b.*\bhook\b", text):
                self.notes.append(f"'eval {text}' was not followed: what it runs is known only when it runs")
            return
        self.read(text, state)

    def _do_exit(self, rest: list[str], state: ShellState) -> None:
        raise _End

    def _do_return(self, rest: list[str], state: ShellState) -> None:
        raise _Return

    def _do_set(self, rest: list[str], state: ShellState) -> None:
        if "--" in rest:
            state.arguments = tuple(rest[rest.index("--") + 1 :])

    def _do_shift(self, rest: list[str], state: ShellState) -> None:
        count = int(rest[0]) if rest and rest[0].isdigit() else 1
        state.arguments = state.arguments[count:]

    def _do_read(self, rest: list[str], state: ShellState) -> None:
        for name in rest:
            if name.isidentifier():
                state.variables[name] = Unknown(f"${name}")

    _do_mapfile = _do_readarray = _do_getopts = _do_read


def _line(node: Any) -> int:
    return int(node.start_point[0]) + 1


def _first_error(node: Any) -> int:
    for child in node.children:
        if child.type == "ERROR" or child.is_missing:
            return _line(child)
        if child.has_error:
            return _first_error(child)
    return _line(node)


def _assigned(node: Any) -> Iterator[str]:
    if node.type == "variable_assignment" and node.child_by_field_name("name") is not None:
        yield text_of(node.child_by_field_name("name"))
    elif node.type == "variable_name" and node.parent is not None and node.parent.type in ("command", "for_statement"):
        yield text_of(node)
    for child in node.children:
        yield from _assigned(child)
