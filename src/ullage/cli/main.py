"""`ullage`: one command a verb and a file a command; each prints what a function of the library returns."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ullage.cli.accuracy import evaluate
from ullage.cli.comparison import compare
from ullage.cli.daemon import drain, resume, serve
from ullage.cli.datasets import dataset
from ullage.cli.estimates import check, estimate, max_batch
from ullage.cli.hardware import gpus
from ullage.cli.jobs import cancel, history, hold, logs, queue, release, status, wait
from ullage.cli.measurements import diff, measure
from ullage.cli.monitor import top
from ullage.cli.submission import submit
from ullage.cli.training import train
from ullage.errors import EXTRAS, MissingPackage, UllageError

app = typer.Typer(
    name="ullage",
    help="How much GPU memory a training job will take, before it runs and without a GPU.",
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


app.command()(check)
app.command()(estimate)
app.command()(max_batch)
app.command()(compare)
app.command()(gpus)
app.command()(evaluate)
app.command()(diff)
app.command()(measure)
app.command()(serve)
app.command()(submit)
app.command()(queue)
app.command()(status)
app.command()(logs)
app.command()(cancel)
app.command()(hold)
app.command()(release)
app.command()(wait)
app.command()(history)
app.command()(drain)
app.command()(resume)
app.command()(top)
app.add_typer(train, name="train")
app.add_typer(dataset)


def main() -> None:
    """Run the command line; an error that we know is one line on standard error and exit code 1.

    A word that is no command or option, or one that is missing, gets one line too and exit code 2, as in most programs.
    """
    try:
        code = app(standalone_mode=False)
    except UllageError as error:
        print(f"ullage: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"ullage: {MissingPackage(package, 'some commands, this one too,')}", file=sys.stderr)
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
            print(f"ullage: {message} ({_usage(error)})", file=sys.stderr)
        raise SystemExit(2) from None
    if isinstance(code, int) and code:
        raise SystemExit(code)


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"'{context.command_path if context else 'ullage'} --help' shows what there is"
