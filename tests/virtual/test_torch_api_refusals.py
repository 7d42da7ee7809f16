"""What cannot be followed is refused in a sentence that names it."""

import pytest
import torch

from ullage.errors import UnsupportedOperation
from ullage.virtual import virtual_gpu


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def compile_extension():
    from torch.utils.cpp_extension import load

    load("norms", ["source.cu"]).forward(torch.ones(2, device="cuda"))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.cuda.memory.CUDAPluggableAllocator("a.so", "take", "give"), "CUDAPluggableAllocator"),
        (compile_extension, "norms.forward, a compiled extension: .* register_fake"),
    ],
)
def test_it_is_refused_by_name(gpu, call, name):
    with pytest.raises(UnsupportedOperation, match=name):
        call()


def test_operator_that_writes_what_it_is_given_is_passed_over(gpu):
    """As RWKV calls its kernels: outputs are made before, and nothing is returned."""
    from torch.utils.cpp_extension import load

    load("wind", ["source.cu"], is_python_module=False)
    x, out = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    torch.ops.wind.forward(x, out)
    assert any("wind.forward, a compiled extension, was skipped" in note for note in gpu.notes)
    with pytest.raises(UnsupportedOperation, match="wind.forward"):
        x = torch.ops.wind.forward(x, out)
