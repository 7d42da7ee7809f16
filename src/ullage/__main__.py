"""`ullage`, and `python -m ullage`."""

from __future__ import annotations

import gc
import sys

_WRONG = 2  # `cli.exit_codes` has it, too, and takes long to import


def main() -> None:
    """Run the command line. That a script is not there is told before anything is imported that takes long."""
    match sys.argv[1:]:
        case ["estimate" | "check" | "max-batch" | "plan", script, *rest] if (
            script.endswith(".py") and not script.startswith("-") and not {"-m", "--module"} & {*rest}
        ):
            _check(script)
    from ullage.cli import main as run

    try:
        run()
    finally:
        gc.freeze()  # at its end Python looks for garbage in all that was imported, though its memory goes anyway


def _check(script: str) -> None:
    from ullage.errors import InvalidValue
    from ullage.jobs.kinds import check_script
    from ullage.text import plain

    try:
        check_script(script)
    except InvalidValue as error:
        print(plain(f"ullage: {error}"), file=sys.stderr)
        raise SystemExit(_WRONG) from None


if __name__ == "__main__":
    main()
