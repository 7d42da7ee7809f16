"""One process of many: DDP's buckets and FSDP's parameters are those of PyTorch's own code."""

import os

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ullage
from ullage.units import MIB
from ullage.virtual import virtual_gpu

WIDTH = 512  # a layer has 1 MiB of weights


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield gpu


def layers(count=8):
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))).cuda()


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.zeros(4, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def allocated_by(make):
    before = torch.cuda.memory_allocated()
    made = make()
    return (torch.cuda.memory_allocated() - before) / MIB, made


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_buckets_have_the_size_of_the_gradients(gpu, options):
    model = layers()
    buckets, model = allocated_by(lambda: DistributedDataParallel(model, device_ids=[0], **options))
    assert buckets == pytest.approx(8, abs=0.01)
    train(model)


def test_gradients_that_are_views_of_buckets_take_no_memory(gpu):
    model = DistributedDataParallel(layers(), device_ids=[0], gradient_as_bucket_view=True)
    for _ in range(2):
        model(torch.zeros(4, WIDTH, device="cuda")).sum().backward()
    taken, _ = allocated_by(lambda: model(torch.zeros(4, WIDTH, device="cuda")).sum().backward())
    assert taken < 1
    assert model.module[0].weight.grad.shape == (WIDTH, WIDTH)


def test_fsdp_with_one_process_keeps_one_flat_parameter(gpu):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.warns(UserWarning, match="NO_SHARD"):
        model = FullyShardedDataParallel(layers(), device_id=0)
    train(model)
    assert [parameter.numel() for parameter in model.parameters()] == [8 * WIDTH * WIDTH]


def test_fully_shard_gathers_into_memory_of_its_own(gpu):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs fully_shard, which came with PyTorch 2.6")
    model = layers()
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    train(model)
    streams = {segment["stream"] for segment in torch.cuda.memory_snapshot()}
    assert len(streams) > 1  # the default one, and those of FSDP
    assert not any("fsdp" in note for note in gpu.notes)


def test_a_storage_gives_its_memory_back_and_takes_it_again(gpu):
    tensor = torch.zeros(MIB, device="cuda")
    storage = tensor.untyped_storage()
    before = torch.cuda.memory_allocated()
    storage.resize_(0)
    assert (storage.nbytes(), torch.cuda.memory_allocated()) == (0, before - 4 * MIB)
    storage.resize_(4 * MIB)
    assert (storage.nbytes(), torch.cuda.memory_allocated()) == (4 * MIB, before)
    del tensor, storage
    assert torch.cuda.memory_allocated() == before - 4 * MIB


def test_a_group_of_one_is_joined_as_torchrun_starts_it(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    with virtual_gpu("H200"):
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
        assert torch.distributed.get_world_size() == 1
        assert torch.distributed.get_backend() == "nccl"


def outside(gpu):
    return gpu.context / MIB


def test_nccl_needs_memory_at_first_collective_of_each_group(gpu):
    before = outside(gpu)
    torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    first = outside(gpu)
    assert first - before == pytest.approx(558, abs=4)  # measured on an H200
    torch.distributed.barrier()
    torch.distributed.all_reduce(torch.zeros(1 << 20, device="cuda"))
    assert outside(gpu) == first
    group = torch.distributed.new_group([0])
    assert outside(gpu) == first
    torch.distributed.all_reduce(torch.zeros(1, device="cuda"), group=group)
    assert outside(gpu) - first == pytest.approx(388, abs=4)
    assert gpu.upper - gpu.process_memory < 100 * MIB


def test_nccl_takes_memory_at_once_if_the_device_is_named():
    with virtual_gpu("H200") as gpu:
        before = outside(gpu)
        torch.distributed.init_process_group(
            "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
        )
        assert outside(gpu) - before == pytest.approx(558, abs=4)


def test_fewer_channels_take_less_memory(gpu, monkeypatch):
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "1")
    before = outside(gpu)
    DistributedDataParallel(layers(), device_ids=[0])
    assert outside(gpu) - before == pytest.approx(180, abs=4)


def test_gloo_takes_no_memory_of_nccl():
    with virtual_gpu("H200") as gpu:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        before = outside(gpu)
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
        assert outside(gpu) - before == pytest.approx(70, abs=4)
        assert torch.distributed.get_backend() == "gloo"


def test_memory_held_by_the_watchdog_is_no_growth():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def run():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        model = DistributedDataParallel(layers(), device_ids=[0])
        model.register_comm_hook(None, bf16_compress_hook)  # makes copies of the buckets
        train(model, steps=1000)

    found = ullage.estimate(run, gpu="H200")
    assert not [note for note in found.notes if "grows" in note]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="PyTorch before 2.8 keeps nothing that is sent: it records streams",
)
@pytest.mark.parametrize("static", [False, True])
def test_old_and_new_buckets_coexist_except_after_slow_steps(gpu, static):
    model = DistributedDataParallel(layers(), device_ids=[0], static_graph=static)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=True)
    held = []
    for _ in range(4):
        model(torch.zeros(4, WIDTH, device="cuda")).sum().backward()
        optimizer.step()  # the first one loads many kernels: NCCL's watchdog looks meanwhile
        optimizer.zero_grad()
        held.append(round(torch.cuda.memory_allocated() / MIB))
    assert held[1] == held[0]  # weights, state and buckets
    assert held[2] - held[0] == (8 if static else 0)  # with a static graph, they are built anew after the second step
    assert static or gpu.memory.waiting.most_late >= 8 * MIB  # `upper` has them: it may look later


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="PyTorch before 2.8 keeps nothing that is sent: it records streams",
)
@pytest.mark.parametrize("clips", [False, True])
def test_a_short_first_step_ends_before_the_watchdog_looks(gpu, clips):
    model = DistributedDataParallel(layers(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = []
    for _ in range(3):
        model(torch.zeros(4, WIDTH, device="cuda")).sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        held.append(round(torch.cuda.memory_allocated() / MIB))
    assert held[1] - held[0] == (0 if clips else 8)


def test_a_group_of_nccl_takes_options_and_another_timeout(gpu):
    from datetime import timedelta

    from torch.distributed import ProcessGroupNCCL, distributed_c10d

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    group = torch.distributed.new_group([0], pg_options=options)
    distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)
    distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    gathered = torch.zeros(4, device="cuda")
    torch.distributed.all_reduce(gathered, group=group)
    assert torch.distributed.get_backend(group) == "nccl"


def test_a_group_is_split_as_nccl_splits_it():
    with virtual_gpu("H200"):
        torch.distributed.init_process_group(
            "nccl", store=torch.distributed.HashStore(), rank=5, world_size=8, device_id=torch.device("cuda", 0)
        )
        free, _ = torch.cuda.mem_get_info()
        half = torch.distributed.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]])
        pair = torch.distributed.split_group(half, [[0, 3], [1, 2]], group_desc="pair")
        gathered = torch.zeros(2, device="cuda")
        torch.distributed.all_gather_into_tensor(gathered, torch.zeros(1, device="cuda"), group=pair)
        ranks = [torch.distributed.get_process_group_ranks(group) for group in (half, pair)]
        assert ranks == [[4, 5, 6, 7], [5, 6]]
        assert torch.cuda.mem_get_info()[0] < free - 100 * MIB
        assert torch.distributed.split_group(split_ranks=[[0, 1]]) is None
