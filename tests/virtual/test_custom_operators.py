"""Operators that are not PyTorch's: written in Python they are run, compiled ones are known by their fake."""

import pytest
import torch
from torch import nn

from ullage.errors import UnsupportedOperation
from ullage.units import MIB
from ullage.virtual import virtual_gpu

LIBRARY = torch.library.Library("ullage_tests", "DEF")  # what a compiled extension declares with TORCH_LIBRARY


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


@torch.library.custom_op("ullage_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    larger = torch.empty(4 * x.numel(), device=x.device)
    del larger
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("ullage_tests::by_address", mutates_args=())
def by_address(x: torch.Tensor) -> torch.Tensor:
    raise OSError("libcuda.so.1: cannot open shared object file")


@torch.library.custom_op("ullage_tests::only_code", mutates_args=())
def only_code(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x.sum(0)


by_address.register_fake(lambda x: x.new_empty(x.shape[0]))

LIBRARY.define("scale(Tensor x, float factor) -> Tensor")
LIBRARY.impl("scale", lambda x, factor: torch.stack([x, x]).sum(0) * factor, "CUDA")
LIBRARY.define("compiled(Tensor x, Tensor? bias, int groups) -> (Tensor, Tensor)")
LIBRARY.define("with_fake(Tensor x, Tensor(a!) workspace) -> Tensor")
torch.library.register_fake("ullage_tests::with_fake", lambda x, workspace: x.new_empty(3, *x.shape), lib=LIBRARY)


def test_code_in_python_is_run_with_its_temporaries(gpu):
    x = torch.ones(MIB, device="cuda", requires_grad=True)
    twice(x).sum().backward()
    assert x.grad.shape == x.shape
    assert gpu.peak_allocated >= 20 * MIB  # 4 of the input, 16 of the temporary
    assert not gpu.notes


def test_code_needs_no_fake(gpu):
    one, other = only_code(torch.ones(4, 6, device="cuda"))
    assert one.is_cuda and one.shape == (4, 6) and other.shape == (6,)


def test_kernels_of_a_library_in_python_are_run(gpu):
    x = torch.ones(MIB, device="cuda")
    assert torch.ops.ullage_tests.scale(x, 2.0).shape == x.shape
    assert gpu.peak_allocated == 16 * MIB


def test_where_the_code_cannot_run_the_fake_gives_the_outputs(gpu):
    assert by_address(torch.ones(8, 2, device="cuda")).shape == (8,)
    assert any("by_address" in note and "libcuda" in note and "fake" in note for note in gpu.notes)
    assert [entry["what"] for entry in gpu.assumed] == ["operators that take no more than their outputs"]


def test_a_compiled_operator_is_known_by_its_fake(gpu):
    out = torch.ops.ullage_tests.with_fake(torch.ones(4, device="cuda"), torch.ones(2, device="cuda"))
    assert out.is_cuda and out.shape == (3, 4)
    assert any("with_fake" in note for note in gpu.notes)


def test_one_without_a_fake_is_named_with_the_line_that_helps(gpu):
    with pytest.raises(UnsupportedOperation, match="ullage_tests.compiled") as raised:
        torch.ops.ullage_tests.compiled(torch.ones(4, device="cuda"), None, 1)
    line = 'torch.library.register_fake("ullage_tests::compiled")(lambda x, bias, groups: (torch.empty_like(x), '
    assert line in str(raised.value)


def test_on_the_cpu_an_operator_is_itself(gpu):
    assert twice(torch.ones(3)).tolist() == [2, 2, 2]


def test_a_layer_with_one_trains(gpu):
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    twice(layer(torch.ones(2, 8, device="cuda"))).sum().backward()
    optimizer.step()
    assert layer.weight.grad.shape == (8, 8)


def test_an_extension_that_is_wrapped_is_known_by_its_fake(gpu):
    from torch.utils.cpp_extension import load_inline

    extension = load_inline("norms", cpp_sources="", cuda_sources="...", functions=["forward"])

    @torch.library.custom_op("ullage_tests::norm", mutates_args=())
    def norm(x: torch.Tensor) -> torch.Tensor:
        return extension.forward(x)

    norm.register_fake(lambda x: x.new_empty(x.shape[0]))
    assert norm(torch.ones(5, 2, device="cuda")).shape == (5,)
    assert any("norms.forward" in note for note in gpu.notes)


def test_a_compiled_apex_optimizer_step_requests_no_memory(gpu):
    from torch.utils.cpp_extension import load

    extension = load(name="fused_adam", sources=["multi_tensor_adam.cu"])
    lists = [[torch.zeros(1024, device="cuda")] for _ in range(4)]
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    extension.multi_tensor_adam(65536, flag, lists, 1e-3, 0.9, 0.999)
    assert torch.cuda.max_memory_allocated() == 4 * 4096 + 512
    with pytest.raises(UnsupportedOperation, match="compiled extension"):
        extension.multi_tensor_l2norm(65536, flag, lists)
