"""CUDA graphs and memory pools: captured memory is kept apart, until the graph goes and the cache is emptied."""

import pytest
import torch
from tests.virtual.recording import recorded_events

from ullage.units import MIB
from ullage.virtual import virtual_gpu


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def pools_of(address):
    return [
        segment["segment_pool_id"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= address < segment["address"] + segment["total_size"]
    ]


def test_captured_memory_stays_in_the_graphs_pool(gpu):
    x = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = (x + 1) * 2
    assert not torch.cuda.is_current_stream_capturing()
    assert pools_of(y.data_ptr()) == [graph.pool()] != pools_of(x.data_ptr())
    graph.replay()
    reserved = torch.cuda.memory_reserved()
    del y
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    other = torch.zeros(1 << 20, device="cuda")
    assert pools_of(other.data_ptr()) == [(0, 0)]
    del graph
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved


def test_graphs_that_share_a_pool_use_it_one_after_the_other(gpu):
    pool, graphs = torch.cuda.graph_pool_handle(), [torch.cuda.CUDAGraph() for _ in range(2)]
    addresses = set()
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            kept = torch.zeros(1 << 20, device="cuda")
        addresses.add(kept.data_ptr())
        del kept
    assert len(addresses) == 1
    assert {graph.pool() for graph in graphs} == {pool}


def test_a_captured_training_step(gpu):
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x = torch.zeros(64, 512, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        step()
    # cuBLAS and cuBLASLt take workspaces for the stream of the capture, in each of the two threads
    assert torch.cuda.memory_allocated() - before >= 2 * 32 * MIB
    assert pools_of(model.weight.grad.data_ptr()) == [graph.pool()]
    allocated = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
    assert torch.cuda.memory_allocated() == allocated


def test_graphed_callables_train(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros(16, 64, device="cuda"),))
    graphed(torch.ones(16, 64, device="cuda")).sum().backward()
    assert model[0].weight.grad.shape == (64, 64)


def test_a_memory_pool_of_the_user(gpu):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.zeros(1 << 20, device="cuda")
    outside = torch.zeros(1 << 20, device="cuda")
    assert pools_of(inside.data_ptr()) == [pool.id] and pools_of(outside.data_ptr()) == [(0, 0)]
    assert pool.use_count() == 1 and len(pool.snapshot()) == 1
    del inside
    torch.cuda.empty_cache()
    assert len(pool.snapshot()) == 1
    del pool
    assert all(segment["segment_pool_id"] == (0, 0) for segment in torch.cuda.memory_snapshot())


def test_a_pool_goes_back_to_a_checkpoint(gpu):
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    kept = torch.zeros(1 << 20, device="cuda")
    dropped = torch.zeros(1 << 19, device="cuda")
    gone = dropped.data_ptr()
    state = torch._C._cuda_getCheckpointState(0, pool)
    del dropped
    later = torch.zeros(1 << 18, device="cuda")
    held = gpu.memory.restore_pool(state)
    torch._C._cuda_endAllocateToPool(0, pool)
    assert set(held) == {kept.data_ptr(), gone}
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, set(held))
    allocated = torch.cuda.memory_allocated()
    assert allocated == kept.nbytes + (1 << 21)
    del later  # its memory is gone already
    assert torch.cuda.memory_allocated() == allocated
    del kept
    assert torch.cuda.memory_allocated() == 1 << 21


def test_requests_on_side_streams_are_repeated_there(gpu):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.zeros(1 << 20, device="cuda")
    gpu.memory.repeat(gpu.memory.requests[:], times=2, quiet=1)
    assert {segment["stream"] for segment in torch.cuda.memory_snapshot()} == {side.stream_id}


def test_memory_of_another_stream_is_not_free_during_capture(gpu):
    side, first, second = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        x = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
        x.record_stream(side)
        address = x.data_ptr()
        del x
        y = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
        assert y.data_ptr() != address
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")  # PyTorch looks before a request
    with torch.cuda.graph(second, pool=first.pool()):
        assert torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address


def test_captured_efficient_attention_keeps_its_seed_on_the_gpu(gpu):
    q = torch.zeros(2, 4, 64, 32, device="cuda", requires_grad=True)

    def attend():
        with recorded_events(gpu) as events:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return [size for size in events if size >= 0]

    usual = attend()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = attend()
    assert captured == [8, 8, *usual]
