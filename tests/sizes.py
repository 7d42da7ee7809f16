"""Count the lines of each room and check them against budget.toml; `make lint` runs this.

    python tests/sizes.py                    # fail if a room is above its budget
    python tests/sizes.py --lower            # lower the budget to today's counts
    python tests/sizes.py --against v0.1.0   # print the difference by room to a commit

Code lines leave out blank lines, comments and docstrings; raw lines count everything.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / "budget.toml"
HEAD = """\
# The most lines that each room may have: [code lines, raw lines], as `python tests/sizes.py` counts them.
# A change may lower a number. One that raises a number says why in its commit message.
"""
COUNTED = ("src", "lab/src", "benchmarks")
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def room_of(path: str) -> str:
    """Name the room of a file.

    >>> room_of("src/ullage/manager/page/job.py"), room_of("src/ullage/errors.py"), room_of("lab/src/ullage_lab/a/b.py")
    ('ullage/manager/page', 'ullage', 'lab/a')
    """
    parts = PurePosixPath(path).parts[:-1]
    if parts[0] == "benchmarks":
        return "/".join(parts[:2])
    inside = parts[1:] if parts[0] == "src" else ("lab", *parts[3:])
    return "/".join(inside[:3] if inside[:2] == ("ullage", "manager") else inside[:2])


def code_lines(text: str) -> int:
    """Count the lines that hold code.

    >>> code_lines('\"\"\"A module.\"\"\"\\n\\n# why\\nx = (\\n    1\\n)\\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def count(files: dict[str, str]) -> dict[str, list[int]]:
    """Sum code lines and raw lines by room."""
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, text in files.items():
        room = rooms[room_of(path)]
        room[0] += code_lines(text)
        room[1] += text.count("\n")
    return dict(sorted(rooms.items()))


def files_here() -> dict[str, str]:
    """Read the Python files of this tree."""
    found = (path for folder in COUNTED for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}


def files_of(revision: str) -> dict[str, str]:
    """Read the Python files of a commit."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout

    # git archive refuses a folder that the commit does not have.
    folders = git("ls-tree", "--name-only", revision, *(folder.split("/")[0] for folder in COUNTED)).decode().split()
    with tarfile.open(fileobj=io.BytesIO(git("archive", revision, *folders))) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {
            name: file.read().decode()
            for name, file in files.items()
            if file and name.startswith(COUNTED) and name.endswith(".py")
        }


def excesses(rooms: dict[str, list[int]], budget: dict[str, list[int]]) -> list[str]:
    """Say which rooms are above their budget.

    >>> excesses({"ullage/cli": [90, 120], "lab": [10, 12]}, {"ullage/cli": [90, 110], "lab": [10, 12]})
    ['ullage/cli has 120 raw lines, and its budget is 110']
    """
    return [
        f"{room} has {has} {kind} lines, and its budget is {most}"
        for room, sizes in rooms.items()
        for kind, has, most in zip(("code", "raw"), sizes, budget.get(room, [0, 0]), strict=True)
        if has > most
    ]


def written(rooms: dict[str, list[int]]) -> str:
    """Write a budget of these sizes."""
    return HEAD + "\n[rooms]\n" + "".join(f'"{room}" = [{code}, {raw}]\n' for room, (code, raw) in rooms.items())


def totals(rooms: dict[str, list[int]]) -> dict[str, list[int]]:
    """Sum the rooms of each distribution, and of the benchmarks.

    >>> totals({"ullage": [1, 2], "ullage/cli": [10, 20], "lab/cli": [3, 4]})
    {'ullage': [11, 22], 'lab': [3, 4]}
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for room, (code, raw) in rooms.items():
        total = sums[room.split("/")[0]]
        total[0] += code
        total[1] += raw
    return dict(sums)


def show_difference(before: dict[str, list[int]], after: dict[str, list[int]]) -> None:
    """Print the lines of each room, before and after."""
    print(f"{'':<32}{'code':>8}{'raw':>8}{'code':>10}{'raw':>8}{'code':>10}{'raw':>8}")
    for title, old, new in (("", before, after), ("all of ", totals(before), totals(after))):
        for room in sorted({*old, *new}):
            (code, raw), (new_code, new_raw) = old.get(room, [0, 0]), new.get(room, [0, 0])
            changes = f"{new_code - code:>+10,}{new_raw - raw:>+8,}"
            print(f"{title + room:<32}{code:>8,}{raw:>8,}{new_code:>10,}{new_raw:>8,}{changes}")


def main() -> None:
    """Check, lower or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the budget to today's counts")
    parser.add_argument("--against", metavar="COMMIT", help="print the difference by room to a commit")
    arguments = parser.parse_args()
    rooms = count(files_here())
    if arguments.against:
        return show_difference(count(files_of(arguments.against)), rooms)
    budget = tomllib.loads(BUDGET.read_text())["rooms"] if BUDGET.exists() else rooms
    if too_large := excesses(rooms, budget):
        too_large.append("Remove what is no longer needed, or raise the number in budget.toml and say why.")
        sys.exit("\n".join(too_large))
    if arguments.lower:
        BUDGET.write_text(written(rooms))
    print("; ".join(f"{name}: {code:,} code lines, {raw:,} raw" for name, (code, raw) in totals(rooms).items()))


if __name__ == "__main__":
    main()
