"""GPUs: the specification, the catalogue from Pascal to Blackwell, your own cards, and this machine's.

`gpu("A100-40GB")` finds one by nearly any spelling, `gpus()` lists all, `local_gpus()` asks NVML.
"""

from ullage.hardware.catalogue import gpus
from ullage.hardware.local import local_gpus
from ullage.hardware.lookup import default_gpu, default_gpu_note, gpu, gpu_list, own_gpus, select_gpus
from ullage.hardware.specification import GPU, generation_of

__all__ = [
    "GPU",
    "default_gpu",
    "generation_of",
    "gpu",
    "gpu_list",
    "gpus",
    "local_gpus",
    "default_gpu_note",
    "own_gpus",
    "select_gpus",
]
