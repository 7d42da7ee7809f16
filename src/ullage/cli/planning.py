"""`ullage plan`: compares numbers of GPUs and strategies for a job: which fit, and which is fastest."""

import json
from typing import Annotated, Any

from rich.console import Console

from ullage.cli import completion
from ullage.cli.options import (
    FOLLOW_OPTIONS,
    MODEL_OPTIONS,
    NETWORK_OPTIONS,
    RANKS,
    Json,
    ScriptArguments,
    Source,
    option,
    request_from,
    with_options,
)
from ullage.cli.progress import following
from ullage.units import GIB

_GPUS = "GPUs: 1..64xH100 (powers of two, eight per machine), 8xA100-80GB, or 2x8xH100 (machines, GPUs in each)."
_WAYS = "Only these strategies, such as ddp,fsdp2,tp,pp."
_MEMORY_OF_A_ROW = 4 * GIB


@with_options(NETWORK_OPTIONS, FOLLOW_OPTIONS, MODEL_OPTIONS)
def plan(
    source: Source,
    args: ScriptArguments = None,
    gpus: Annotated[str, option(_GPUS, "--gpus GPUS", panel=RANKS, complete=completion.clusters)] = "1..8xH200",
    parallel: Annotated[
        str | None, option(_WAYS, "NAME", default="all", panel=RANKS, complete=completion.several_parallel)
    ] = None,
    global_batch: Annotated[
        int | None,
        option("Samples per step over all GPUs, for a model.", "N", min=1, default="--batch-size on each", panel=RANKS),
    ] = None,
    no_checkpointing: Annotated[
        bool, option("Leave out rows with checkpointing.", "--no-checkpointing", panel=RANKS)
    ] = False,
    workers: Annotated[
        int | None, option("Maximum number of concurrent estimates.", "N", min=1, default="by cores and memory")
    ] = None,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Compare ways to spread a job across GPUs.

    Each row of the table estimates one strategy on one GPU count, by running PyTorch's own code as one rank of N. A
    model by name gets rows for DDP, FSDP2, tensor parallelism and a pipeline, each with and without activation
    checkpointing (only with it if you pass --checkpointing). Scripts keep their own strategy.

    Examples:

      ullage plan hf:Qwen/Qwen3-8B --gpus 2x8xA100-80GB --global-batch 256 --parallel fsdp2,tp
      ullage plan train.py --gpus 1..32xH100 -- --batch-size 8
    """
    from ullage.estimation.planning.asking import plan_request, read_gpus
    from ullage.estimation.planning.result import PlanRow, print_plan
    from ullage.sandbox.limits import room_for

    interconnect = options.pop("interconnect")
    read_gpus(gpus)
    checkpointing = False if no_checkpointing else True if options.pop("checkpointing") else None
    request = request_from(source, args, **options)
    begun: list[PlanRow] = []
    with following("estimating") as going:

        def show_row(row: PlanRow, done: int, total: int) -> None:
            if not begun:
                going.begin(source, total)
            begun.append(row)
            going.doing(row.in_words, done)

        answer = plan_request(
            request,
            gpus,
            parallel=None if parallel is None else [name.strip() for name in parallel.split(",")],
            checkpointing=checkpointing,
            global_batch=global_batch,
            interconnect=interconnect,
            progress=show_row,
            workers=workers or room_for(_MEMORY_OF_A_ROW),
        )
    if as_json:
        print(json.dumps(answer.to_dict()))
    else:
        print_plan(answer, Console())
