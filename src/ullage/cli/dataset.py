"""`ullage dataset`: what learned estimators are trained on, from drawing models to one file of measured runs."""

from __future__ import annotations

import typer

from ullage.cli.dataset_clean import clean
from ullage.cli.dataset_generate import generate
from ullage.cli.dataset_measure import measure
from ullage.cli.dataset_show import show

dataset = typer.Typer(
    name="dataset",
    help="Data sets for learned estimators: generate models, measure them on a GPU, clean, show.",
    no_args_is_help=True,
)
dataset.command()(generate)
dataset.command()(measure)
dataset.command()(clean)
dataset.command()(show)
