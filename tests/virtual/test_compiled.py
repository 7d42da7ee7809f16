"""torch.compile as it is: Dynamo, AOTAutograd and Inductor run, and what their program allocates is followed."""

import importlib
import os
import sys

import pytest
import torch

from ullage.virtual import virtual_gpu
from ullage_lab.networks.generated import transformer

MIB = 1 << 20
IS_TIMED_BY_TRITON = torch.__version__.startswith("2.6")
L2 = (256 if IS_TIMED_BY_TRITON else 60) * MIB  # of an H200: so large is the buffer with which Inductor times kernels


@pytest.fixture(scope="module", autouse=True)
def dynamo():
    pytest.importorskip("triton")
    importlib.import_module("torch._dynamo.device_interface")  # it keeps the functions that there are without a GPU


def wave(x):
    return (x.sin() * x.cos()).exp() + 1


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def test_a_fused_function_takes_its_result_and_keeps_its_input(gpu):
    x = torch.randn(64 * MIB, device="cuda", requires_grad=True)
    compiled = torch.compile(wave)
    told = []
    gpu.doing = told.append
    y = compiled(x)
    assert told == ["compiling wave", ""]
    assert gpu.peak_allocated == 2 * 256 * MIB + L2, gpu.notes  # eagerly the backward pass keeps four tensors more
    y.backward(torch.ones_like(y))
    assert torch.cuda.memory_allocated() == 3 * 256 * MIB and x.grad is not None
    del y
    before, requests = torch.cuda.memory_allocated(), len(gpu.memory.requests)
    compiled(x)  # is there already: neither compiled nor timed again
    assert gpu.memory.requests.sizes(requests) == [256 * MIB]
    assert torch.cuda.memory_allocated() == before
    assert [note for note in gpu.notes if "torch.compile" in note] == gpu.notes


def test_compiled_code_is_forgotten_without_a_trace():
    before = dict(os.environ)
    for name, expected in (("H200", 60), ("A100-40GB", 40)):
        with virtual_gpu(name) as gpu:
            x = torch.zeros(MIB, device="cuda")
            torch.compile(wave)(x)
            assert gpu.peak_allocated == 8 * MIB + (256 if IS_TIMED_BY_TRITON else expected) * MIB, gpu.notes
    assert dict(os.environ) == before
    inductor = sys.modules["torch._inductor.config"]
    assert inductor.compile_threads != 1 or (os.cpu_count() or 1) == 1


class Branching(torch.nn.Module):
    """A layer, a graph break and a loop."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)

    def forward(self, x):
        for _ in range(2):
            x = self.layer(x).relu()
        torch._dynamo.graph_break()
        return self.head(x)


def test_a_graph_that_was_given_up_is_noted(gpu):
    def reads_a_value(graph, inputs):
        raise torch._subclasses.fake_tensor.DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    torch.compile(wave, backend=reads_a_value)(torch.ones(8, device="cuda"))
    assert any("the eager code was followed: DataDependentOutput" in note for note in gpu.notes), gpu.notes


def test_a_compiled_model_inside_of_ddp(gpu):
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.compile(torch.nn.Linear(64, 64).cuda()), device_ids=[0])
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    assert not [note for note in gpu.notes if "torch.compile failed" in note]
    assert any(f"followed as PyTorch {torch.__version__} compiles it" in note for note in gpu.notes), gpu.notes


class Stack(torch.nn.Module):
    """Runs some of its layers, as models of transformers do: the slice is a list of modules, made in the pass."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x).relu()
        return x


def test_module_hooks_break_no_graph(gpu):
    model = torch.compile(Stack().cuda(), fullgraph=True)
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    assert not [note for note in gpu.notes if "torch.compile failed" in note]


def test_a_generated_network_is_compiled_like_any_other(gpu):
    """Its code lies beside what watches it, but it is the user's program."""
    model = transformer("encoder", 100, 16, size=32, layers=1, heads=2, middle=64).cuda()
    torch.compile(model)(torch.zeros(4, 16, dtype=torch.int64, device="cuda")).sum().backward()
    assert any("torch.compile was followed" in note for note in gpu.notes), gpu.notes


def test_recomputed_dropout_is_compiled(gpu):
    def block(x):
        return torch.nn.functional.dropout(wave(x) @ x, 0.1).relu()

    def recomputed(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()

    torch.compile(recomputed)(torch.ones(512, 512, device="cuda", requires_grad=True)).backward()
    assert any("torch.compile was followed" in note for note in gpu.notes), gpu.notes


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_model_trains_in_every_mode_and_settles(gpu, mode):
    model = Branching().cuda()
    compiled = torch.compile(model, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step) if mode == "default" else optimizer.step
    peaks = []
    for _ in range(4):
        compiled(torch.randn(32, 64, device="cuda")).sum().backward()
        step()
        optimizer.zero_grad()
        peaks.append(torch.cuda.memory_allocated())
    assert peaks[2] == peaks[3] and gpu.peak_reserved > 0
    assert not [note for note in gpu.notes if "failed" in note]
    assert gpu.origins.models[0].name == "Branching"
    assert not [name for name, *_ in gpu.origins.table() if "Placeholder" in name]


def test_a_compiled_convolution_has_the_layout_of_cudnn(gpu):
    def convolved(x, weight):
        return torch.nn.functional.conv2d(x, weight).relu()

    x = torch.randn(2, 8, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    weight = torch.randn(4, 8, 3, 3, device="cuda")
    assert torch.compile(convolved)(x, weight).is_contiguous(memory_format=torch.channels_last)
    assert torch.compile(convolved)(x.contiguous(), weight).is_contiguous()


@pytest.mark.parametrize("early", [True, False])
def test_the_compilers_view_of_the_gpu_is_restored(early):
    name = "torch._dynamo.device_interface"
    usual = sys.modules.pop(name)
    try:
        module = importlib.import_module(name) if early else None
        with virtual_gpu("H200"):
            module = module or importlib.import_module(name)
            assert module.CudaInterface.device_count() == 1 and module.CudaInterface.get_raw_stream(0) == 0
    finally:
        sys.modules[name] = torch._dynamo.device_interface = usual
    for function in ("get_raw_stream", "exchange_device", "device_count", "get_device_properties", "Event"):
        assert getattr(module.CudaInterface, function) is getattr(usual.CudaInterface, function)
