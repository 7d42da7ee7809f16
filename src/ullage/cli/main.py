"""`ullage`: the list of commands, their help, and how errors are printed."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ullage.cli.accuracy import evaluate
from ullage.cli.comparison import compare
from ullage.cli.convolutions import convolutions
from ullage.cli.daemon import drain, resume, serve
from ullage.cli.datasets import dataset
from ullage.cli.edits import edit, requeue
from ullage.cli.estimates import check, estimate, max_batch
from ullage.cli.hardware import gpus
from ullage.cli.jobs import cancel, history, hold, logs, queue, release, status, wait
from ullage.cli.measurements import diff, measure
from ullage.cli.monitor import top
from ullage.cli.report import report
from ullage.cli.reservations import reservations, reserve, unreserve
from ullage.cli.spelling import modern
from ullage.cli.submission import submit
from ullage.cli.terminal import attach, shell
from ullage.cli.tokens import token
from ullage.cli.training import train
from ullage.errors import EXTRAS, UllageError
from ullage.text import plain

ESTIMATES, JOBS, GPUS, RESEARCH = "Estimate", "Run jobs on shared GPUs", "GPUs", "Research"
_COMMANDS = {
    ESTIMATES: (estimate, check, max_batch, compare),
    JOBS: (
        serve,
        submit,
        shell,
        attach,
        queue,
        status,
        logs,
        cancel,
        hold,
        release,
        edit,
        requeue,
        wait,
        history,
        report,
        drain,
        resume,
        reserve,
        reservations,
        unreserve,
    ),
    GPUS: (gpus, top),
    RESEARCH: (evaluate, diff, measure),
}  # fmt: skip
HELP = """Estimate how much GPU memory a training job takes, before it runs and without a GPU.

Examples:

  ullage estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB
  ullage estimate train.py --gpu RTX-4090 -- --epochs 90
  ullage max-batch timm:vit_small_patch16_224 --gpu RTX-4090
  ullage COMMAND --help

A command exits with 0 when it is done, with 1 and one line on standard error when it fails, and with 2 when the command
line itself is wrong. 'check' and 'wait' have exit codes of their own.
"""


def _tidy(command: Any, params: list[Any]) -> list[Any]:
    """Show flags and arguments without a type, and the paragraphs of the help as paragraphs."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = _no_type
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(text if "\n  " in f"\n{text}" else " ".join(text.split("\n")) for text in paragraphs)
    return params


def _no_type(ctx: Any) -> None:
    """What the help says of an argument's type: its name and its meaning say enough."""


class PlainCommand(TyperCommand):
    """A command whose help is tidied."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, as the help shows them."""
        return _tidy(self, super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command; older spellings of options are understood."""
        return super().parse_args(ctx, modern(_path(ctx), args))


def _path(ctx: Any) -> str:
    """The words that name a command, without the program's: "train walknet"."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(words)


class PlainGroup(TyperGroup):
    """A group of commands whose help is tidied."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, as the help shows them."""
        return _tidy(self, super().get_params(ctx))


app = typer.Typer(
    name="ullage",
    cls=PlainGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


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


for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(cls=PlainCommand, rich_help_panel=_panel)(_command)
_GROUPS = ((token, "token", JOBS), (train, "train", RESEARCH), (dataset, "dataset", RESEARCH),
           (convolutions, "convolutions", RESEARCH))  # fmt: skip
for _group, _name, _panel in _GROUPS:
    for _info in _group.registered_commands:
        _info.cls = PlainCommand
    app.add_typer(_group, name=_name, cls=PlainGroup, rich_help_panel=_panel)


def main() -> None:
    """Run the command line.

    A `UllageError` is one line on standard error and exit code 1. A wrong command line is one line and exit code 2.
    """
    try:
        code = app(standalone_mode=False)
    except UllageError as error:
        print("\n".join(map(plain, f"ullage: {error}".split("\n"))), file=sys.stderr)
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        wanted = f"pip install 'ullage[{EXTRAS[package]}]'"
        print(f"ullage: this command needs the package {package}; type: {wanted}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # what all usage errors of typer's parser have, whatever its version
            raise
        message = error.format_message()
        if message:  # without one the help was printed
            print(f"ullage: {message} ({_where_help_is(error)})", file=sys.stderr)
        raise SystemExit(2) from None
    if isinstance(code, int) and code:
        raise SystemExit(code)


def _where_help_is(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"see '{context.command_path if context else 'ullage'} --help'"
