"""`horus`: the formula of Yeung et al. over a model summary.

Memory = (B·A + P) + B·G + d: batch size B, activations A of one sample, parameters P, gradients G, overhead d. As
arXiv 2602.17817 evaluates it, G is the number of parameters (so gradients count once a sample: why it is far over
on wide layers), a number takes 4 bytes, and d is 800 MiB for their real models and 0 for their fully connected ones.
"""

import re
import time

from ullage.estimation.estimators.answer import answer, read_options, summary_with_batch
from ullage.estimation.estimators.printed_summary import ModelSummary
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.summary import summarize
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest

BYTES = 4
OVERHEAD_MIB = 800

# Layers that the authors' parser counted, found by solving their published figures for A: it ignored dropout,
# stochastic depth, sigmoid, and pooling other than adaptive.
_COUNTED = re.compile(
    r"(Lazy)?Conv\w*\d[dD]|\w*Norm\w*|\w*Linear\w*|Embedding|AdaptiveAvgPool\dd|LSTM|GRU|RNN|MultiheadAttention"
    r"|\w*(ReLU|ReLU6|ELU|SiLU|GELU|GELUActivation|Tanh|Hardswish|Mish)"
)


def formula(batch: int, activations: int, parameters: int, overhead: int = 0) -> dict[str, int]:
    """Return the terms of the formula, in bytes."""
    return {
        "parameters": BYTES * parameters,
        "gradients": BYTES * batch * parameters,
        "activations": BYTES * batch * activations,
        "context": overhead,
    }


def activations(summary: ModelSummary) -> int:
    """Return the output values of the counted layers for one sample."""
    return sum(layer.outputs for layer in summary.layers if _COUNTED.fullmatch(layer.kind))


def _supports(request: JobRequest) -> str | None:
    if request.kind in ("function", "script"):
        return f"it needs a model summary; this is a {request.kind}"
    return None


@estimator(
    "horus",
    title="a formula over the model summary",
    source="Yeung et al., Horus, IEEE TPDS 33(1), 2022: memory formula, as evaluated in arXiv 2602.17817",
    needs="a model summary and the batch size",
    supports=_supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate a model by its name or from the text of a summary."""
    begin = time.perf_counter()
    options = read_options("horus", request.options, {"overhead_mib": OVERHEAD_MIB})
    if request.summary is not None:
        summary = summary_with_batch(request.summary)
    else:
        assert request.model is not None
        summary = summarize(request.model, gpu)
    parts = formula(summary.batch_size or 1, activations(summary), summary.parameters, options["overhead_mib"] << 20)
    notes = [
        "the figure is Horus's memory of the process; it knows nothing of optimizer, precision, allocator or kernels",
        f"overhead d = {options['overhead_mib']} MiB, as its evaluators take it; change it: --set horus.overhead_mib=0",
        *summary.notes,
    ]
    return answer("horus", gpu, "process", parts, seconds=time.perf_counter() - begin, notes=notes)
