"""Ullage estimates how much GPU memory a training job needs, before it runs and without a GPU.

    import ullage
    from ullage import Model, Script

    e = ullage.estimate("torchvision:resnet50", batch_size=64, gpu="A100-40GB")
    e = ullage.estimate(Model("hf:Qwen/Qwen3-8B", lora=16, quantize="nf4"), gpu="RTX-4090")
    e = ullage.estimate("train.py", args=["--epochs", "90"], gpu="A100-40GB")
    e = ullage.estimate(train, gpu="H200")      # any function that trains on "cuda"
    print(e)
    print(e.utilization)                        # how long a step takes, how busy it keeps the GPU

    ullage.max_batch("timm:vit_small_patch16_224", gpu="RTX-4090")

    print(ullage.plan("hf:Qwen/Qwen3-8B", "1..64xH100", batch_size=4))     # how many GPUs, which strategy

    ullage.share(["train.py", "torchvision:resnet50"], gpu="H200", how="mps")     # speed of jobs on one GPU

    with ullage.virtual_gpu("A100-40GB") as gpu:
        train()
    print(gpu.peak_reserved)

The names in `__all__` are public, and so are those of `ullage.manager` (`Client`) and `ullage.manager.simulation`
(`simulate`, `replay`, ...); everything else may change. They are loaded on first use, because importing PyTorch takes a
second.
"""

from typing import TYPE_CHECKING

from ullage.lazy import loaded_on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ullage.errors import UllageError as UllageError
    from ullage.estimation.asking import estimate as estimate
    from ullage.estimation.largest_batch import max_batch as max_batch
    from ullage.estimation.planning.asking import plan as plan
    from ullage.estimation.result import Estimate as Estimate
    from ullage.estimation.sharing import share as share
    from ullage.hardware import GPU as GPU
    from ullage.hardware import gpu as gpu
    from ullage.hardware import gpus as gpus
    from ullage.jobs.job import Ranks as Ranks
    from ullage.jobs.job import Script as Script
    from ullage.jobs.model import Model as Model
    from ullage.performance.cost import Training as Training
    from ullage.virtual import virtual_gpu as virtual_gpu

_LAZY_IMPORTS = {
    "Estimate": "estimation.result",
    "GPU": "hardware",
    "Model": "jobs.model",
    "Ranks": "jobs.job",
    "Script": "jobs.job",
    "Training": "performance.cost",
    "UllageError": "errors",
    "estimate": "estimation.asking",
    "gpu": "hardware",
    "gpus": "hardware",
    "max_batch": "estimation.largest_batch",
    "plan": "estimation.planning.asking",
    "share": "estimation.sharing",
    "virtual_gpu": "virtual",
}

__all__ = ["__version__", *_LAZY_IMPORTS]
__getattr__ = loaded_on_first_use(__name__, _LAZY_IMPORTS)


def __dir__() -> list[str]:
    return __all__
