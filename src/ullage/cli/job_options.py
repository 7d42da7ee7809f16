"""The options of `ullage submit` and `ullage edit`, made from the fields of `JobSpec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.options import Options, option
from ullage.jobs.job_files import JobOption, JobSpec

NONE = "none"  # resets a value


def job_options(names: Iterable[str] = JobSpec.model_fields, editing: bool = False) -> Options:
    """Return the options for these fields of a job, as far as they are options.

    For editing they have no defaults and no groups.
    """
    found: Options = {}
    for name in names:
        about = next((each for each in JobSpec.model_fields[name].metadata if isinstance(each, JobOption)), None)
        if about is None:
            continue
        long = f"--{name.replace('_', '-')}"
        made = option(
            about.help,
            f"{long}/--{about.off}" if about.off else long,
            f"-{about.letter}" if about.letter else "",
            about.takes or "",
            panel=None if editing else about.panel,
            complete=getattr(completion, about.complete) if about.complete else None,
            show_default=(not editing and about.default) or False,
        )
        kind: Any = bool if about.takes is None else list[str] if name == "after" else str
        found[name] = Annotated[kind | None, made], None
    return found


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that were typed."""
    return {name: value for name, value in values.items() if value is not None and value != []}
