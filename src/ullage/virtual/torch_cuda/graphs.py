"""CUDA graphs and `torch.cuda.MemPool`: captured code runs once, its memory stays in a private pool, and replaying it
requests none. PyTorch's own Python code stays."""

import itertools
from array import array
from typing import Any

import torch

from ullage.allocator import PoolId, checkpoint
from ullage.allocator.private_pools import NO_POOL
from ullage.virtual.call.native import thread_on_gpu
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.memory.allocations import WORKSPACE
from ullage.virtual.state import GPUState, part_in_use

_SEED_AND_OFFSET = (8, 8)  # of the generator, as tensors: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, register_graph


class Graphs:
    """The captures and private pools of one virtual GPU."""

    def __init__(self, gpu: GPUState) -> None:
        self.gpu = gpu
        self.graph_pools = ((number, 0) for number in itertools.count(1))  # of graphs without a given one
        self.user_pools = ((0, number) for number in itertools.count(1))
        self.capturing = 0
        self._generator_state: list[Any] = []
        self._registered = 0

    @property
    def pools(self) -> Any:
        return self.gpu.memory.allocator.private

    def register(self) -> None:
        """Make the generator's seed and offset tensors on the current stream, at the first graph."""
        if not self._registered:
            self._generator_state = [self.gpu.memory.take(size, WORKSPACE) for size in _SEED_AND_OFFSET]
        self._registered += 1

    def unregister(self) -> None:
        self._registered -= 1
        if not self._registered:
            for taken in self._generator_state:
                self.gpu.memory.give_back(taken)

    def in_this_thread(self, device: int, pool: PoolId) -> None:
        """Send the requests of this thread to a pool; backward passes have their own thread."""
        thread = thread_on_gpu()
        self.pools.begin(pool, lambda stream: thread_on_gpu() == thread)

    def on_this_stream(self, device: int, pool: PoolId) -> None:
        current = self.gpu.memory.stream
        self.pools.begin(pool, lambda stream: stream == current)

    def live_addresses(self, pool: PoolId) -> set[int]:
        addresses = set()
        for segment in self.gpu.memory.allocator.snapshot():
            if segment["segment_pool_id"] == pool:
                addresses |= {block["address"] for block in segment["blocks"] if block["state"] != "inactive"}
        return addresses


class CUDAGraph:
    """`torch.cuda.CUDAGraph` while a virtual GPU is in use."""

    __module__ = "torch.cuda.graphs"

    def __init__(self, keep_graph: bool = False) -> None:
        self._graphs = part_in_use(Graphs)
        self._pool: PoolId = NO_POOL
        self._registered = self._ended = False
        self._calls = array("I")  # captured calls

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global", **more: Any) -> None:
        graphs = self._graphs
        if not graphs.gpu.memory.stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self._ended:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if not self._registered:
            graphs.register()
            self._registered = True
        self._pool = next(graphs.graph_pools) if pool is None else (pool[0], pool[1])
        graphs.pools.begin(self._pool, lambda stream: stream != 0)
        graphs.capturing += 1
        self._first_call = len(graphs.gpu.calls.stream)

    def capture_end(self) -> None:
        self._graphs.capturing -= 1
        self._calls = self._graphs.gpu.calls.stream[self._first_call :]
        self._graphs.pools.end(self._pool)
        self._ended = True

    def replay(self) -> None:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._graphs.gpu.calls.add_graph(self._calls)

    def reset(self) -> None:
        if self._ended:
            self._graphs.pools.release(self._pool)
            self._ended = False

    def pool(self) -> PoolId:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def instantiate(self, *args: Any) -> None:
        """Do nothing: there is nothing to write."""

    register_generator_state = enable_debug_mode = debug_dump = instantiate

    def __del__(self) -> None:
        if self._registered and not self._graphs.gpu.memory.closed:
            self._graphs.unregister()
            self.reset()


class MemPool:
    """`torch.cuda.MemPool` while a virtual GPU is in use."""

    __module__ = "torch.cuda.memory"

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self._graphs = part_in_use(Graphs)
        if allocator is not None:
            self._graphs.gpu.refuse("a custom allocator", "use torch.cuda.MemPool() without one")
        self.id = next(self._graphs.user_pools)
        self.allocator = None
        self._graphs.pools.use(self.id)

    def use_count(self) -> int:
        users: int = self._graphs.pools.users(self.id)
        return users

    def snapshot(self, include_traces: bool = True) -> Any:
        return [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == self.id]

    def __del__(self) -> None:
        if hasattr(self, "id") and not self._graphs.gpu.memory.closed:
            self._graphs.pools.release(self.id)
            self._graphs.gpu.memory.allocator.empty_cache(self.id)


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Replace graphs, pools, and the functions that PyTorch's own code calls for them."""
    graphs = Graphs(gpu)
    gpu.add_part(graphs)
    memory = gpu.memory

    functions = {
        "_graph_pool_handle": lambda: next(graphs.user_pools),
        "_cuda_isCurrentStreamCapturing": lambda: bool(graphs.capturing and memory.stream),
        "_cuda_beginAllocateToPool": lambda device, pool: graphs.pools.begin(pool, lambda stream: True),
        "_cuda_beginAllocateCurrentStreamToPool": graphs.on_this_stream,
        "_cuda_beginAllocateCurrentThreadToPool": graphs.in_this_thread,
        "_cuda_endAllocateToPool": lambda device, pool: graphs.pools.end(pool),
        "_cuda_endAllocateCurrentStreamToPool": lambda device, pool: graphs.pools.end(pool),  # up to PyTorch 2.7
        "_cuda_releasePool": lambda device, pool: graphs.pools.release(pool),
        "_cuda_checkPoolLiveAllocations": lambda device, pool, expected: graphs.live_addresses(pool) == set(expected),
        "_cuda_getCheckpointState": lambda device, pool: checkpoint(memory.allocator, pool),
        "_host_emptyCache": lambda: None,
    }
    replacements.put_all(torch._C, functions)
    for home in (torch.cuda.graphs, torch.cuda.memory):
        for name, function in functions.items():
            replacements.put_existing(home, name, function)
    replacements.put_existing(torch.cuda.memory, "MemPoolContext", lambda pool: None)  # up to PyTorch 2.7
    replacements.put(torch.cuda.graph, "default_capture_stream", None)
    replacements.put_class((torch.cuda.graphs, torch.cuda), "CUDAGraph", CUDAGraph)
    replacements.put_class((torch.cuda.memory, torch.cuda), "MemPool", MemPool)
