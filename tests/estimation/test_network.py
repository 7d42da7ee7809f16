"""How long ranks take to exchange data, and how much of it the GPU waits for."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.virtual.test_distributed import WIDTH, layers, train
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import gpu as find_gpu
from ullage.jobs.ranks import Rank
from ullage.performance.alone import utilization_of
from ullage.performance.network import Collective, Exchange, Pipeline
from ullage.performance.networks import NETWORKS, interconnect_of
from ullage.performance.step import StepCalls
from ullage.virtual import virtual_gpu

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "send")
H100, A100 = find_gpu("H100-80GB"), find_gpu("A100-80GB")

operations = st.sampled_from(OPERATIONS)
sizes = st.integers(0, 1 << 36)
shapes = st.sampled_from([(2, 1, 8), (8, 1, 8), (16, 2, 8), (64, 8, 8), (8, 8, 8), (4, 4, 1), (72, 9, 8)])
networks = st.sampled_from(["nvlink4,ib-ndr", "pcie3,eth-10", "nvlink3,2xib-hdr", "pcie5,eth-400"])


def collective(operation, size, shape):
    return Collective(operation, size, *shape)


@given(operations, sizes, sizes, shapes, networks)
def test_more_bytes_are_never_faster(operation, size, more, shape, names):
    by = interconnect_of(H100, names)
    assert collective(operation, size, shape).seconds(by) <= collective(operation, size + more, shape).seconds(by)


@given(operations, sizes, shapes)
def test_a_faster_network_is_never_slower(operation, size, shape):
    orders = [
        ["pcie3,ib-hdr", "pcie4,ib-hdr", "pcie5,ib-hdr", "nvlink2,ib-hdr", "nvlink3,ib-hdr", "nvlink5,ib-hdr"],
        ["nvlink4,eth-10", "nvlink4,eth-25", "nvlink4,eth-100", "nvlink4,eth-400", "nvlink4,ib-ndr", "nvlink4,ib-xdr"],
        ["nvlink4,1xib-ndr", "nvlink4,4xib-ndr", "nvlink4,8xib-ndr", "nvlink4,16xib-ndr"],
    ]
    for names in orders:
        times = [collective(operation, size, shape).seconds(interconnect_of(H100, each)) for each in names]
        assert times == sorted(times, reverse=True)


@given(operations, sizes)
def test_one_rank_sends_nothing(operation, size):
    assert Collective(operation, size, 1).seconds(interconnect_of(H100)) == 0


def test_large_messages_reach_the_bus_bandwidth_of_nccl_tests():
    size = 8_000_000_000
    for operation, factor in (("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("broadcast", 1)):
        took = Collective(operation, size, 8, 1, 8).seconds(interconnect_of(A100))
        assert size / took * factor == pytest.approx(240e9, rel=0.01)  # 12 links of NVLink, 20 GB/s each in NCCL


def test_adapters_are_shared_by_all_groups_of_a_machine():
    by = interconnect_of(H100, "ib-ndr")
    whole, across = Collective("all_gather", 1 << 33, 16, 2, 8), Collective("all_gather", 1 << 33, 2, 2, 8)
    assert across.seconds(by) > 4 * whole.seconds(by)


@pytest.mark.parametrize(
    ("gpu", "named", "expected"),
    [
        ("H200", None, "nvlink4,ib-ndr"),
        ("H100-PCIe-80GB", None, "pcie5,eth-100"),
        ("RTX-4090", None, "pcie4,eth-100"),
        ("V100-32GB", "eth-25", "nvlink2,eth-25"),
        ("T4", "PCIE4, 2xib-hdr", "pcie4,2xib-hdr"),
    ],
)
def test_networks_come_with_the_gpu_unless_they_are_named(gpu, named, expected):
    assert str(interconnect_of(find_gpu(gpu), named)) == expected


def test_every_network_can_be_named():
    for name, network in NETWORKS.items():
        by = interconnect_of(H100, name)
        assert network in (by.inside, by.between)


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ("nvlink9", UnknownName),
        ("eth-10,eth-25", InvalidValue),
        ("", InvalidValue),
        ("a,b,c", UnknownName),
        ("0xib-ndr", InvalidValue),
    ],
)
def test_a_network_that_is_not_known_is_refused(named, error):
    from ullage.jobs.job import Ranks

    with pytest.raises(error):
        Ranks(interconnect=named)


# What can be overlapped


def step(*calls):
    """A step of calls that take a second each, and of collectives (operation, bytes, lead) and waits (back)."""
    listed = []
    for call in calls:
        if isinstance(call, str):
            found = {"operator": "aten.mm.default", "pass": call, "kwargs": {}}
        elif isinstance(call, int):
            found = {"operator": "collective.wait", "pass": "forward", "kwargs": {"back": call}}
        else:
            part, size, lead, joins = call
            values = {"group": 0, "bytes": size, "ranks": 8, "nodes": 1, "ranks_per_node": 8, "lead": lead}
            found = {"operator": "collective.all_gather", "pass": part, "kwargs": values | {"joins": joins}}
        listed.append(found)
    return StepCalls(calls=listed, order=list(range(len(listed))))


def waited(*calls):
    made = step(*calls)
    exchange = Exchange.of(made)
    assert exchange is not None
    seconds = [float(call["operator"] == "aten.mm.default") for call in made.calls]
    return exchange.waiting(seconds, interconnect_of(H100))


TWO_SECONDS = round(2 * 370.8e9 * 8 / 7)


def test_a_stage_of_a_pipeline_waits_for_the_others():
    def sent(**counts):
        return {
            Collective(way, 1 << 20, 4, peer=int(peer)): count
            for (way, _, peer), count in (((name.partition("_")), count) for name, count in counts.items())
        }

    assert Pipeline.of(sent(send_1=8, recv_1=8)) == Pipeline(4, 8)  # the first stage
    assert Pipeline.of(sent(send_0=8, send_2=8, recv_0=8, recv_2=8)) == Pipeline(4, 8)
    assert Pipeline.of(sent(send_1=8, recv_3=8)) is None  # a ring
    assert Pipeline.of({Collective("all_reduce", 8, 4): 1}) is None
    assert Pipeline(4, 8).bubble == 3 / 8


def test_the_gpu_waits_for_what_it_needs_at_once():
    assert waited("forward", ("forward", TWO_SECONDS, 0, 0), 0, "forward") == pytest.approx(2, rel=0.01)


def test_concurrent_computation_adds_no_wait():
    gather = ("forward", TWO_SECONDS, 0, 0)
    assert waited(gather, "forward", 0, "forward") == pytest.approx(1, rel=0.01)
    assert waited(gather, "forward", "forward", "forward", 0) == 0
    assert waited("forward", "forward", "forward", (*gather[:2], 1, 0), 0) == pytest.approx(1, rel=0.01)


def test_two_of_one_group_come_one_after_the_other():
    gather = ("forward", TWO_SECONDS, 0, 0)
    assert waited(gather, gather, "forward", 0) == pytest.approx(3, rel=0.01)


def test_buckets_are_waited_for_when_the_last_one_begins():
    bucket = ("backward", TWO_SECONDS, 0, 1)
    small = ("backward", 8, 0, 1)
    assert waited(bucket, "backward", small, "backward", "optimizer") == pytest.approx(1, rel=0.01)
    assert waited(bucket, "backward", "backward", "backward", small, "optimizer") < 1e-4
    assert waited("backward", bucket, "backward", "optimizer", "backward", bucket) == pytest.approx(4, rel=0.01)


# Steps of PyTorch's own code


def exchanged(world, wrap, nodes=1, backend="nccl"):
    with Rank(world, nodes=nodes).entered(), virtual_gpu("H200") as gpu:
        dist.init_process_group(backend)
        train(wrap(layers()), steps=5)
    return StepCalls(**gpu.calls.step())


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def sent(found):
    return {
        (call["operator"].partition(".")[2], call["kwargs"]["bytes"])
        for call in found
        if call["operator"].startswith("collective.") and call["operator"] != "collective.wait"
    }


def test_ddp_sends_its_gradients_once_and_is_steady():
    found = exchanged(8, DistributedDataParallel)
    gradients = 8 * WIDTH * WIDTH * 4
    assert found.steady
    assert sum(size for name, size in sent(found)) == gradients and {name for name, _ in sent(found)} == {"all_reduce"}
    joins = [call["kwargs"]["joins"] for call in found if call["operator"] == "collective.all_reduce"]
    assert all(joins)


def test_fully_shard_gathers_ahead_and_is_steady():
    found = exchanged(8, sharded)
    assert found.steady
    assert {name for name, _ in sent(found)} == {"all_gather", "reduce_scatter"}
    leads = [call["kwargs"]["lead"] for call in found if call["operator"] == "collective.all_gather"]
    assert max(leads) > 0
    gathers = len(leads)
    waits = sum(call["operator"] == "collective.wait" for call in found)
    assert waits >= gathers


def test_a_slower_network_lengthens_steps_and_one_rank_has_none():
    calls = exchanged(8, sharded, nodes=2)
    alone = utilization_of(exchanged(1, sharded), find_gpu("H200"))
    assert alone.network_s == 0 and alone.interconnect is None and not alone.collectives
    times = []
    for names in ("nvlink4,ib-ndr", "nvlink4,eth-100", "pcie3,eth-10"):
        calls.interconnect = names
        found = utilization_of(calls, find_gpu("H200"))
        assert found.interconnect == names and {each["nodes"] for each in found.collectives} == {2}
        assert "modelled" in " ".join(found.remarks)
        times.append(found.step_s)
    assert times == sorted(times) and times[0] < times[-1]


def test_tensor_parallelism_waits_for_each_sum():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def split(model):
        mesh = init_device_mesh("cuda", (8,))
        names = [name for name, layer in model.named_children() if isinstance(layer, torch.nn.Linear)]
        plan = {name: (ColwiseParallel, RowwiseParallel)[place % 2]() for place, name in enumerate(names)}
        return parallelize_module(model, mesh, plan)

    found = exchanged(8, split)
    order = [call["operator"] for call in found if call["operator"].startswith("collective.")]
    assert "collective.all_reduce" in order
    assert order.count("collective.wait") == len(order) - order.count("collective.wait")
