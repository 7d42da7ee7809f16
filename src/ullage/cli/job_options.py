"""The options of `ullage submit` and `ullage edit`, made of the fields of `JobSpec`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.jobs.job_files import JobOption, JobSpec

NONE = "none"  # the word that takes a value back


def with_job_options(
    names: Iterable[str] | None = None, editing: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options for these fields (all that are options), as keyword arguments; what is not typed is
    left out. A value that is edited may be `none`."""

    def added(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [_parameter(name, editing) for name in (JobSpec.model_fields if names is None else names)]
        parameters = [*own, *(each for each in made if each is not None)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return added


def _parameter(name: str, editing: bool) -> inspect.Parameter | None:
    field = JobSpec.model_fields[name]
    option = next((each for each in field.metadata if isinstance(each, JobOption)), None)
    if option is None:
        return None
    spelled = f"--{name.replace('_', '-')}"
    words = [f"{spelled}/--{option.off}" if option.off else spelled, *([f"-{option.letter}"] if option.letter else [])]
    is_list = name == "after"
    kind: Any = bool if option.takes is None else list[str] if is_list else str
    back = editing and option.takes is not None and name != "name" and field.default in (None, [])
    shown = typer.Option(
        *words,
        help=option.help.removesuffix(".") + f"; {NONE} takes it back." if back else option.help,
        metavar=option.takes,
        rich_help_panel=None if editing else option.panel,
        show_default=(not editing and option.default) or False,
        autocompletion=getattr(completion, option.complete) if option.complete else None,
    )
    annotation = Annotated[kind | None, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that were typed."""
    return {name: value for name, value in values.items() if value is not None and value != []}
