"""Run the commands that pages show, and write down what they print: `python docs/record.py [PAGE...]`.

A console block below a line `<!-- record -->` is recorded: every line that begins with `$ ` is run from the root of the
repository, and what it prints replaces what stood below it. Below `<!-- record on slurm -->` it is run on a private
Slurm (`slurm_stage.py`), with all that it prints; below `<!-- record on busy slurm -->` on one that has two jobs.
Without pages, all of the documentation is recorded.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from slurm_stage import slurm_stage

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 88
BLOCK = re.compile(r"(<!-- record(?: on (?P<slurm>slurm|busy slurm))? -->\n```console\n)(.*?)(```)", re.DOTALL)


def pages() -> list[Path]:
    """Every page that can show a command."""
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "lab/docs").glob("*.md")), ROOT / "README.md"]


def printed(command: str, stage: tuple[Path, dict[str, str]] | None = None) -> str:
    """What a command prints, without the blanks at the ends of lines."""
    folder, variables = (ROOT, dict(os.environ)) if stage is None else stage
    path = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"
    environment = {**variables, "PATH": path, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    errors = subprocess.PIPE if stage is None else subprocess.STDOUT
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    shown = done.stdout + (done.stderr or "" if done.returncode else "")  # else it is progress, which a terminal erases
    return "\n".join(line.rstrip() for line in shown.rstrip().splitlines())


def record(text: str) -> str:
    """A page with its recorded blocks run again."""

    with contextlib.ExitStack() as stack:
        stages: dict[str, tuple[Path, dict[str, str]]] = {}

        def again(match: re.Match[str]) -> str:
            commands = [line for line in match[3].splitlines() if line.startswith("$ ")]
            name = match["slurm"]
            if name and name not in stages:
                stack.close()  # one at a time
                stages.clear()
                stages[name] = stack.enter_context(slurm_stage(name == "busy slurm"))
            where = stages.get(name) if name else None
            shown = "\n\n".join(f"{command}\n{printed(command[2:], where)}".rstrip() for command in commands)
            return f"{match[1]}{shown}\n{match[4]}"

        return BLOCK.sub(again, text)


def main() -> None:
    """Record the pages named on the command line, or all."""
    named = [Path(name) for name in sys.argv[1:]] or pages()
    if missing := [str(page) for page in named if not page.is_file()]:
        sys.exit(f"docs/record.py: there is no page {', '.join(missing)}")
    for page in named:
        before = page.read_text()
        after = record(before)
        if after != before:
            page.write_text(after)
            print(f"recorded {page}")


if __name__ == "__main__":
    main()
