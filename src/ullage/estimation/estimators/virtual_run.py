"""`ullage`: the workload's own code on a virtual GPU."""

from __future__ import annotations

from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import Workload, estimator
from ullage.estimation.result import Estimate
from ullage.estimation.running import estimate_configuration, estimate_function
from ullage.hardware import GPU


def _supports(workload: Workload) -> str | None:
    if workload.kind == "summary":
        return "a summary has no code to run; horus reads one"
    return None


@estimator(
    "ullage",
    title="the unmodified code on a virtual GPU",
    source="this project, docs/design.md",
    needs="the code; no GPU",
    supports=_supports,
)
def run(workload: Workload, gpu: GPU) -> Estimate:
    """Estimate on a virtual GPU.

    >>> from ullage.hardware import gpu
    >>> from ullage.workloads import Configuration
    >>> run(Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2)), gpu("T4")).figure_kind
    'process'
    """
    if workload.options:
        raise InvalidValue(f"the estimator ullage has no options of its own; found {', '.join(workload.options)}")
    if workload.configuration is not None:
        return estimate_configuration(workload.configuration, gpu=gpu, **workload.run)
    if workload.function is not None:
        return estimate_function(workload.function, gpu=gpu, **workload.run)
    from ullage.estimation.scripts.parent import estimate_script

    return estimate_script(str(workload.script), list(workload.args), gpu=gpu, **workload.run)
