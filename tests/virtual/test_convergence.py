"""What happens once the requests of an iteration repeat."""

import pytest
import torch

from ullage.allocator import CachingAllocator, RequestLog
from ullage.units import MIB
from ullage.virtual.memory.tensors import DeviceMemory


def test_a_repetition_out_of_memory_fails_as_in_pytorch():
    memory = DeviceMemory(CachingAllocator(64 * MIB))
    requests = RequestLog()
    requests.ask(40 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        memory.repeat(requests, times=3, quiet=2)
