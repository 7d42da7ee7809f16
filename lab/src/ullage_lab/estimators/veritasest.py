"""`veritasest`: the forerunner of xMem by the same authors, for convolutional networks.

After Shi and Elkhatib, "Accurate GPU Memory Prediction for Deep Learning Jobs through Dynamic Analysis",
arXiv:2504.03887. Its steps (data analysis, data linking, sequence orchestration) are those that xMem was made of, so
the figure for a convolutional network is the same; the paper covers only such networks, and all others are refused
here.
"""

import torch
from torch import nn

from ullage.errors import UllageError
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.jobs.sources.build import build
from ullage_lab.estimators.xmem import estimator as xmem


def supports(request: JobRequest) -> str | None:
    """Return why a job is not supported, or `None`: xMem's reason, or a network without convolutions.

    >>> supports(JobRequest(Model("mlp:x", settings={"widths": [8, 4]}, batch_size=2)))
    'its paper covers convolutional networks; this model has no convolution'
    """
    reason = xmem.supports(request)
    if reason is not None:
        return reason
    if request.model is None:
        return None  # the model of a function is known only when it runs
    return _why_not_convolutional(request.model)


def _why_not_convolutional(configuration: Model) -> str | None:
    covers = "its paper covers convolutional networks; "
    if configuration.source == "hf":
        return covers + "transformers models are xMem's addition"
    try:
        convolutions, attention = _layers(configuration)
    except UllageError:
        return None  # the run itself will report the model's error
    if attention:
        return f"{covers}this model has attention ({attention})"
    return None if convolutions else covers + "this model has no convolution"


def _layers(configuration: Model) -> tuple[bool, str | None]:
    """Return whether there are convolutions, and the name of the first kind of attention."""
    built = _built(configuration)
    kinds = [type(module) for module in built.modules()]
    convolutions = any(issubclass(kind, nn.Conv1d | nn.Conv2d | nn.Conv3d) for kind in kinds)
    attention = next((kind.__name__ for kind in kinds if "attention" in kind.__name__.casefold()), None)
    return convolutions, attention


def _built(configuration: Model) -> nn.Module:
    """Build the model without its weights, or with them if the model reads values while it is built."""
    try:
        with torch.device("meta"):
            return build(configuration)
    except (RuntimeError, NotImplementedError):
        return build(configuration)


@estimator(
    "veritasest",
    title="the forerunner of xMem, for convolutional networks",
    source="Shi, Elkhatib: Accurate GPU Memory Prediction for Deep Learning Jobs through Dynamic Analysis, 2025 "
    "(arXiv:2504.03887)",
    needs="the training code of a convolutional network, time and RAM for three steps on the CPU",
    supports=supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate by three steps on the CPU, as xMem does."""
    return xmem.estimate_by_cpu_run("veritasest", request, gpu)
