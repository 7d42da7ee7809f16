"""Exit codes of all commands; docs/reference/commands.md has the table."""

from ullage.errors import InvalidValue, NoSuchJob, UllageError, UnknownName

DONE = 0  # it is done; `check`: the job fits
FAILED = 1  # it failed, or the answer is no; `check`: the job does not fit
WRONG = 2  # what was typed is wrong: an option, a value, or a name that is not there; `check`: there is no answer
INTERRUPTED = 130  # Ctrl-C


def exit_code_of(error: UllageError) -> int:
    return WRONG if isinstance(error, InvalidValue | UnknownName | NoSuchJob) else FAILED
