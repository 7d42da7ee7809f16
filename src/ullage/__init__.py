"""Ullage estimates how much GPU memory a training job takes, before it runs and without a GPU.

    import ullage

    e = ullage.estimate("torchvision:resnet50", batch_size=64, gpu="A100-40GB")
    e = ullage.estimate(train, gpu="H200")      # any function that trains on "cuda"
    print(e)

    ullage.estimators()                         # the names; estimate(..., estimator="horus")

    ullage.utilization("torchvision:resnet50", batch_size=64)   # how long a step takes, how busy it keeps the GPU

    ullage.max_batch("timm:vit_small_patch16_224", gpu="RTX-4090")

    print(ullage.plan("hf:Qwen/Qwen3-8B", "1..64xH100", batch_size=4))     # on how many GPUs, and spread how

    ullage.share(["train.py", "torchvision:resnet50"], gpu="H200", how="mps")     # who can share a GPU

    ullage.Client().submit(["python", "train.py"])      # to the daemon that `ullage serve` started

    ullage.simulate("jobs.csv", gpus="4xA100-40GB", policy="magm").figures      # what would become of these jobs

    with ullage.virtual_gpu("A100-40GB") as gpu:
        train()
    print(gpu.peak_reserved)

The names in `__all__` are public; everything else may change. They are loaded on first use, because importing PyTorch
takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ullage.errors import UllageError
    from ullage.estimation.asking import estimate, utilization
    from ullage.estimation.estimators.registry import estimators
    from ullage.estimation.largest_batch import MaxBatch, max_batch
    from ullage.estimation.planning.asking import plan
    from ullage.estimation.planning.result import GPUPlan
    from ullage.estimation.result import Estimate
    from ullage.estimation.sharing import share
    from ullage.hardware import GPU, gpu, gpus
    from ullage.manager.client import Client
    from ullage.manager.simulation.asking import replay, simulate, sweep
    from ullage.manager.simulation.formats.own import write_trace
    from ullage.manager.simulation.generator import generate_trace
    from ullage.manager.simulation.reading import read_trace
    from ullage.manager.simulation.result import SimulationResult
    from ullage.manager.simulation.sweep import SweepRow
    from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
    from ullage.performance.result import Utilization
    from ullage.performance.sharing import Sharing
    from ullage.virtual import VirtualGPU, virtual_gpu

_HOMES = {
    "Client": "ullage.manager.client",
    "Estimate": "ullage.estimation.result",
    "GPU": "ullage.hardware",
    "GPUPlan": "ullage.estimation.planning.result",
    "JobKind": "ullage.manager.simulation.trace",
    "JobTrace": "ullage.manager.simulation.trace",
    "MaxBatch": "ullage.estimation.largest_batch",
    "Sharing": "ullage.performance.sharing",
    "SimulationResult": "ullage.manager.simulation.result",
    "SweepRow": "ullage.manager.simulation.sweep",
    "TraceJob": "ullage.manager.simulation.trace",
    "UllageError": "ullage.errors",
    "Utilization": "ullage.performance.result",
    "VirtualGPU": "ullage.virtual",
    "estimate": "ullage.estimation.asking",
    "estimators": "ullage.estimation.estimators.registry",
    "generate_trace": "ullage.manager.simulation.generator",
    "gpu": "ullage.hardware",
    "gpus": "ullage.hardware",
    "max_batch": "ullage.estimation.largest_batch",
    "plan": "ullage.estimation.planning.asking",
    "read_trace": "ullage.manager.simulation.reading",
    "replay": "ullage.manager.simulation.asking",
    "share": "ullage.estimation.sharing",
    "simulate": "ullage.manager.simulation.asking",
    "sweep": "ullage.manager.simulation.asking",
    "utilization": "ullage.estimation.asking",
    "virtual_gpu": "ullage.virtual",
    "write_trace": "ullage.manager.simulation.formats.own",
}

__all__ = [
    "GPU",
    "Client",
    "Estimate",
    "GPUPlan",
    "JobKind",
    "JobTrace",
    "MaxBatch",
    "Sharing",
    "SimulationResult",
    "SweepRow",
    "TraceJob",
    "UllageError",
    "Utilization",
    "VirtualGPU",
    "__version__",
    "estimate",
    "estimators",
    "generate_trace",
    "gpu",
    "gpus",
    "max_batch",
    "plan",
    "read_trace",
    "replay",
    "share",
    "simulate",
    "sweep",
    "utilization",
    "virtual_gpu",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = found = getattr(importlib.import_module(_HOMES[name]), name)
        return found
    raise AttributeError(f"module 'ullage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
