"""`ullage lab`: parse, call, print. One module for each command.

Nothing is computed here, and nothing that takes long is imported before a command runs.
"""

import typer

from ullage_lab.cli import compare, data, draw, evaluate, measure, training

lab = typer.Typer(help="Compare, measure and train estimators.", no_args_is_help=True, rich_markup_mode="rich")
lab.command()(compare.compare)
lab.command()(evaluate.evaluate)
lab.add_typer(draw.draw, name="draw")
lab.add_typer(measure.measure, name="measure")
lab.add_typer(data.data, name="data")
lab.add_typer(training.train, name="train")

__all__ = ["lab"]
