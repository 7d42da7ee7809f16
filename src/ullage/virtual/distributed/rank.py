"""Which of a machine's ranks this process is, and how many there are: each has a GPU."""

import os

# For launchers that do not say it in torchrun's words.
LOCAL_RANK, LOCAL_SIZE = "ULLAGE_LOCAL_RANK", "ULLAGE_LOCAL_WORLD_SIZE"


def local_rank() -> int:
    """The number of this rank on its machine, and so that of its GPU."""
    return int(os.environ.get(LOCAL_RANK) or os.environ.get("LOCAL_RANK") or 0)


def device_count() -> int:
    """The GPUs of this machine: one for each rank that a launcher says it has."""
    return max(1, int(os.environ.get(LOCAL_SIZE) or os.environ.get("LOCAL_WORLD_SIZE") or 1))
