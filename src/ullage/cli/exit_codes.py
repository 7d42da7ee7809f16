"""Exit codes of all commands; docs/reference/commands.md has the table."""

from ullage.errors import InvalidValue, JobNotFound, UllageError, UnknownName

DONE = 0  # success; `check`: the job fits
FAILED = 1  # failure, or the answer is no; `check`: the job does not fit
WRONG = 2  # wrong usage: an option, a value or an unknown name; `check`: there is no estimate
INTERRUPTED = 130  # Ctrl-C


def exit_code_of(error: UllageError) -> int:
    return WRONG if isinstance(error, InvalidValue | UnknownName | JobNotFound) else FAILED
