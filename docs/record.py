"""Run the commands that pages show, and write down what they print: `python docs/record.py [PAGE...]`.

A console block below a line `<!-- record -->` is recorded: every line that begins with `$ ` is run from the root of the
repository, and what it prints replaces what stood below it. Without pages, all of the documentation is recorded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 88
BLOCK = re.compile(r"(<!-- record -->\n```console\n)(.*?)(```)", re.DOTALL)


def pages() -> list[Path]:
    """Every page that can show a command."""
    return [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


def printed(command: str) -> str:
    """What a command prints, without the blanks at the ends of lines."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    shown = done.stdout + (done.stderr if done.returncode else "")  # else it is progress, which a terminal erases
    return "\n".join(line.rstrip() for line in shown.rstrip().splitlines())


def record(text: str) -> str:
    """A page with its recorded blocks run again."""

    def again(found: re.Match[str]) -> str:
        commands = [line for line in found[2].splitlines() if line.startswith("$ ")]
        shown = "\n\n".join(f"{command}\n{printed(command[2:])}".rstrip() for command in commands)
        return f"{found[1]}{shown}\n{found[3]}"

    return BLOCK.sub(again, text)


def main() -> None:
    """Record the pages named on the command line, or all."""
    for page in [Path(name) for name in sys.argv[1:]] or pages():
        before = page.read_text()
        after = record(before)
        if after != before:
            page.write_text(after)
            print(f"recorded {page}")


if __name__ == "__main__":
    main()
