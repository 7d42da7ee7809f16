"""`ullage diff`: the first request in which a virtual run differs from a recorded one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ullage.errors import UllageError, UnknownName


def diff(
    row: Annotated[str, typer.Argument(help="The id of a measured run.")],
    truth: Annotated[Path, typer.Option(help="Measured runs: a JSONL file; histories lie beside it.")],
    gpu: Annotated[str, typer.Option(help="The GPU it was measured on.")] = "H200",
    around: Annotated[int, typer.Option(help="How many requests to show before and after.", min=1)] = 6,
) -> None:
    """Show the first request in which the virtual run differs from the recorded one, and who asked.

    Example: ullage diff d0149 --truth h200_train_steps.jsonl
    """
    from ullage.measure.differences import first_difference, recorded_requests, virtual_requests
    from ullage.workload import Configuration, read_rows, train

    rows = {str(line.get("id")): line for line in read_rows(truth)}
    if row not in rows:
        raise UnknownName("measured run", row, rows)
    history = rows[row].get("events")
    if not history:
        with_history = [name for name, line in rows.items() if line.get("events")]
        raise UllageError(
            f"run {row} has no recorded history; {len(with_history)} runs have: {', '.join(with_history[:8])} ..."
        )
    configuration = Configuration.from_row(rows[row])
    recorded = recorded_requests(truth.parent / history)
    virtual = virtual_requests(lambda: train(configuration), gpu)
    found = first_difference(recorded, virtual, around)
    print(f"{rows[row]['model']}: {len(recorded):,} requests and frees recorded, {len(virtual):,} on the virtual GPU")
    print(found if found is not None else "no difference")
