"""`ullage plan`: on how many GPUs, and spread how, a job fits, and what is fastest."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.options import (
    RANKS,
    FollowOptions,
    InterconnectNames,
    Json,
    ModelOptions,
    ScriptArguments,
    Source,
    target_of,
    with_options,
)
from ullage.units import GIB

_MEMORY_OF_A_ROW = 4 * GIB


@with_options(FollowOptions, ModelOptions)
def plan(
    source: Source,
    args: ScriptArguments = None,
    gpus: Annotated[
        str, typer.Option("--gpus", help="The GPUs: 1..64xH100 (powers of two, eight in a machine), 8xA100-80GB, "
                          "or 2x8xH100 (machines, GPUs in each).", metavar="GPUS", rich_help_panel=RANKS,
                          autocompletion=completion.clusters)
    ] = "1..8xH200",
    parallel: Annotated[
        str | None, typer.Option("--parallel", help="Only these ways to spread a model, with commas: ddp,fsdp2,tp,pp.",
                                 metavar="NAME", show_default="all", rich_help_panel=RANKS,
                                 autocompletion=completion.several_parallel)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples in a step over all GPUs, for a model.", metavar="N", min=1,
                                 show_default="--batch-size on each", rich_help_panel=RANKS)
    ] = None,
    no_checkpointing: Annotated[
        bool, typer.Option("--no-checkpointing", help="Leave out the rows with activation checkpointing.",
                           rich_help_panel=RANKS)
    ] = False,
    interconnect: InterconnectNames = None,
    workers: Annotated[
        int | None, typer.Option(help="How many rows are estimated at once.", metavar="N", min=1,
                                 show_default="as many as there are cores and memory for")
    ] = None,
    as_json: Json = False,
    **options: Any,
) -> None:  # fmt: skip
    """Plan a job of many GPUs: on how many, and spread how, it fits, and what is fastest.

    Each row of the table is an estimate: PyTorch's own code runs as one rank of so many. A model by name is spread as
    DDP, FSDP2, tensor parallelism and a pipeline, each with and without activation checkpointing (only with it, if you
    say --checkpointing). A script has its own way to use many GPUs, so only their number changes.

    Examples:

      ullage plan hf:Qwen/Qwen3-8B --gpus 1..64xH100 --batch-size 4 --sequence-length 4096
      ullage plan hf:Qwen/Qwen3-8B --gpus 2x8xA100-80GB --global-batch 256 --parallel fsdp2,tp
      ullage plan timm:vit_large_patch16_224 --gpus 1..8xRTX-4090 --precision amp_bf16 --interconnect pcie4
      ullage plan train.py --gpus 1..32xH100 -- --batch-size 8
    """
    from rich.console import Console

    from ullage.cli.progress import following
    from ullage.estimation.planning.asking import plan as make_plan
    from ullage.estimation.planning.clusters import read_gpus
    from ullage.estimation.planning.result import PlanRow, print_plan
    from ullage.sandbox.limits import room_for

    read_gpus(gpus)
    checkpointing = False if no_checkpointing else True if options.pop("checkpointing") else None
    target = target_of(source, args, **options)
    begun: list[PlanRow] = []
    with following("estimating") as going:

        def told(row: PlanRow, done: int, total: int) -> None:
            if not begun:
                going.begin(source, total)
            begun.append(row)
            going.doing(row.in_words, done)

        found = make_plan(
            target.source, gpus, parallel=None if parallel is None else [name.strip() for name in parallel.split(",")],
            checkpointing=checkpointing, global_batch=global_batch, interconnect=interconnect, progress=told,
            workers=workers or room_for(_MEMORY_OF_A_ROW), **target.options,
        )  # fmt: skip
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        print_plan(found, Console())
