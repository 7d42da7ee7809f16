"""`ullage`: the code of the workload itself, on a virtual GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate, of_ranks
from ullage.estimation.scripts.parent import DEFAULT_TIMEOUT, SeenOfRanks, estimate_script
from ullage.hardware import GPU
from ullage.jobs.parallel import PP
from ullage.jobs.workload import RunOptions, Workload
from ullage.sandbox.gc_control import importing


def _supports(workload: Workload) -> str | None:
    if workload.kind == "summary":
        return "a summary has no code to run; horus reads one"
    return None


@estimator(
    "ullage",
    title="the unmodified code on a virtual GPU",
    source="this project, docs/explanation/design.md",
    needs="the code; no GPU",
    supports=_supports,
)
def run(workload: Workload, gpu: GPU) -> Estimate:
    """Run the workload on a virtual GPU and say how much memory it took.

    A script runs in a process of its own, a model in the standard training loop, a function as it is. A function is
    stopped after at least `steps` optimizer steps, as soon as an iteration asks for the same memory as the one before
    (after 30 steps at the latest). A workload that runs out of memory is run once more without a limit, to say how
    much it would need.

    >>> from ullage.hardware import gpu
    >>> from ullage.jobs.configuration import Configuration
    >>> run(Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2)), gpu("T4")).figure_kind
    'process'

    Not covered: code after the step at which a function is stopped (validation, a second phase); use `steps=None`.
    """
    if workload.options:
        raise InvalidValue(f"the estimator ullage has no options of its own; found {', '.join(workload.options)}")
    how = workload.run
    if how.world_size is None or workload.configuration is not None and how.spread != PP:
        return _one(workload, gpu, how, None)
    return _ranks(workload, gpu)


def _ranks(workload: Workload, gpu: GPU) -> Estimate:
    """The estimate for the rank that takes most, of those that were named, or that seem to have parts of their own."""
    how, seen = workload.run, SeenOfRanks()
    if workload.configuration is not None:
        seen.apart = list(range(how.world_size or 1))
    as_rank = [replace(how, rank=number, ranks=()) for number in how.ranks or (how.rank,)]
    found = {each.rank: _one(workload, gpu, each, seen) for each in as_rank}
    if how.ranks or how.rank or not seen.apart:
        return of_ranks(found)
    stages = seen.apart
    among = {*stages[:2], stages[-1]}
    if workload.configuration is None:  # a model by name has its stages from us: none is larger than the second one
        among.add(stages[len(stages) // 2])
    while missing := sorted(among - set(found)):
        for number in missing:
            try:
                found[number] = _one(workload, gpu, replace(how, rank=number), seen)
            except ScriptFailed as error:
                reason = str(error).splitlines()[0]
                note = f"rank {number}, which may have another part of the model, was not followed: {reason}"
                return replace(found[0], notes=[note, *found[0].notes])
        inner = {found[number].breakdown.get("parameters") for number in among & set(stages[1:-1])}
        if len(inner) > 1:  # they are not alike
            among |= set(stages[:_MOST_STAGES])
    return of_ranks(found, like=_alike(stages, found))


_MOST_STAGES = 16  # that are followed


def _alike(stages: list[int], found: Mapping[int, Any]) -> dict[int, int]:
    """For stages that were not followed, the one before them that was: a later stage of the same layers has no more
    micro-batches under way. The last one stands for none.

    >>> _alike([0, 1, 2, 3, 4, 5, 6, 7], dict.fromkeys([0, 1, 4, 7]))
    {2: 1, 3: 1, 5: 4, 6: 4}
    """
    alike, before = {}, None
    for number in stages[1:-1]:
        if number in found:
            before = number
        elif before is not None:
            alike[number] = before
    return alike


def _one(workload: Workload, gpu: GPU, how: RunOptions, seen: SeenOfRanks | None) -> Estimate:
    if workload.script is not None:
        return estimate_script(
            workload.script, workload.args, module=how.module, gpu=gpu, steps=how.steps,
            timeout=DEFAULT_TIMEOUT if how.timeout is None else how.timeout, config=how.allocator_config,
            trace_file=how.trace_file, show_output=how.show_output, network=how.network, python=how.python,
            progress=how.progress, rank=how.as_rank, interconnect=how.interconnect,
            launcher=how.launcher, seen=seen,
        )  # fmt: skip
    with importing() if "torch" not in sys.modules else contextlib.nullcontext():
        from ullage.estimation.on_virtual_gpu import run_function, run_model  # PyTorch: a script's process has its own

    if workload.configuration is not None:
        return run_model(workload.configuration, gpu, how)
    assert workload.function is not None
    return run_function(workload.function, gpu, how)
