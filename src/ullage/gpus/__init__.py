"""What a GPU is: a catalogue from Pascal to Blackwell, one's own by a TOML file, this machine's by NVML.

- `gpu("A100-40GB")`: one GPU, by nearly any way to write its name
- `gpus()`: all of them; `own_gpus()`: those in `$ULLAGE_HOME/gpus`
- `select_gpus("all")`: those to compare
- `gpu_list("4xA100-40GB")`: several
- `local_gpus()`: those of this machine
"""

from __future__ import annotations

import sys

from ullage import Room
from ullage.gpus.card import GPU, generation_of
from ullage.gpus.catalogue import gpu, gpu_list, gpus, own_gpus, select_gpus
from ullage.gpus.local import local_gpus

__all__ = ["GPU", "generation_of", "gpu", "gpu_list", "gpus", "local_gpus", "own_gpus", "select_gpus"]

sys.modules[__name__].__class__ = Room
