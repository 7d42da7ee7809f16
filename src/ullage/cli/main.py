"""`ullage`: the list of commands, their help, and how errors are printed."""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ullage.cli.exit_codes import FAILED, INTERRUPTED, WRONG, exit_code_of
from ullage.errors import EXTRAS, LABS, UllageError, pip_install
from ullage.text import plain

# The commands in the order of the help, each with its module in this package. A module is imported only for its own
# command, so that wrong options are reported fast.
_COMMANDS = {
    "Estimate": {
        "estimate": "estimates",
        "check": "estimates",
        "max-batch": "estimates",
        "plan": "planning",
        "share": "sharing",
        "gpus": "hardware",
    },
    "Run jobs on shared GPUs": {
        "serve": "daemon",
        "submit": "submission",
        "attach": "terminal",
        "queue": "jobs",
        "status": "jobs",
        "logs": "jobs",
        "cancel": "jobs",
        "edit": "submission",
        "wait": "jobs",
        "report": "jobs",
        "page": "page",
        "admin": "admin",
        "top": "monitor",
        "slurm": "slurm",
        "simulate": "simulation",
        "trace": "traces",
    },
    "Research": {
        "evaluate": "accuracy",
        "diff": "measurements",
        "measure": "measurements",
        "contribute": "contribution",
        "lab": "lab",
    },
}
HELP = """Estimate how much GPU memory a training job needs, before it runs and without a GPU.

Examples:

  ullage estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB
  ullage estimate train.py --gpu RTX-4090 -- --epochs 90
"""


def _tidy(command: Any, params: list[Any]) -> list[Any]:
    """Show flags and arguments without a type, and each paragraph of the help on one line."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = _no_type
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(text if "\n  " in f"\n{text}" else " ".join(text.split("\n")) for text in paragraphs)
    return params


def _no_type(ctx: Any) -> None:
    """Show no type for an argument."""


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _tidy(self, super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command, except those of a launcher."""
        try:
            return super().parse_args(ctx, with_launcher_apart(ctx.info_name if ctx.parent else "", args))
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # the parser sets no context if an option lacks its value
                error.ctx = ctx  # type: ignore[attr-defined]
            raise


class PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _tidy(self, super().get_params(ctx))


class Commands(PlainGroup):
    """All commands, each loaded on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in _COMMANDS.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; for an unknown name, load all commands, so that typer can suggest one."""
        known = self.list_commands(ctx)
        for name in [cmd_name] if cmd_name in known else known:
            if name not in self.commands:
                self.commands[name] = _load(name)
        return self.commands.get(cmd_name)


def _missing_lab(context: typer.Context) -> None:
    """Compare, measure and train estimators. To install it, type: pip install ./lab  # in a clone of Ullage"""
    raise UllageError(f"the lab is a separate package; type: {pip_install('ullage_lab')}")


_missing_lab.context_settings = {"ignore_unknown_options": True, "allow_extra_args": True}  # type: ignore[attr-defined]


def _load(name: str) -> Any:
    panel, module = next((panel, names[name]) for panel, names in _COMMANDS.items() if name in names)
    if name == "lab":
        from importlib.metadata import entry_points  # other commands start faster without it

        loaded = next((point.load() for point in entry_points(group="ullage.commands", name=name)), _missing_lab)
    else:
        loaded = getattr(importlib.import_module(f"ullage.cli.{module}"), name.replace("-", "_"))
    home = typer.Typer(rich_markup_mode="rich", add_completion=False)
    home.callback()(lambda: None)
    if isinstance(loaded, typer.Typer):
        _tidied(loaded)
        home.add_typer(loaded, name=name, cls=PlainGroup, rich_help_panel=panel)
    else:
        settings = getattr(loaded, "context_settings", None)
        home.command(name, cls=PlainCommand, rich_help_panel=panel, context_settings=settings)(loaded)
    group: Any = typer.main.get_command(home)
    command = group.commands[name]
    first_sentence = re.split(r"[.:;](?:\s|$)", (command.help or "").strip(), maxsplit=1)[0]
    command.short_help = first_sentence.replace("\n", " ") + "."
    return command


def _tidied(group: typer.Typer) -> None:
    for info in group.registered_commands:
        info.cls = PlainCommand
    for inner in group.registered_groups:
        inner.cls = PlainGroup
        assert inner.typer_instance is not None
        _tidied(inner.typer_instance)


app = typer.Typer(
    name="ullage",
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def all_commands() -> Any:
    root: Any = typer.main.get_command(app)
    for name in root.list_commands(None):
        root.get_command(None, name)
    return root


def typed(command: str, words: list[str]) -> dict[str, Any]:
    parser: Any = _load(command)
    with parser.make_context(command, words) as context:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        return {name: value for name, value in context.params.items() if sources[name].name == "COMMANDLINE"}


def _print_version(wanted: bool) -> None:
    if wanted:
        import ullage

        print(ullage.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line.

    A `UllageError` or a wrong command line prints one line on standard error.
    """
    try:
        code = app(standalone_mode=False)
    except UllageError as error:
        print("\n".join(map(plain, f"ullage: {error}".split("\n"))), file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS and package not in LABS:
            raise
        print(f"ullage: this command needs the package {package}; type: {pip_install(package)}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    except BrokenPipeError:
        raise SystemExit(FAILED) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # only usage errors have this, in all versions of typer's parser
            raise
        message = error.format_message()
        if message:  # without a message, the parser has printed the help
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "ullage"
            print(f"ullage: {message} (see '{command} --help')", file=sys.stderr)
        raise SystemExit(WRONG) from None
    if isinstance(code, int) and code:
        raise SystemExit(code)


_PYTHONS = ("python", "python3")
_OF_SCRIPTS = ("estimate", "check", "max-batch")
_NAMES_FOLLOW = ("--estimator", "-e")


def with_launcher_apart(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--` before a launcher, since the rest is for it and the script."""
    parts = list(words)
    end = parts.index("--") if "--" in parts else len(parts)
    if command in _OF_SCRIPTS:
        from ullage.jobs.ranks import LAUNCHERS, NOT_FOLLOWED

        for place, (before, word) in enumerate(pairwise(["", *parts[:end]])):
            if before in _NAMES_FOLLOW:
                continue
            name = os.path.basename(word)
            if name in LAUNCHERS or name in NOT_FOLLOWED or (place == 0 and name in _PYTHONS):
                return [*parts[:place], "--", *parts[place:]]
    return parts
