"""Settings of the allocator that a script makes itself: PyTorch reads PYTORCH_ALLOC_CONF when it first uses the GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ullage.allocator import AllocatorConfig, AllocatorConfigError
from ullage.allocator.config import ENVIRONMENT_NAMES

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


def follow(gpu: VirtualGPU) -> Callable[[], None]:
    """Take over what the process puts into its environment from now on; returns what ends it."""
    watching = [True]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.putenv" and watching and os.fsdecode(args[0]) in ENVIRONMENT_NAMES:
            try:
                gpu.configure(AllocatorConfig.parse(os.fsdecode(args[1])))
            except AllocatorConfigError as error:
                gpu.note("settings", f"{os.fsdecode(args[0])} was not understood: {error}")

    sys.addaudithook(audit)  # which cannot be removed
    return watching.clear
