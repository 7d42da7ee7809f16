"""`ullage lab`: parses options, calls the library, prints results. Each command has a module.

Nothing is computed here, and no slow import happens before a command runs.
"""

from ullage.cli.options import command_group
from ullage_lab.cli import compare, data, draw, evaluate, measure, training

lab = command_group("Compare, measure and train estimators.")
lab.command()(compare.compare)
lab.command()(evaluate.evaluate)
lab.add_typer(draw.draw, name="draw")
lab.add_typer(measure.measure, name="measure")
lab.add_typer(data.data, name="data")
lab.add_typer(training.train, name="train")

__all__ = ["lab"]
