"""The step of any request: a model's name, a function or a script."""

from ullage.errors import InvalidValue
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest
from ullage.performance.step import StepCalls


def step_of(request: JobRequest, gpu: str | GPU = "H200") -> StepCalls:
    """Follow a request on a virtual GPU and return the calls of a steady training step.

    If steps never repeat, returns the last one, with `steady` false.
    """
    spec = find_gpu(gpu)
    if request.script is not None:
        from ullage.estimation.scripts.parent import step_of_script

        return StepCalls(**step_of_script(request, spec))
    from ullage.estimation.on_virtual_gpu import follow_function, follow_model

    if request.model is not None:
        return StepCalls(**follow_model(request.model, spec, request).calls.step())
    if request.function is not None:
        return StepCalls(**follow_function(request.function, spec, request)[0].calls.step())
    raise InvalidValue("a summary has no code to follow; give a model's name, a function or a script")
