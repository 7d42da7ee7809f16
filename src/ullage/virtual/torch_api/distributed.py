"""torch.distributed with a single process. PyTorch's own DDP and FSDP run; collectives have nothing to send.

Any backend becomes PyTorch's own fake backend. More than one process is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from ullage.virtual.libraries import NCCL_TO_ITSELF, SIDE_STREAMS
from ullage.virtual.native import in_backward
from ullage.virtual.operators.registry import handler
from ullage.virtual.replacements import Replacements
from ullage.virtual.state import GPUState

_c10d: Any = torch._C._distributed_c10d if torch.distributed.is_available() else None
_SEVERAL = "run it for one process with the batch that one GPU gets: every GPU of such a run takes about as much"
_NCCL_VERSION = 2, 28, 9  # of PyTorch 2.11, whose NCCL was measured
_NCCL = "what NCCL takes outside PyTorch's allocator was measured on an H200; it was counted as there"


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Replace process groups by one with a single process."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    groups = Groups(gpu)
    _in_use.append(groups)
    homes: tuple[Any, Any] = (torch.distributed, distributed_c10d)
    functions = _process_group(gpu, groups, distributed_c10d) | _object_collectives(groups, distributed_c10d)
    for name, value in functions.items():
        for home in homes:
            replacements.put(home, name, value)
    for home in homes:
        replacements.put(home, "is_nccl_available", lambda: True)
    replacements.put(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)  # the hook for bfloat16 asks
    # What DistributedDataParallel logs of its run needs CUDA's timers; its reducer starts them by counting iterations.
    replacements.put(homes[0].Logger, "set_runtime_stats_and_log", lambda self: None)
    if torch.version.cuda:
        replacements.put(homes[0].Reducer, "prepare_for_forward", lambda self: None)
    replacements.on_undo(register_optimizer_step_post_hook(lambda *step: groups.after_step()).remove)
    replacements.on_undo(lambda: _end_stand_in(groups))


class Groups:
    """The process groups of one virtual GPU, each with the backend that was asked for, and NCCL's communicators.

    NCCL makes a communicator at the first collective of a group, or with the group itself if its device was named.
    """

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self._backends: dict[str, str] = {}  # of groups that stand, by name
        self._communicators: set[str] = set()
        self._kept: list[tuple[int, list[torch.Tensor]]] = []
        self._sent: dict[int, tuple[int, Any]] = {}  # by the span's number: when it was last given to a collective
        self._seen_until = 0  # the watchdog has looked since; in allocator calls
        self._stepped = False
        self.eager = False

    @property
    def stand(self) -> bool:
        """Whether there is a group."""
        return bool(self._backends)

    def add(self, group: Any, backend: str | None) -> None:
        """A group was made."""
        default = next(iter(self._backends.values()), "nccl")
        self._backends[group.group_name] = default if backend is None else backend.split(":")[-1]
        if self.eager:
            self.communicate(group)

    def backend(self, group: Any) -> str:
        """The backend of a group, as it was named."""
        return self._backends.get(group.group_name, "nccl")

    def communicate(self, group: Any) -> None:
        """The group's tensors on the GPU are about to be sent."""
        if self.backend(group) != "nccl":
            self._gpu.libraries.need_beyond(SIDE_STREAMS)
        elif group.group_name not in self._communicators:
            self._communicators.add(group.group_name)
            self._gpu.libraries.make_communicator()
            if not self._gpu.spec.context_measured:
                self._gpu.note("distributed", _NCCL)

    # DDP waits for the futures of its collectives and not for the works, so nobody but NCCL's watchdog lets go of the
    # tensors (ProcessGroupNCCL.cpp, `stashed_for_allocator_safety_`). It looks every 100 ms, and what it found to be
    # done is let go with the next collective (`workEnqueue`). On an H200 a call of the allocator came every 17 to 50
    # microseconds. The first step of an optimizer took 28 to 445 ms, since its kernels are loaded: in the recorded runs
    # the watchdog had looked before DDP built its buckets anew. With `static_graph` it does so a step later, when steps
    # are fast: then the old buckets are there beside the new ones.

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Keep what an asynchronous collective of DDP was given, until the watchdog has seen that it is done."""
        memory = self._gpu.memory
        self._kept.append((memory.clock, tensors))
        for span in map(memory.span_of, tensors):
            if span is not None:
                self._sent[span.index] = memory.clock, span
        self._count()

    def after_step(self) -> None:
        """An optimizer has made a step; the first one takes long."""
        if not self._stepped:
            self._stepped, self._seen_until = True, self._gpu.memory.clock

    def let_go(self) -> None:
        """A collective begins: drop what the watchdog has found, and note what it would hold if it came late."""
        memory = self._gpu.memory
        found = max(self._seen_until, memory.clock - _WATCHDOG)
        self._kept = [(since, kept) for since, kept in self._kept if since > found]
        oldest = memory.clock - _LATE_WATCHDOG
        self._sent = {number: (since, span) for number, (since, span) in self._sent.items() if since > oldest}
        late = sum(span.size for _, span in self._sent.values() if span.end >= 0)
        memory.most_late = max(memory.most_late, late)
        self._count()

    def _count(self) -> None:
        spans = {span.index: span for _, kept in self._kept for span in map(self._gpu.memory.span_of, kept) if span}
        self._gpu.memory.held_back = sum(span.size for span in spans.values())

    def remove(self, group: Any) -> None:
        """A group, or all of them, was destroyed; what it took may come back, but its peak was there."""
        names = list(self._backends) if group is None else [group.group_name]
        for name in names:
            self._backends.pop(name, None)
            self._communicators.discard(name)
        if not self._backends:
            self._kept.clear()


_in_use: list[Groups] = []


def _process_group(gpu: GPUState, groups: Groups, home: Any) -> dict[str, Any]:
    init, get_backend, destroy = home.init_process_group, home.get_backend, home.destroy_process_group
    new, barrier = home.new_group, home.barrier

    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """`torch.distributed.init_process_group`."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the stand-in)

        processes = _processes(init_method, world_size, store)
        if processes > 1:
            gpu.refuse(f"torch.distributed with {processes} processes", _SEVERAL)
        init("fake", store=_c10d.HashStore(), rank=0, world_size=1)
        groups.eager = options.get("device_id") is not None
        groups.add(home.group.WORLD, str(backend or "nccl"))

    def backend_of(group: Any = None) -> str:
        """`torch.distributed.get_backend`."""
        found = str(get_backend(group))
        return groups.backend(group or home.group.WORLD) if found == "fake" else found

    def destroy_process_group(group: Any = None) -> None:
        """`torch.distributed.destroy_process_group`."""
        groups.remove(None if group is home.group.WORLD else group)
        destroy(group)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        """`torch.distributed.new_group`."""
        options.pop("pg_options", None)
        made = new(ranks, timeout, None, **options)
        if isinstance(made, _c10d.ProcessGroup):
            groups.add(made, None if backend is None else str(backend))
        return made

    def wait_for_all(group: Any = None, *args: Any, **options: Any) -> Any:
        """`torch.distributed.barrier`, which NCCL does by summing one number."""
        group = group or home.group.WORLD
        if groups.stand and groups.backend(group) == "nccl":
            groups.communicate(group)
            gpu.memory.give_back(gpu.memory.take(4))
            gpu.memory.read_back()
            return _work_that_is_done([]) if options.get("async_op") else None
        return barrier(group, *args, **options)

    return {
        "init_process_group": init_process_group,
        "get_backend": backend_of,
        "destroy_process_group": destroy_process_group,
        "new_group": new_group,
        "barrier": wait_for_all,
    }


def _processes(init_method: str | None, world_size: int, store: Any) -> int:
    """How many processes are asked for, found and checked in PyTorch's order: argument, address, environment."""
    if world_size > 0:
        return world_size
    if init_method and not init_method.startswith("env://"):
        return int(parse_qs(urlparse(init_method).query).get("world_size", ["1"])[0])
    if store is None:
        for name in ("RANK", "WORLD_SIZE"):
            if name not in os.environ:
                raise ValueError(
                    f"Error initializing torch.distributed using env:// rendezvous: "
                    f"environment variable {name} expected, but not set"
                )
        return int(os.environ["WORLD_SIZE"])
    return 1


def _object_collectives(groups: Groups, home: Any) -> dict[str, Any]:
    """Python objects stay as they are: through the GPU they would lose their data."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[0] = obj

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **options: Any) -> None:
        if object_gather_list:
            object_gather_list[0] = obj

    def broadcast_object_list(object_list: list[Any], *args: Any, **options: Any) -> None:
        return

    def scatter_object_list(output: list[Any], inputs: list[Any] | None = None, *args: Any, **options: Any) -> None:
        if inputs:
            output[0] = inputs[0]

    made = {
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": broadcast_object_list,
        "scatter_object_list": scatter_object_list,
    }
    return {name: _if_alone(groups, home, value, getattr(home, name)) for name, value in made.items()}


def _if_alone(groups: Groups, home: Any, here: Any, original: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        if not groups.stand:
            return original(*args, **options)
        group = options.get("group") or home.group.WORLD
        if groups.backend(group) == "nccl":  # whose objects travel by the GPU
            groups.communicate(group)
        return here(*args, **options)

    return call


def _end_stand_in(groups: Groups) -> None:
    if groups.stand and torch.distributed.is_initialized():
        sys.modules["torch.distributed.distributed_c10d"].destroy_process_group()
    _in_use.remove(groups)


# Collective operators of a process group of one: what comes out is what went in, and nothing is sent.

# torch/csrc/distributed/c10d/Ops.cpp; their outputs are their first argument, written in place
_NAMES = sorted(
    {schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
)


_WATCHDOG, _LATE_WATCHDOG = 2000, 6000  # calls of the allocator until it looks: in the mean, and at most
_TO_ITSELF = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


@handler(*(f"c10d.{name}.default" for name in _NAMES))
def collective(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the inputs to the outputs, unless they are the same tensors, and return work that is done."""
    targets = list(_tensors(args[0]))
    if not any(tensor.is_cuda for tensor in targets):
        return gpu.host.call(func, args, kwargs)
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and _in_use and "ProcessGroup" in str(argument._type()):
            _in_use[-1].communicate(_c10d.ProcessGroup.unbox(argument))
            _in_use[-1].let_go()
    if in_backward() and gpu.release.keeps_what_is_sent and _is_asynchronous(func, args, kwargs):
        _in_use[-1].keep(targets)
    if func._schema.name in _TO_ITSELF:
        gpu.libraries.need_beyond(NCCL_TO_ITSELF)
    sources = list(_tensors(args[1])) if len(args) > 1 else []
    with gpu.counting(), torch.no_grad():
        for target, source in zip(targets, sources, strict=False):
            target.copy_(source.view_as(target))
            gpu.values.copied(source, target)
    returned = len(func._schema.returns)
    done = _work_that_is_done(targets)
    return None if returned == 0 else done if returned == 1 else (args[0], done)


def _is_asynchronous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[place] if place < len(args) else kwargs.get(argument.name, True))
    return False


def _work_that_is_done(results: list[torch.Tensor]) -> Any:
    c10d: Any = torch._C._distributed_c10d
    future: Any = torch.futures.Future()
    future.set_result(results)
    return c10d._create_work_from_future(future).boxed()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@handler("fsdp.chunk_cat_mixed_dtype.default")
def gradients_in_one(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ChunkCat.cu, since PyTorch 2.15: float32 and bfloat16 are cast as they are copied, other mixes before."""
    gradients, out = args[0], kwargs["out"]
    types = {gradient.dtype for gradient in gradients}
    with gpu.counting():
        if len(types) > 1 and types <= {torch.float32, torch.bfloat16}:
            gpu.memory.written(out)
        else:
            same = gradients if len(types) == 1 else [gradient.to(out.dtype) for gradient in gradients]
            torch._chunk_cat(same, *args[1:], out=out)


# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: operators written in Python that only move data


@handler("fsdp")
def sharding(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what stands behind an operator of FSDP."""
    home = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    name = func._schema.name.split("::")[1]
    names = (f"{name}_cuda", f"_{name}_default", name)  # the plain one may be what calls the operator
    behind = next((getattr(home, each) for each in names if hasattr(home, each)), None)
    if behind is None:
        return NotImplemented
    with gpu.counting():
        return behind(*args, **kwargs)
