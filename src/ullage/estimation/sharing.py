"""`ullage.share`: the speed of jobs that share a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.estimation.asking import estimate
from ullage.estimation.result import Estimate
from ullage.hardware import GPU, default_gpu
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import Function, Script
from ullage.jobs.model import Model
from ullage.performance.result import Utilization
from ullage.performance.sharing import Sharing, share_of

Shared = str | Path | Function | Model | Script | Estimate | Utilization


def share(jobs: Sequence[Shared], *, gpu: str | GPU | None = None, how: str = "mps") -> Sharing:
    """Predict how fast jobs run when they share a GPU, and whether they fit. No GPU is needed.

    Args:
        jobs: At least two. Each is what `ullage.estimate` takes, or an `Estimate`, or a `Utilization`.
        gpu: As in `ullage.estimate`. Default: the GPU of the estimates among the jobs.
        how: `"mps"`, `"time-slicing"` or `"mig"`; `"mig:2g.35gb"` names the instance that each job gets.

    Returns:
        A `Sharing`; `print` shows it as a report.

    >>> one = estimate(Model("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64]), gpu="H200")
    >>> share([one, one], how="mps").throughput > 1
    True
    """
    if isinstance(jobs, str | Path | Estimate | Utilization) or len(jobs) < 2:
        raise InvalidValue("jobs must be at least two that share a GPU, got one")
    named = {job.gpu for job in jobs if isinstance(job, Estimate | Utilization)}
    card = find_gpu(gpu or (min(named) if named else default_gpu()))
    if others := named - {card.name}:
        raise InvalidValue(f"all estimates must be for {card.name}, got one for {min(others)}")
    answers = [job if isinstance(job, Estimate | Utilization) else estimate(job, gpu=card) for job in jobs]
    memory = [answer.bound for answer in answers if isinstance(answer, Estimate)]
    alone = [_alone(answer) for answer in answers]
    sharing = share_of(alone, card, how, memory if len(memory) == len(alone) else None)
    names = [answer.source if isinstance(answer, Estimate) else None for answer in answers]
    return replace(sharing, jobs=[replace(job, name=name) for job, name in zip(sharing.jobs, names, strict=True)])


def _alone(answer: Estimate | Utilization) -> Utilization:
    if isinstance(answer, Utilization):
        return answer
    if answer.utilization is None:
        raise InvalidValue(
            f"the time of a step of {answer.source or 'a job'} must be known, but no complete step was seen "
            f"(the estimator was {answer.estimator})"
        )
    return answer.utilization
