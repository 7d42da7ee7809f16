"""`ullage`: the code of the workload itself, on a virtual GPU."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate, of_ranks
from ullage.estimation.scripts.parent import DEFAULT_TIMEOUT, SeenOfRanks, estimate_script
from ullage.hardware import GPU
from ullage.isolation.collector import importing
from ullage.workloads.workload import RunOptions, Workload


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
    >>> from ullage.workloads.configuration import Configuration
    >>> run(Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2)), gpu("T4")).figure_kind
    'process'

    Not covered: code after the step at which a function is stopped (validation, a second phase); use `steps=None`.
    """
    if workload.options:
        raise InvalidValue(f"the estimator ullage has no options of its own; found {', '.join(workload.options)}")
    if workload.configuration is not None or workload.run.world_size is None:
        return _one(workload, gpu, workload.run, None)
    return _ranks(workload, gpu)


def _ranks(workload: Workload, gpu: GPU) -> Estimate:
    """The estimate for the rank that takes most, of those that were named, or that seem to have parts of their own."""
    how, seen = workload.run, SeenOfRanks()
    as_rank = [replace(how, rank=number, ranks=()) for number in how.ranks or (how.rank,)]
    found = {each.rank: _one(workload, gpu, each, seen) for each in as_rank}
    if how.ranks or how.rank or not seen.apart:
        return of_ranks(found)
    for number in sorted({*seen.apart[:2], seen.apart[-1]} - {0}):  # stages between take less than the second one
        try:
            found[number] = _one(workload, gpu, replace(how, rank=number), seen)
        except ScriptFailed as error:
            reason = str(error).splitlines()[0]
            note = f"rank {number}, which may have another part of the model, was not followed: {reason}"
            return replace(found[0], notes=[note, *found[0].notes])
    return of_ranks(found)


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
