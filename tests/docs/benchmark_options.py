"""What programs of the repository say to command lines, without running them: in a process of its own.

Reads a JSON object of programs and their lists of words, and prints the lines that cannot be typed.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
parse_args = argparse.ArgumentParser.parse_args


class Found(BaseException):
    """The parser of a program, when it is about to read its words."""


def found(self, *args, **options):
    raise Found(self)


def parser_of(program):
    """The parser that a program makes, or one of its plain words for a program that has none."""
    text = program.read_text()
    if "argparse" not in text:
        plain = argparse.ArgumentParser()
        if "sys.argv" in text:
            plain.add_argument("words", nargs="*")
        return plain
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program)]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except Found as parser:
        return parser.args[0]
    finally:
        sys.path.remove(str(program.parent))
    raise AssertionError(f"{program} does not read its options")


def refusals(root, lines):
    """Of each line that cannot be typed, why not."""
    for name, several in lines.items():
        if not (root / name).is_file():
            yield f"{name} is not there"
            continue
        parser = parser_of(root / name)
        for words in several:
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    parse_args(parser, words)
            except SystemExit as end:
                if end.code:
                    yield f"{name} {' '.join(words)}: {said.getvalue().splitlines()[-1]}"


if __name__ == "__main__":
    root = Path(sys.argv[1]) if sys.argv[1:] else ROOT
    argparse.ArgumentParser.parse_args = found
    print(json.dumps(list(refusals(root, json.load(sys.stdin)))))
