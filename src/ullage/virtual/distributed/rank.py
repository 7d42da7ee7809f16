"""The number of this process among a machine's ranks, and the number of these ranks: each has a GPU."""

import os

# For launchers that do not set torchrun's variables.
LOCAL_RANK, LOCAL_SIZE = "ULLAGE_LOCAL_RANK", "ULLAGE_LOCAL_WORLD_SIZE"


def local_rank() -> int:
    """Return the number of this rank on its machine, which is also that of its GPU."""
    return int(os.environ.get(LOCAL_RANK) or os.environ.get("LOCAL_RANK") or 0)


def device_count() -> int:
    """Return the number of GPUs of this machine: one for each rank that a launcher reports."""
    return max(1, int(os.environ.get(LOCAL_SIZE) or os.environ.get("LOCAL_WORLD_SIZE") or 1))
