"""One rank of many: collectives answer at once, and PyTorch's own DDP, FSDP and tensor parallelism run."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.virtual.test_distributed import layers, train
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ullage.errors import InvalidValue
from ullage.estimation.asking import estimate
from ullage.jobs.job import Ranks
from ullage.jobs.ranks import Rank
from ullage.units import MIB
from ullage.virtual import virtual_gpu
from ullage.virtual.distributed.groups import Groups

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
RANKS = 8


@pytest.fixture
def gpu():
    with Rank(RANKS, 2).entered(), virtual_gpu("H200") as gpu:
        dist.init_process_group("nccl")
        yield gpu


def numbers(count, device):
    return torch.arange(float(count), device=device)


def gather(device):
    out = [torch.zeros(2, device=device) for _ in range(RANKS)]
    dist.all_gather(out, numbers(2, device))
    return torch.stack(out)


def gather_into(device):
    out = torch.zeros(2 * RANKS, device=device)
    dist.all_gather_into_tensor(out, numbers(2, device))
    return out.view(RANKS, 2)


def reduced(device, op=dist.ReduceOp.SUM):
    values = numbers(2, device)
    dist.all_reduce(values, op=op)
    return values


def scattered(device):
    out = torch.zeros(2, device=device)
    dist.reduce_scatter_tensor(out, numbers(2 * RANKS, device))
    return out


def exchanged(device):
    out = torch.zeros(RANKS, device=device)
    dist.all_to_all_single(out, numbers(RANKS, device))
    return out


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (gather, [[0, 1]] * RANKS),
        (gather_into, [[0, 1]] * RANKS),
        (reduced, [0, RANKS]),
        pytest.param(
            lambda device: reduced(device, dist.ReduceOp.MAX),
            [0, 1],
            marks=pytest.mark.skipif(RELEASE < (2, 9), reason="PyTorch before 2.9 does not say how it reduces"),
        ),
        (scattered, [4 * RANKS, 5 * RANKS]),  # the third piece, as rank 2 gets it
        (exchanged, [2] * RANKS),
    ],
)
def test_every_rank_holds_what_this_one_does(gpu, call, expected, device):
    assert call(device).tolist() == expected


def test_values_of_other_ranks_stay_and_are_noted(gpu):
    received = numbers(3, "cuda")
    dist.recv(received, 1)
    dist.broadcast(received, 0)
    assert received.tolist() == [0, 1, 2]
    assert [note for note in gpu.notes if note.startswith(("recv", "broadcast"))]


def test_work_handles_objects_and_messages(gpu):
    work = dist.all_reduce(numbers(2, "cuda"), async_op=True)
    assert work.wait() and work.is_completed()
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}] * RANKS
    chosen = [None]
    dist.scatter_object_list(chosen, list(range(RANKS)), src=2)
    assert chosen == [2]
    sent = [dist.P2POp(dist.isend, numbers(2, "cuda"), 1), dist.P2POp(dist.irecv, numbers(2, "cuda"), 7)]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    dist.barrier()
    dist.monitored_barrier()


def test_gathered_objects_keep_rank_order_and_need_gpu_memory(gpu):
    mine = {"text": "x" * 10 * MIB}
    gathered = [None] * RANKS
    torch.cuda.reset_peak_memory_stats()
    dist.all_gather_object(object_list=gathered, obj=mine)
    assert all(each is mine for each in gathered)
    assert torch.cuda.max_memory_allocated() // MIB == 10 * (1 + 2 * RANKS)  # its own, all, and NCCL's one tensor
    assert torch.cuda.memory_allocated() == 0
    gathered = [None] * RANKS
    dist.gather_object(obj=mine, object_gather_list=gathered, dst=2, group=dist.new_group(backend="gloo"))
    assert gathered == [mine] * RANKS and torch.cuda.memory_allocated() == 0


def test_received_objects_are_those_that_the_first_rank_sent():
    def exchange(rank, received):
        with Rank(RANKS, rank).entered(), virtual_gpu("H200") as gpu:
            dist.init_process_group("nccl")
            messages = gpu.part(Groups).messages
            messages.received = received
            settings, name, piece = [None, None], [None], [None]
            if rank == 0:
                settings, name = [{"width": 64}, 3], ["run"]
            dist.broadcast_object_list(settings, src=0)
            dist.broadcast_object_list(object_list=name, group_src=0)
            pieces = [10 * place for place in range(RANKS)] if rank == 0 else None
            dist.scatter_object_list(scatter_object_output_list=piece, scatter_object_input_list=pieces, src=0)
            return (settings, name, piece), messages.sent, messages.waits, list(gpu.notes)

    _, sent, waits, _ = exchange(0, {})
    assert not waits
    assert exchange(3, sent)[0] == ([{"width": 64}, 3], ["run"], [30])
    heard, _, waits, notes = exchange(3, {})
    assert heard == ([None, None], [None], [None]) and waits
    assert [note for note in notes if note.startswith("broadcast_object_list: what another rank sends is not known")]


def test_groups_and_meshes_have_the_ranks_of_this_one(gpu):
    assert dist.new_group([1, 2, 3]).size() == 3 and dist.get_rank(dist.new_group([1, 2])) == 1
    assert not isinstance(dist.new_group([4, 5]), dist.ProcessGroup)
    assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
    assert (mesh["tensor"].size(), mesh.get_local_rank("tensor"), mesh.get_group("data").size()) == (4, 2, 2)


def test_a_named_device_creates_communicators_with_their_groups():
    with Rank(RANKS, 2, nodes=2).entered(), virtual_gpu("H200") as gpu:
        before = gpu.context
        dist.init_process_group("nccl", device_id=torch.device("cuda", 2))
        of_all = gpu.context
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
        assert before < of_all < gpu.context
        dist.all_reduce(torch.zeros(1, device="cuda"), group=mesh.get_group("tensor"))


def test_the_launcher_says_who_this_is(gpu):
    assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (2, RANKS, "2")
    assert torch.cuda.device_count() == RANKS
    torch.cuda.set_device(2)
    assert torch.zeros(1, device="cuda:2").is_cuda
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:3")


def test_lists_are_gathered_by_way_of_one_tensor(gpu):
    out = [torch.zeros(MIB // 4, device="cuda") for _ in range(RANKS)]
    piece = torch.zeros(MIB // 4, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dist.all_gather(out, piece)
    assert torch.cuda.max_memory_allocated() - before == RANKS * MIB  # measured on an H200 with NCCL
    assert torch.cuda.memory_allocated() == before


def test_ddp_has_the_same_buckets_as_with_one_rank(gpu):
    model = layers()
    before = torch.cuda.memory_allocated()
    model = DistributedDataParallel(model, device_ids=[2])
    assert torch.cuda.memory_allocated() - before == pytest.approx(8 * MIB, abs=8192)
    train(model)


def test_fully_shard_keeps_an_eighth_and_gathers_the_rest(gpu):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs fully_shard, which came with PyTorch 2.6")
    model = layers()
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    train(model)
    assert sum(parameter.to_local().nbytes for parameter in model.parameters()) == MIB
    assert not [note for note in gpu.notes if "no operator of PyTorch" in note]


def test_fsdp_keeps_an_eighth_in_a_flat_parameter(gpu):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(layers(), device_id=0)
    train(model)
    assert sum(parameter.nbytes for parameter in model.parameters()) == MIB


def test_tensor_parallelism_splits_the_weights(gpu):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {str(number): RowwiseParallel() if number % 2 else ColwiseParallel() for number in range(8)}
    model = parallelize_module(layers(), init_device_mesh("cuda", (RANKS,)), plan)
    train(model)
    assert sum(parameter.to_local().nbytes for parameter in model.parameters()) == MIB
    assert not [note for note in gpu.notes if "no operator of PyTorch" in note]


@pytest.mark.tiny
def test_a_function_is_estimated_as_one_rank_of_many():
    def run():
        dist.init_process_group("nccl")
        train(DistributedDataParallel(layers(2), device_ids=[0]))

    found = estimate(run, gpu="H200", ranks=Ranks(64, nodes=8))
    assert [note for note in found.notes if note.startswith("rank 0 of 64 was followed")]
    assert "RANK" not in os.environ and not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "must be at least 1"),
        ({"size": 4, "follow": [4]}, "must be 0 to 3"),
        ({"size": 8, "nodes": 3}, "must divide 8 ranks evenly"),
        ({"follow": [1]}, "need the number of ranks"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(given, message):
    with pytest.raises(InvalidValue, match=message):
        estimate(lambda: None, gpu="H200", ranks=Ranks(**given))


def test_connections_need_memory_and_the_bound_allows_more():
    def outside(ranks, nodes=1, send=False):
        with Rank(ranks, 0, nodes=nodes).entered(), virtual_gpu("H200") as gpu:
            dist.init_process_group("nccl")
            before = gpu.context
            dist.all_reduce(torch.zeros(1, device="cuda"))
            if send:
                dist.send(torch.zeros(1, device="cuda"), 1)
                dist.send(torch.zeros(1, device="cuda"), 1)
            added = sum(entry["adds"] for entry in gpu.assumed if "NCCL" in entry["what"])
            return (gpu.context - before) / MIB, added / MIB

    alone, on_a_node, on_two = outside(1), outside(8), outside(8, nodes=2)
    assert alone[1] == 0 < on_a_node[1]
    assert on_a_node[0] > alone[0]
    assert on_two[0] != on_a_node[0]
    assert outside(8, send=True)[0] - on_a_node[0] == 32 * 12  # one peer, once
