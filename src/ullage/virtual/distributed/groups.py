"""torch.distributed: this process is one rank of a world of any size.

PyTorch's own DDP, FSDP and DTensor run. Any backend becomes PyTorch's fake one, under its own name; `collectives.py`
implements collectives.
"""

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.distributed.objects import (
    ObjectMessages,
    install_checkpoints,
    install_zero_redundancy,
    object_collectives,
)
from ullage.virtual.memory.libraries import SIDE_STREAMS
from ullage.virtual.state import GPUState

_c10d: Any = torch._C._distributed_c10d if torch.distributed.is_available() else None
_NCCL_VERSION = 2, 28, 9  # of PyTorch 2.11, whose NCCL was measured
_ONE_OF_MANY = "rank {rank} of {size} was followed; the others are assumed to have the same shapes and to send the same"
_CONNECTIONS = (
    "what NCCL takes outside PyTorch's allocator to reach other ranks was counted by the sizes in its source, for "
    "machines that are sold with this GPU; it was not measured"
)
_NCCL = "what NCCL takes outside PyTorch's allocator was measured on an H200; it was counted as there"


def install(gpu: GPUState, replacements: Replacements) -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    groups = Groups(gpu)
    gpu.add_part(groups)
    homes: tuple[Any, Any] = (torch.distributed, distributed_c10d)
    functions = _process_groups(gpu, groups, distributed_c10d) | object_collectives(gpu, groups, distributed_c10d)
    for name, value in functions.items():
        for home in homes:
            replacements.put_existing(home, name, value)
    for home in homes:
        replacements.put(home, "is_nccl_available", lambda: True)
        if not hasattr(home, "ProcessGroupNCCL"):  # a build without CUDA
            replacements.put(home, "ProcessGroupNCCL", _ProcessGroupNCCL)
        replacements.put_existing(home, "default_pg_nccl_timeout", timedelta(minutes=10))
    replacements.put(_c10d.ProcessGroup, "_start_coalescing", lambda group, device: None)  # PyTorch 2.6 has no fake one
    replacements.put(_c10d.ProcessGroup, "_end_coalescing", lambda group, device: _done([]))
    replacements.put(_c10d.Work, "wait", _wait(gpu, groups))
    replacements.put(torch._C.Future, "then", _then(groups))
    replacements.put(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)  # the hook for bfloat16 reads it
    # The log of DistributedDataParallel needs CUDA's timers; its reducer starts them by counting iterations.
    replacements.put(homes[0].Logger, "set_runtime_stats_and_log", lambda self: None)
    if torch.version.cuda:
        replacements.put(homes[0].Reducer, "prepare_for_forward", lambda self: None)
    install_zero_redundancy(gpu, groups, replacements)
    install_checkpoints(groups, replacements)
    replacements.put(sys, "excepthook", sys.excepthook)  # `init_process_group` sets one of its own

    def end_stand_in() -> None:
        if groups.stand and torch.distributed.is_initialized():
            distributed_c10d.destroy_process_group()

    replacements.on_undo(end_stand_in)


class _ProcessGroupNCCL:
    """Options and a class that a build without CUDA lacks: scripts make options, and PyTorch checks backends."""

    class Options:
        """Options of a communicator, without an effect on messages."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


class Groups:
    """The process groups of one virtual GPU, each with its requested backend, and NCCL's communicators, which are made
    at the first collective of a group, or with the group if its device was named."""

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self._backends: dict[str, str] = {}  # of existing groups, by name
        self._ranks: dict[str, list[int]] = {}
        self._communicators: set[str] = set()
        self._stashed: list[tuple[int, list[torch.Tensor]]] = []
        self._sent: dict[int, tuple[int, Any]] = {}  # by the span's number: when it was last given to a collective
        self._loaded = 0  # kernels when a collective was last kept
        self.eager = False  # whether communicators are made with their groups
        self.messages = ObjectMessages(gpu)
        self.made = 0  # so far
        self.apart: list[int] = []  # the ranks of a group in which one sends to another: they may have other parts

    @property
    def stand(self) -> bool:
        return bool(self._backends)

    def add(self, group: Any, backend: str, ranks: list[int], eager: bool) -> None:
        """Add a group of these ranks, or of all; with a device, all groups get their communicators at once."""
        if not self._backends and group.size() > 1:
            self._gpu.note("ranks", _ONE_OF_MANY.format(rank=group.rank(), size=group.size()))
        self.made += 1
        self._backends[group.group_name] = backend
        self._ranks[group.group_name] = list(ranks) or list(range(group.size()))
        self.eager |= eager
        if self.eager:
            self.communicate(group)

    def backend(self, group: Any) -> str:
        return self._backends.get(group.group_name, "nccl")

    def send_to_one(self, group: Any, peer: int | None = None) -> None:
        """Record a message to one rank, as between pipeline stages; a tensor goes from GPU to GPU."""
        if group.size() > 1 and not self.apart:
            self.apart = torch.distributed.get_process_group_ranks(group)
        if group.size() > 1 and peer is not None:
            self._connect(group, peer)

    def _connect(self, group: Any, peer: int) -> None:
        if self.backend(group) == "nccl":
            self._gpu.libraries.connect_to(peer, group.group_name, *self._place_of(group))

    def communicate(self, group: Any) -> None:
        """Prepare to send the group's GPU tensors."""
        if self.backend(group) != "nccl":
            self._gpu.libraries.need_beyond(SIDE_STREAMS)
        elif group.group_name not in self._communicators:
            self._communicators.add(group.group_name)
            self._gpu.libraries.make_communicator(*self._place_of(group))
            if group.size() > 1:
                self._gpu.note("connections", _CONNECTIONS)
            if not self._gpu.spec.context_measured:
                self._gpu.note("distributed", _NCCL)

    # DDP waits for the futures of its collectives and not for the works, so only NCCL's watchdog releases the tensors
    # (ProcessGroupNCCL.cpp, `stashed_for_allocator_safety_`). It wakes every 100 ms; on an H200 a call of the allocator
    # came every 17 to 50 microseconds. A kernel is loaded at its first use, which takes some 20 ms: with the ten of a
    # foreach AdamW, or the six that clip gradients, the watchdog had woken before DDP rebuilt its buckets; with the
    # two or three of SGD or of a fused AdamW it had not.

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Keep the tensors of an asynchronous collective of DDP until the watchdog has seen its end."""
        memory = self._gpu.memory
        self._loaded = self._gpu.calls.operators
        self._stashed.append((memory.clock, tensors))
        for span in map(memory.span_of, tensors):
            if span is not None:
                self._sent[span.index] = memory.clock, span
        self._count()

    def let_go(self) -> None:
        """Begin a collective: drop tensors that the watchdog has seen, and record those of a late watchdog."""
        memory = self._gpu.memory
        slow = self._gpu.calls.operators - self._loaded >= _KERNELS_OF_A_LOOK
        looked = memory.clock if slow else memory.clock - _WATCHDOG
        self._stashed = [(since, tensors) for since, tensors in self._stashed if since > looked]
        oldest = memory.clock - _LATE_WATCHDOG
        self._sent = {number: (since, span) for number, (since, span) in self._sent.items() if since > oldest}
        late = sum(span.size for _, span in self._sent.values() if span.end >= 0)
        memory.waiting.most_late = max(memory.waiting.most_late, late)
        self._count()

    def _count(self) -> None:
        stashed = [span for _, tensors in self._stashed for span in map(self._gpu.memory.span_of, tensors) if span]
        spans = {span.index: span for span in stashed}
        self._gpu.memory.held_back = sum(span.size for span in spans.values())

    def exchange(
        self,
        name: str,
        group: Any,
        size: int,
        until_backward_ends: bool = False,
        *,
        peer: int = -1,
        of_activations: bool = False,
    ) -> int:
        """Begin a collective of this size among several ranks, or with one `peer`; return its number."""
        ranks, nodes = self._place_of(group)
        if name == "all_to_all":
            for peer in set(range(ranks)) - {group.rank()}:
                self._connect(group, peer)
        numbers = {"bytes": size, "ranks": ranks, "nodes": nodes, "ranks_per_node": self._ranks_per_node()}
        numbers |= {"joins": int(until_backward_ends), "peer": peer, "activations": int(of_activations)}
        return self._gpu.communication.begin(name, group.group_name, self._gpu.memory.stream, **numbers)

    def _ranks_per_node(self) -> int:
        given = self._gpu.environment.get("LOCAL_WORLD_SIZE")
        return int(given or max(map(len, self._ranks.values()), default=1))

    def _place_of(self, group: Any) -> tuple[int, int]:
        """Return the number of ranks of a group, and of their machines."""
        if group.size() == 1:
            return 1, 1
        ranks = self._ranks.get(group.group_name) or torch.distributed.get_process_group_ranks(group)
        return len(ranks), len({rank // self._ranks_per_node() for rank in ranks})

    def remove(self, group: Any) -> None:
        """Remove a group, or all of them. Their memory may come back, but its peak remains."""
        names = list(self._backends) if group is None else [group.group_name]
        for name in names:
            self._backends.pop(name, None)
            self._communicators.discard(name)
        if not self._backends:
            self._stashed.clear()


def _process_groups(gpu: GPUState, groups: Groups, home: Any) -> dict[str, Any]:
    """Return replacements for the functions behind PyTorch's `init_process_group` and `new_group`, and for waits."""
    new, barrier, destroy = home._new_process_group_helper, home.barrier, home.destroy_process_group
    home_split = home.split_group

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
        yield _c10d.HashStore(), *_place(url, rank, world_size)

    def new_group(
        group_size: int, group_rank: int, ranks: list[int], backend: Any, store: Any, *args: Any, **options: Any
    ) -> tuple[Any, Any]:
        """`_new_process_group_helper`: any backend becomes PyTorch's fake one, which keeps its name."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the stand-in)

        with_device = options.pop("device_id", None) is not None
        options.pop("backend_options", None)
        if args:  # backend_options follows the name of the group
            args = (args[0], None, *args[2:])
        group, group_store = new(group_size, group_rank, ranks, home.Backend("fake"), store, *args, **options)
        if isinstance(group, _c10d.ProcessGroup):
            # The backend of the GPU: `cuda:nccl,cpu:gloo` and no name mean NCCL.
            by_device = dict(part.split(":", 1) for part in str(backend).split(",") if ":" in part)
            name = by_device.get("cuda", next(iter(by_device.values()), str(backend)))
            wanted = home.Backend("nccl" if name == "undefined" else name)
            home._world.pg_map[group] = wanted, home._world.pg_map[group][1]
            groups.add(group, wanted, ranks, eager=with_device)
        return group, group_store

    def wait_for_all(group: Any = None, *args: Any, **options: Any) -> Any:
        """`torch.distributed.barrier`, which NCCL does by summing one number."""
        group = group or home.group.WORLD
        if groups.stand and groups.backend(group) == "nccl":
            groups.communicate(group)
            gpu.memory.take_in_turn(4)
            gpu.memory.read_back()
            return _done([]) if options.get("async_op") else None
        return barrier(group, *args, **options)

    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **options: Any) -> Any:
        if not groups.eager or not split_ranks:
            return home_split(parent_pg, split_ranks, *args, **options)  # PyTorch raises its own error
        parent = torch.distributed.get_process_group_ranks(parent_pg or home.group.WORLD)
        parts = [[parent[place] for place in part] for part in split_ranks]
        own = next((part for part in parts if torch.distributed.get_rank() in part), None)
        return None if own is None else home.new_group(own, use_local_synchronization=True)

    def destroy_process_group(group: Any = None) -> None:
        groups.remove(None if group is home.group.WORLD else group)
        destroy(group)

    return {
        "rendezvous": rendezvous,
        "_new_process_group_helper": new_group,
        "barrier": wait_for_all,
        "monitored_barrier": lambda *args, **options: None,
        "split_group": split_group,
        "destroy_process_group": destroy_process_group,
    }


def _place(url: str, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rank and the number of ranks, read and checked in PyTorch's order: argument, address, environment."""
    query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
    numbers = {}
    for name, given in (("RANK", rank), ("WORLD_SIZE", world_size)):
        value = str(given) if given >= 0 else query.get(name.lower())
        if value is None and url.startswith("env://"):
            value = os.environ.get(name)
            if value is None:
                raise ValueError(
                    f"Error initializing torch.distributed using env:// rendezvous: "
                    f"environment variable {name} expected, but not set"
                )
        numbers[name] = int(value or (0 if name == "RANK" else 1))
    return numbers["RANK"], numbers["WORLD_SIZE"]


def _wait(gpu: GPUState, groups: Groups) -> Any:
    """`Work.wait`: the current stream continues after the collective."""
    wait: Any = _c10d.Work.wait

    def call(work: Any, *args: Any, **options: Any) -> Any:
        if groups.stand and gpu.communication.count:
            result = work.get_future().value()
            tensors = [value for value in result if isinstance(value, torch.Tensor)]
            gpu.communication.wait_for_tensors(gpu.memory.stream, map(gpu.memory.span_of, tensors))
        return wait(work, *args, **options)

    return call


def _then(groups: Groups) -> Any:
    """`Future.then`: code after a collective runs in a stream of the pool (ATen/core/ivalue_inl.h)."""
    then: Any = torch._C.Future.then

    def call(future: Any, callback: Any) -> Any:
        def in_stream(done: Any) -> Any:
            with torch.cuda.stream(torch.cuda.Stream()):
                return callback(done)

        return then(future, in_stream if groups.stand else callback)

    return call


def work_that_is_done(results: list[torch.Tensor]) -> Any:
    return _done(results).boxed()


def _done(results: list[torch.Tensor]) -> Any:
    future: Any
    if results:
        future = torch._C.fork(lambda: results)  # with the type of the list, which DDP's hooks in C++ check
    else:
        future = torch.futures.Future()
        future.set_result(results)
    return _c10d._create_work_from_future(future)


_KERNELS_OF_A_LOOK = 6  # kernels that are loaded while the watchdog sleeps
_WATCHDOG, _LATE_WATCHDOG = 2000, 6000  # calls of the allocator until it wakes: on average, and at most
