"""Ullage: how much GPU memory a training job will take, before it runs and without a GPU.

    import ullage

    e = ullage.estimate("torchvision:resnet50", batch_size=64, gpu="A100-40GB")
    e = ullage.estimate(train, gpu="H200")      # any function that trains on "cuda"
    print(e)

    ullage.estimators()                         # all that are there; estimate(..., estimator="horus")

    ullage.max_batch("timm:vit_small_patch16_224", gpu="RTX-4090")

    ullage.Client().submit(["python", "train.py"])      # to the daemon that `ullage serve` runs

    with ullage.virtual_gpu("A100-40GB") as gpu:
        train()
    print(gpu.peak_reserved)

The names below are the public ones; everything else may move. They are loaded on first use, because PyTorch takes a
second to import.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ullage.errors import UllageError
    from ullage.estimate import Estimate
    from ullage.estimate.max_batch import MaxBatch, max_batch
    from ullage.estimators.choice import estimate
    from ullage.estimators.registry import estimators
    from ullage.gpus import GPU, gpu, gpus
    from ullage.manager.public_client import Client
    from ullage.virtual import VirtualGPU, virtual_gpu

_HOMES = {
    "Client": "ullage.manager.public_client",
    "Estimate": "ullage.estimate",
    "GPU": "ullage.gpus",
    "MaxBatch": "ullage.estimate.max_batch",
    "UllageError": "ullage.errors",
    "VirtualGPU": "ullage.virtual",
    "estimate": "ullage.estimators.choice",
    "estimators": "ullage.estimators.registry",
    "gpu": "ullage.gpus",
    "gpus": "ullage.gpus",
    "max_batch": "ullage.estimate.max_batch",
    "virtual_gpu": "ullage.virtual",
}

__all__ = [
    "GPU",
    "Client",
    "Estimate",
    "MaxBatch",
    "UllageError",
    "VirtualGPU",
    "__version__",
    "estimate",
    "estimators",
    "gpu",
    "gpus",
    "max_batch",
    "virtual_gpu",
]


class Room(types.ModuleType):
    """A package that shares its name with a public function: `ullage.estimate` is both, and calling it calls that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_HOMES[name]), name)(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ullage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
