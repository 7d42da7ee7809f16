"""The step of a workload, whatever the user gave: a model's name, a function or a script."""

from __future__ import annotations

from ullage.errors import InvalidValue
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.workload import Workload
from ullage.performance.step import StepCalls


def step_of(workload: Workload, gpu: str | GPU = "H200") -> StepCalls:
    """Follow a workload on a virtual GPU and return the calls of a steady training step.

    >>> from ullage.jobs import Configuration
    >>> step = step_of(Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2)))
    >>> step.steady, step.counts()["aten.addmm.default"]
    (True, 1)

    Not covered: steps that never repeat; the last one is returned then, and `steady` is false.
    """
    spec = find_gpu(gpu)
    if workload.script is not None:
        from ullage.estimation.scripts.parent import step_of_script

        return StepCalls(**step_of_script(workload.script, workload.args, spec, workload.run))
    from ullage.estimation.on_virtual_gpu import follow_function, follow_model

    if workload.configuration is not None:
        return StepCalls(**follow_model(workload.configuration, spec, workload.run).calls.step())
    if workload.function is not None:
        return StepCalls(**follow_function(workload.function, spec, workload.run)[0].calls.step())
    raise InvalidValue("a summary has no code to follow; needed a model's name, a function or a script")
