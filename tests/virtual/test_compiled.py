"""torch.compile as it is: Dynamo, AOTAutograd and Inductor run, and what their program allocates is followed."""

import os
import sys

import pytest
import torch
from torch import nn

from ullage.virtual import virtual_gpu

pytest.importorskip("triton")
MIB = 1 << 20
L2 = 60 * MIB  # of an H200: so large is the buffer with which Inductor times kernels


def wave(x):
    return (x.sin() * x.cos()).exp() + 1


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def test_a_fused_function_takes_its_result_and_saves_its_input(gpu):
    x = torch.randn(64 * MIB, device="cuda", requires_grad=True)
    y = torch.compile(wave)(x)
    assert gpu.peak_allocated == 2 * 256 * MIB + L2  # eagerly there are four temporaries
    y.sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = torch.compile(wave)(x)
    assert torch.cuda.memory_allocated() - before == 0 or y is not None
    assert not gpu.notes


def test_what_was_compiled_is_forgotten_and_nothing_is_left_behind():
    before = dict(os.environ)
    for name, expected in (("H200", 60), ("A100-40GB", 40)):
        with virtual_gpu(name) as gpu:
            x = torch.zeros(MIB, device="cuda")
            torch.compile(wave)(x)
            assert gpu.peak_allocated == 8 * MIB + expected * MIB
    assert dict(os.environ) == before
    inductor = sys.modules["torch._inductor.config"]
    assert inductor.compile_threads != 1 or (os.cpu_count() or 1) == 1
