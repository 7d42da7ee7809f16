"""Tensors outside of operators: made of Python data, printed, copied, indexed, and their data asked for."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from ullage.errors import UnsupportedOperation
from ullage.virtual import virtual_gpu


@pytest.fixture(autouse=True)
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def deferred():
    return torch.ones(100, 100)


def test_tensors_are_made_of_python_data():
    assert torch.tensor([1, 2], device="cuda").tolist() == [1, 2]
    assert torch.tensor(2.5, device="cuda").item() == 2.5
    assert torch.as_tensor(np.arange(3), device="cuda").tolist() == [0, 1, 2]
    assert torch.asarray([[1, 2]], device="cuda:0").shape == (1, 2)
    x = torch.tensor([1.0], device="cuda", requires_grad=True)
    assert x.requires_grad and x.is_leaf
    assert x.new_tensor([1, 2]).dtype is torch.float32
    assert x.new(2, 3).shape == (2, 3) and x.new([1, 2, 3]).is_cuda
    assert torch.tensor([x.detach()[0], torch.ones((), device="cuda")]).shape == (2,)


def test_the_default_device_is_obeyed():
    with torch.device("cuda"):
        assert torch.tensor([1.0]).is_cuda and torch.zeros(3).is_cuda
        layer = nn.Linear(3, 3)
        layer(torch.randn(2, 3)).sum().backward()
        assert layer.weight.grad.is_cuda
        assert torch.tensor([1.0], device="cpu").device.type == "cpu"
    assert torch.tensor([1.0]).device.type == "cpu"


def test_tensors_like_a_gpu_tensor_respect_their_device():
    x = torch.zeros(1024, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    made = [
        torch.empty_like(x, device="cpu"),
        torch.zeros_like(x, device="cpu"),
        torch.full_like(x, 3, device="cpu"),
        torch.randn_like(x, device="cpu"),
        x.new_empty((3,), device="cpu"),
        x.new_zeros(3, device="cpu"),
        x.new_full((3,), 3, device="cpu"),
        x.new_ones(3, device="cpu"),
        x.new_empty([], device="cpu"),
        x.new_empty_strided((3,), (1,), device="cpu"),
    ]
    assert {each.device.type for each in made} == {"cpu"} and {each.dtype for each in made} == {torch.float32}
    assert made[2].sum() == 3 * 1024 * 1024 and made[6].tolist() == [3, 3, 3]
    assert torch.empty_like(x, device="meta").is_meta and x.new_zeros(3, device="meta").is_meta
    assert torch.cuda.memory_allocated() == before
    assert torch.zeros_like(made[0], device="cuda").is_cuda and made[0].new_zeros(3, device="cuda").is_cuda


def test_a_storage_is_copied_to_the_host_and_back():
    x = torch.zeros(1024, device="cuda")
    host = x.untyped_storage().cpu()
    assert host.device.type == "cpu" and host.nbytes() == 4096
    assert x.untyped_storage().copy_(host).device.type == "cuda"


def test_lists_are_indices():
    x = torch.zeros(4, 5, device="cuda")
    assert x[[0, 2]].shape == (2, 5)
    assert x[[0, 2], :2].shape == (2, 2)
    x[[0, 1]] = 1.0
    x[[0, 1], 2] = 3.0
    assert x[0, 1:3].shape == (2,) and x[..., None].shape == (4, 5, 1)


def test_shapes_change_in_place():
    x = torch.zeros(3, 4, device="cuda")
    address, before = x.data_ptr(), torch.cuda.memory_allocated()
    assert x.t_().shape == (4, 3) and x.stride() == (1, 4)
    assert x.unsqueeze_(0).shape == (1, 4, 3)
    assert x.squeeze_(0).transpose_(0, 1).shape == (3, 4)
    assert x.data_ptr() == address and torch.cuda.memory_allocated() == before
    assert x.resize_as_(torch.zeros(7, device="cuda")).shape == (7,)
    assert torch.ones(100, 200).t_().sum().item() == 20000


def test_addresses_are_those_of_the_blocks():
    x, y = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    assert 0 != x.data_ptr() != y.data_ptr() != 0
    assert x[10:].data_ptr() == x.data_ptr() + 40
    assert x.untyped_storage().data_ptr() == x.data_ptr()
    assert torch.zeros(0, device="cuda").data_ptr() == 0


def test_printing_asks_for_no_values(gpu):
    x = torch.zeros(2, 3, device="cuda")
    assert repr(x) == f"{x}" == "tensor(..., device='cuda:0', size=(2, 3))"
    assert "dtype=torch.float16" in str(x.half())
    assert "requires_grad=True" in repr(nn.Parameter(x))
    assert "grad_fn=<" in repr(nn.Parameter(x) * 2)
    assert f"{x.sum()}" == "tensor(..., device='cuda:0', size=())"
    assert not gpu.notes


def test_a_number_is_formatted_as_one():
    assert f"{torch.tensor(2.5, device='cuda'):.2f}" == "2.50"


def test_deep_copies_take_memory_and_share_what_was_shared():
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = copy.deepcopy(x)
    assert torch.cuda.memory_allocated() - before == 4096
    assert y.requires_grad and y.shape == (1000,) and y.data_ptr() != x.data_ptr()
    whole, part = copy.deepcopy([x.detach(), x.detach()[10:20]])
    assert part.shape == (10,) and part.data_ptr() == whole.data_ptr() + 40
    model = copy.deepcopy(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda())
    assert model[0].weight.is_cuda and model[1].running_mean.is_cuda


def test_shallow_copies_share_memory():
    x = torch.zeros(3, 4, device="cuda")
    assert copy.copy(x).shape == (3, 4) and copy.copy(x).data_ptr() == x.data_ptr()
    assert copy.copy(deferred()).sum() == 10000


def test_a_deep_copy_of_a_cpu_tensor_has_its_values():
    assert copy.deepcopy(deferred()).sum().item() == 10000


@pytest.mark.parametrize(
    "leave",
    [
        lambda x: x.numpy().sum(),
        lambda x: np.asarray(x).sum(),
        lambda x: np.array(x.tolist()).sum(),
        lambda x: torch.from_dlpack(x).sum().item(),
        lambda x: pickle.loads(pickle.dumps(x)).sum().item(),
        lambda x: np.frombuffer(bytes(x.untyped_storage().tolist()), np.float32).sum(),
        lambda x: x.share_memory_().numpy().sum(),
        lambda x: torch.multiprocessing.reductions.reduce_tensor(x) and x.numpy().sum(),
    ],
    ids=["numpy", "asarray", "tolist", "dlpack", "pickle", "storage", "share_memory_", "reduction"],
)
def test_data_that_leaves_is_there(leave):
    assert leave(deferred()) == 10000


def test_data_that_leaves_a_nested_virtual_gpu_is_there():
    outer = deferred()
    with virtual_gpu("A100-40GB"):
        assert outer.numpy().sum() == 10000


def test_data_of_the_gpu_leaves_only_through_the_cpu():
    x = torch.ones(100, 100, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        x.numpy()
    with pytest.raises(UnsupportedOperation, match="DLPack"):
        x.__dlpack__()
    assert not hasattr(x, "__cuda_array_interface__")
    assert x.cpu().numpy().shape == (100, 100)
    assert len(x.tolist()) == 100


def test_memory_can_be_pinned():
    assert deferred().pin_memory().is_pinned()
    assert torch.empty(10, pin_memory=True).is_pinned()
    assert torch.empty(1000, 1000, pin_memory=True).is_pinned()
    assert not deferred().is_pinned()
    assert deferred().pin_memory().to("cuda", non_blocking=True).is_cuda


def test_the_old_types_work():
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    x = torch.ones(2).type("torch.cuda.HalfTensor")
    assert x.is_cuda and x.type() == "torch.cuda.HalfTensor"
    assert isinstance(x, torch.cuda.HalfTensor) and not isinstance(x, torch.cuda.FloatTensor)
    assert x.type(torch.FloatTensor).device.type == "cpu"
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.zeros(2).is_cuda and torch.Tensor([10.0]).tolist() == [10.0]
    assert torch.Tensor([10.0]).is_cuda and torch.Tensor(2, 3).is_cuda and torch.nn.Linear(2, 3).weight.is_cuda
    assert torch.FloatTensor([1.0]).device.type == torch.Tensor([1.0], device="cpu").device.type == "cpu"
    torch.set_default_tensor_type("torch.FloatTensor")
    assert torch.Tensor([10.0]).device.type == torch.zeros(2).device.type == "cpu"


def test_a_default_type_on_the_gpu_ends_with_it():
    with virtual_gpu("T4"):
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        assert torch.Tensor([1.0]).is_cuda
    assert torch.Tensor([1.0]).device.type == "cpu" and "__new__" not in vars(torch.Tensor)


def test_layers_without_shapes_yet_move_to_the_gpu():
    with virtual_gpu("T4") as gpu:
        model = torch.nn.Sequential(torch.nn.LazyLinear(32), torch.nn.LazyLinear(4)).cuda()
        assert gpu.peak_allocated == 0
        model(torch.randn(8, 100, device="cuda")).sum().backward()
        assert [tuple(weight.shape) for weight in model.parameters()] == [(32, 100), (32,), (4, 32), (4,)]
        assert gpu.peak_allocated > 0 and model[0].weight.grad.is_cuda


MIB = 1 << 20
COPIES = {  # of 4 Mi elements: what a copy between CPU and GPU takes of the GPU beside source and target, in MiB
    "as it is": (lambda gpu, cpu: gpu.cpu(), 0),
    "turned, in the same order": (lambda gpu, cpu: gpu.t().cpu(), 0),
    "turned, of another type": (lambda gpu, cpu: gpu.t().to("cpu", torch.uint8), 16),
    "of another type": (lambda gpu, cpu: gpu.to("cpu", torch.uint8), 0),
    "of another type, nobody waits": (lambda gpu, cpu: gpu.to("cpu", torch.float64, non_blocking=True), 32),
    "turned, of another type, nobody waits": (lambda gpu, cpu: gpu.t().to("cpu", torch.uint8, non_blocking=True), 8),
    "columns": (lambda gpu, cpu: gpu[:, :1024].cpu(), 8),
    "to the GPU": (lambda gpu, cpu: cpu.cuda(), 0),
    "to the GPU, of another type": (lambda gpu, cpu: cpu.to("cuda", torch.float64), 0),
    "to the GPU, of another type, nobody waits": (lambda gpu, cpu: cpu.to("cuda", torch.double, non_blocking=True), 16),
    "to the GPU, turned, of another type": (lambda gpu, cpu: cpu.t().to("cuda", torch.float64), 32),
    "to the GPU, channels last": (
        lambda gpu, cpu: cpu.view(4, 16, 256, 256).to("cuda", memory_format=torch.channels_last),
        16,
    ),
    "into turned memory": (lambda gpu, cpu: gpu.t().copy_(cpu).size(0) and None, 16),
    "into the CPU's memory of another order": (lambda gpu, cpu: cpu.t().copy_(gpu).size(0) and None, 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_strided_copies_between_cpu_and_gpu_use_gpu_memory(name):
    copied, more = COPIES[name]
    on_gpu, on_cpu = torch.empty(2048, 2048, device="cuda"), torch.empty(2048, 2048)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    copy = copied(on_gpu, on_cpu)
    own = copy.nbytes if copy is not None and copy.is_cuda else 0
    assert torch.cuda.max_memory_allocated() - before - own == more * MIB


def test_a_byte_condition_is_copied_to_booleans_during_where():
    """Old code compares into bytes (`mask.byte()`). `torch.where` still takes them, with a warning."""
    values = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    mask = (values > 0).byte()
    zero = torch.zeros((), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = torch.where(mask, values, zero)
    assert torch.cuda.memory_allocated() - before == 4 * 1024**2
    assert torch.cuda.max_memory_allocated() - before == 5 * 1024**2
    result.sum().backward()
    assert values.grad.shape == values.shape
