"""`ullage convolutions`: how much workspace memory cuDNN takes: list calls, measure them on a GPU, fit tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ullage.cli.training import check_file
from ullage.errors import InvalidValue, UllageError
from ullage.units import parse_bytes, parse_duration

convolutions = typer.Typer(
    help="Measure the workspaces of cuDNN's convolutions, and fit the tables that estimates use.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@convolutions.command("list")
def list_(
    out: Annotated[Path, typer.Option(help="Write the list here.", metavar="FILE.json.gz", show_default=False)],
    stop_after: Annotated[
        str, typer.Option(help="Stop collecting layers of torchvision's and timm's models after this long; 0: collect "
                          "none.", metavar="TIME")
    ] = "15m",
    resolutions: Annotated[
        int, typer.Option(help="How many image sizes to try per model.", metavar="N", min=1)
    ] = 3,
    configurations: Annotated[
        int, typer.Option(help="How many combinations of layer, batch size, type and layout to list.", metavar="N",
                          min=0)
    ] = 200_000,
    random: Annotated[
        int, typer.Option(help="How many random layers to add to those of models.", metavar="N", min=0)
    ] = 6_000,
    arbitrary: Annotated[
        int, typer.Option(help="How many calls to add whose channels, sides and batch sizes are any numbers.",
                          metavar="N", min=0)
    ] = 0,
    truth: Annotated[
        Path | None, typer.Option(help="A file of measured calls; 1500 of them come first, to be measured again.",
                                  metavar="FILE")
    ] = None,
) -> None:  # fmt: skip
    """List convolution calls to measure. Needs no GPU.

    Layers come from torchvision's and timm's models, which run on PyTorch's "meta" device, and from a random generator.
    The order is random, and common calls tend to come first: measure as many as there is time for.

    Examples:

      ullage convolutions list --out tasks.json.gz

      ullage convolutions list --out odd.json.gz --stop-after 0 --configurations 0 --arbitrary 80000
    """
    from ullage.research.cudnn_tables.collect import write_list

    check_file(out)
    layers, calls = write_list(
        out,
        seconds=parse_duration(stop_after),
        resolutions=resolutions,
        configurations=configurations,
        random_count=random,
        arbitrary_count=arbitrary,
        truth=truth,
    )
    print(f"{calls} calls of {layers} layers: {out}")


@convolutions.command()
def measure(
    tasks: Annotated[
        Path, typer.Argument(help="A list written by 'ullage convolutions list'.", metavar="FILE", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(help="Write the measured calls here.", metavar="FILE.jsonl.gz", show_default=False)
    ],
    stop_after: Annotated[str, typer.Option(help="Stop after this long.", metavar="TIME")] = "8m",
    workers: Annotated[int, typer.Option(help="How many processes share the GPU.", metavar="N", min=1)] = 12,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="Measure at most this many calls of the list.", metavar="N",
                                 min=1, show_default="all")
    ] = None,
    tensor_limit: Annotated[
        str, typer.Option(help="Skip calls whose input, output and filter take more together.", metavar="SIZE")
    ] = "1300MB",
    device: Annotated[str, typer.Option(help="The GPU, as PyTorch names it.", metavar="NAME")] = "cuda",
) -> None:  # fmt: skip
    """Measure on a GPU what convolution calls ask of PyTorch's allocator.

    Examples:

      ullage convolutions measure tasks.json.gz --out measured.jsonl.gz --workers 4
    """
    import torch

    from ullage.research.cudnn_tables.measure import MeasuringOptions, measure_list

    check_file(out)
    if not torch.cuda.is_available():
        raise UllageError("needed a GPU to measure convolutions on; PyTorch finds none")
    size = parse_bytes(tensor_limit)
    measure_list(MeasuringOptions(tasks, out, parse_duration(stop_after), workers, limit, size, device))


@convolutions.command()
def fit(
    measured: Annotated[
        list[Path], typer.Argument(help="Files of 'ullage convolutions measure', or with --trials of 'ullage measure "
                                   "cudnn'.", metavar="FILE", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the table and the trees into this folder.", metavar="FOLDER")
    ] = None,
    describe: Annotated[
        str | None,
        typer.Option(
            help="What was measured, as JSON: gpu, compute_capability, multiprocessors, versions.", metavar="JSON"
        ),
    ] = None,
    trees: Annotated[int, typer.Option(help="How many decision trees vote.", metavar="N", min=1)] = 3,
    leaves: Annotated[int, typer.Option(help="How many leaves a tree has, at most.", metavar="N", min=2)] = 12_000,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Fit without every seventh layer, or with --trials family of layers, and print how well those are "
            "predicted.",
        ),
    ] = False,
    trials: Annotated[
        bool, typer.Option("--trials", help="Fit what cudnn.benchmark tries, instead of what cuDNN chooses without it.")
    ] = False,
    add: Annotated[
        bool,
        typer.Option(
            "--add",
            help="With --trials: add trees to those in the folder. All of them vote.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Fit what estimates know of cuDNN's workspaces: a table of measured calls, and trees for all others.

    Needs scikit-learn.

    Examples:

      ullage convolutions fit measured.jsonl.gz --out tables --describe '{"gpu": "NVIDIA H200"}'

      ullage convolutions fit measured.jsonl.gz --held-out

      ullage convolutions fit plans.jsonl --trials --out tables --describe '{"gpu": "NVIDIA H200"}'
    """
    from ullage.research.cudnn_tables import table
    from ullage.research.cudnn_tables import trials as tried
    from ullage.virtual.kernels.cudnn.workspaces import TRIAL_TREES

    described = _described(describe)
    if add and (out is None or not trials or held_out):
        raise InvalidValue("--add needs --trials and --out")
    if add and out is not None and not (out / TRIAL_TREES).is_file():
        raise InvalidValue(f"--add needs a folder with {TRIAL_TREES}, as --trials without --add writes it; found {out}")
    if not held_out and (out is None or (described is None and not add)):
        raise InvalidValue("needed --out and --describe, or --held-out")
    found: dict[Any, Any] = {}
    for path in measured:
        if not path.is_file():
            raise InvalidValue(f"cannot read {path}: no such file")
        found |= tried.asked_problems(path) if trials else table.measured_problems(path)
    if not found:
        raise InvalidValue(f"no measured convolution in {', '.join(map(str, measured))}")
    if held_out:
        (tried.evaluate_held_out if trials else table.evaluate_held_out)(found, trees, leaves, print)
    elif add and out is not None:
        tried.add_trees(found, out, trees, leaves, print)
    elif out is not None and described is not None:
        (tried.write_fit if trials else table.write_fit)(found, out, described, trees, leaves, print)


def _described(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"--describe: needed JSON; {error}") from None
    if not isinstance(value, dict):
        raise InvalidValue('--describe: needed a JSON object, such as \'{"gpu": "NVIDIA H200"}\'')
    return value
