"""Collective operators: every rank is assumed to hold the same data as this one, and nothing is sent.

So a sum over eight ranks is eight times the tensor, and a gather is eight copies. Data that only another rank knows
stays unchanged, with a note.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed

from ullage.virtual.call.native import in_backward
from ullage.virtual.call.plan import handler
from ullage.virtual.distributed.groups import Groups, work_that_is_done
from ullage.virtual.distributed.objects import vote_of_stages
from ullage.virtual.distributed.pipeline_bubble import bubble_of_schedule
from ullage.virtual.memory.libraries import NCCL_TO_ITSELF
from ullage.virtual.operators import custom
from ullage.virtual.state import GPUState
from ullage.virtual.values.known_values import LARGEST_KNOWN
from ullage.virtual.watching.step_calls import FORWARD

_c10d: Any = torch._C._distributed_c10d if torch.distributed.is_available() else None
_FROM_ANOTHER = "{what}: what another rank sends is not known; the tensor stayed as it was"

# torch/csrc/distributed/c10d/Ops.cpp; their outputs are their first argument, written in place
_NAMES = sorted(
    {schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
)
_TO_ONE = ("send", "recv_", "recv_any_source_")
_LARGEST_MOVED = 1 << 20  # elements of a CPU tensor whose values are moved


class Move(NamedTuple):
    """A tensor that a collective writes: pieces of other tensors (each with its first and last element), concatenated,
    times a factor."""

    target: torch.Tensor
    pieces: list[tuple[torch.Tensor, int, int]]
    times: int = 1


@handler(*(f"c10d.{name}.default" for name in _NAMES))
def collective(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the outputs the values they would have if all ranks were like this one; return finished work."""
    name = func._schema.name.split("::")[1]
    boxed = next((argument for argument in args if _is_boxed(argument, "ProcessGroup")), None)
    groups = gpu.part(Groups)
    if boxed is None or groups is None:
        return NotImplemented
    group = _c10d.ProcessGroup.unbox(boxed)
    targets = list(_tensors(args[0]))
    if any(tensor.is_cuda for tensor in targets):
        groups.communicate(group)
        groups.let_go()
        if in_backward() and gpu.release.keeps_what_is_sent and _is_asynchronous(func, args, kwargs):
            groups.keep(targets)
        if name in _TO_ONE:
            if gpu.calls.bubble is None:
                gpu.calls.bubble = bubble_of_schedule()
            groups.send_to_one(group, next((value for value in args[1:] if type(value) is int), None))
            if group.size() == 1:
                gpu.libraries.need_beyond(NCCL_TO_ITSELF)
        if groups.backend(group) == "nccl":
            _flatten(gpu, name, args)
    move(gpu, name, args, group)
    returned = len(func._schema.returns)
    if group.size() > 1 and any(tensor.is_cuda for tensor in targets):
        _exchange(gpu, groups, func, name, args, kwargs, group)
    done = work_that_is_done(targets)
    return None if returned == 0 else done if returned == 1 else (args[0], done)


# By the name of a collective in NCCL, the beginnings of its names here.
_OPERATIONS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter"),
    "reduce": ("reduce",),
    "all_gather": ("allgather", "_allgather", "all_gather"),
    "broadcast": ("broadcast",),
    "all_to_all": ("alltoall", "all_to_all"),
    **{name: (name,) for name in ("gather", "scatter", "send", "recv")},
}


def _operation(name: str) -> str | None:
    return next((operation for operation, begins in _OPERATIONS.items() if name.startswith(begins)), None)


def _exchange(
    gpu: GPUState, groups: Groups, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any
) -> None:
    """Record the data that ranks exchange, and who waits for it."""
    operation = _operation(name)
    if operation is None:
        return
    sizes = [sum(tensor.nbytes for tensor in _tensors(value)) for value in args[:2]]
    whole = max(sizes) * (group.size() if operation in ("gather", "scatter") and not min(sizes) else 1)
    asynchronous = _is_asynchronous(func, args, kwargs)
    peer = next((value for value in args[1:] if type(value) is int), -1) if name in _TO_ONE else -1
    number = groups.exchange(operation, group, whole, asynchronous and in_backward(), peer=peer)
    gpu.communication.remember(map(gpu.memory.span_of, _tensors(args[0])), number)
    if not asynchronous:
        gpu.communication.wait_for(gpu.memory.stream, number)


def _flatten(gpu: GPUState, name: str, args: tuple[Any, ...]) -> None:
    """Allocate the flat tensor by which NCCL gathers and scatters lists (ProcessGroupNCCL.cpp, `newLikeFlat`)."""
    lists = args[0] if name == "allgather_" else args[1] if name == "reduce_scatter_" else ()
    for each in lists:
        if len({tensor.numel() for tensor in each}) == 1 and (size := sum(tensor.nbytes for tensor in each)):
            gpu.memory.take_in_turn(size)


def move(gpu: GPUState, name: str, args: tuple[Any, ...], group: Any) -> None:
    """Carry out a collective by its name in Ops.cpp."""
    root = next((value for value in args[1:] if type(value) is int), group.rank())
    if name in ("recv_", "recv_any_source_") or (name in ("broadcast_", "scatter_") and root != group.rank()):
        vote = vote_of_stages() if name == "recv_" else None
        if vote is not None:
            gpu.values.set(args[0][0], vote)
        elif group.size() > 1:
            gpu.note("ranks", _FROM_ANOTHER.format(what=name.strip("_")))
        return
    with torch.no_grad():
        for each in _moves(name, args, group.rank(), group.size(), _factor(args, group.size())):
            _carry_out(gpu, each)


def _moves(name: str, args: tuple[Any, ...], rank: int, size: int, factor: int) -> Iterator[Move]:
    """Yield the writes of a collective, by its name in Ops.cpp or in Functional.cpp; a single tensor on either side
    holds the pieces of all ranks, a list of lists has a tensor for each."""
    first, second = args[0], args[1] if len(args) > 1 else None
    operation = _operation(name)
    if operation in ("all_reduce", "reduce"):
        for tensor in _list(first):
            yield Move(tensor, [_whole(tensor)], factor)
    elif name == "allgather_coalesced_":
        for outputs in first:
            for output, tensor in zip(outputs, second or (), strict=False):
                yield Move(output, [_whole(tensor)])
    elif operation in ("all_gather", "gather") and _is_nested(first):
        for outputs, tensor in zip(first, second or (), strict=False):
            for output in outputs:
                yield Move(output, [_whole(tensor)])
    elif operation == "all_gather":
        for output, tensor in zip(_list(first), _list(second), strict=True):
            yield Move(output, [_whole(tensor)] * size)
    elif operation in ("scatter", "reduce_scatter") and _is_nested(second):
        for output, inputs in zip(first, second or (), strict=False):
            yield Move(output, [_whole(inputs[rank])], factor)
    elif operation == "reduce_scatter":
        for output, tensor in zip(_list(first), _list(second), strict=True):
            yield Move(output, [(tensor, rank * output.numel(), (rank + 1) * output.numel())], factor)
    elif operation == "all_to_all" and not isinstance(first, torch.Tensor):
        for output in first:
            yield Move(output, [_whole((second or first)[rank])])
    elif operation == "all_to_all" and second is not None:
        splits = args[4] or [len(second) // size] * size
        row, begin = second.numel() // max(1, len(second)), sum(splits[:rank])
        yield Move(first, [(second, begin * row, (begin + splits[rank]) * row)] * size)


def _is_nested(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and not any(isinstance(each, torch.Tensor) for each in value or ())


def _carry_out(gpu: GPUState, each: Move) -> None:
    target = each.target
    if not target.is_cuda:
        if target.numel() <= _LARGEST_MOVED:
            for tensor in (target, *(piece[0] for piece in each.pieces)):
                gpu.host.fill(tensor)
            value = _put_together(each, each.pieces)
            if value is not None:
                target.copy_(value)
        return
    known = []
    if target.numel() <= LARGEST_KNOWN:
        for tensor, begin, end in each.pieces:
            value = gpu.values.known(tensor) if tensor.is_cuda else None
            if value is None:
                break
            known.append((value, begin, end))
    value = _put_together(each, known) if len(known) == len(each.pieces) else None
    if value is None:
        gpu.memory.written(target)
    else:
        gpu.values.set(target, value)


def _put_together(each: Move, pieces: list[tuple[torch.Tensor, int, int]]) -> torch.Tensor | None:
    flat = torch.cat([tensor.detach().reshape(-1)[begin:end] for tensor, begin, end in pieces])
    if flat.numel() != each.target.numel():
        return None  # ranks send pieces of different sizes
    return (flat if each.times == 1 or flat.dtype is torch.bool else flat * each.times).view(each.target.shape)


def _whole(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    return tensor, 0, tensor.numel()


def _list(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _factor(args: tuple[Any, ...], size: int) -> int:
    """Return the factor by which a reduction over all ranks scales the tensor of one."""
    for argument in args:
        if _is_boxed(argument, "ReduceOp"):
            known = "op" in argument._method_names()  # PyTorch before 2.9 does not say; sums are the most common
            return size if not known or argument.op() == int(_c10d.ReduceOp.RedOpType.SUM) else 1
    return 1


def _is_boxed(argument: Any, kind: str) -> bool:
    return isinstance(argument, torch.ScriptObject) and kind in str(argument._type())


def _is_asynchronous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[place] if place < len(args) else kwargs.get(argument.name, True))
    return False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# torch/csrc/distributed/c10d/Functional.cpp: operators that return new tensors, as DTensor calls them.


@handler("_c10d_functional")
def functional(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the output and run the collective behind the operator."""
    name = func._schema.name.split("::")[1]
    groups = gpu.part(Groups)
    if groups is None or not any(tensor.is_cuda for tensor in _tensors(args)):
        return NotImplemented
    if name == "wait_tensor":
        gpu.communication.wait_for_tensors(gpu.memory.stream, [gpu.memory.span_of(args[0])])
        return args[0]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if "group_name" not in named:  # written in Python
        behind = custom.handler_of(func)
        return NotImplemented if behind is None else behind(gpu, func, args, kwargs)
    group = named["group_name"]
    group = _c10d._resolve_process_group(group) if isinstance(group, str) else group
    groups.communicate(group)
    times = group.size() if named.get("reduce_op", "").lower() == "sum" else 1
    with gpu.mode, torch.no_grad():
        outputs = _functional_outputs(name, named)
    if outputs is None:
        return NotImplemented
    given = [named["tensor"]] if "tensor" in named else _list(named.get("input", named.get("inputs")))
    operation = _operation(name)
    if group.size() > 1 and operation is not None:
        size = max(sum(tensor.nbytes for tensor in tensors) for tensors in (outputs, given))
        # Called by a DTensor in a forward pass, so the ranks work on the same samples.
        forward = gpu.calls.part == FORWARD and not in_backward()
        of_activations = forward and any(tensor.is_floating_point() for tensor in given)
        number = groups.exchange(operation, group, size, of_activations=of_activations)
        gpu.communication.remember(map(gpu.memory.span_of, outputs), number)
    for output, tensor in zip(outputs, given, strict=False):
        arguments = (output, tensor, None, None, named.get("input_split_sizes"))
        for each in _moves(name, arguments, group.rank(), group.size(), times):
            _carry_out(gpu, each)
    single = str(func._schema.returns[0].type) == "Tensor"
    return outputs[0] if single else outputs


def _functional_outputs(name: str, named: dict[str, Any]) -> list[torch.Tensor] | None:
    given = _list(named.get("input", named.get("inputs", ())))
    if "out" in named:
        return [named["out"]]
    if name in ("all_reduce_", "all_reduce_coalesced_", "broadcast_"):
        return given
    if name in ("all_reduce", "all_reduce_coalesced", "broadcast"):
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in given]
    if name.startswith("all_gather_into_tensor"):
        return [_with_rows(tensor, len(tensor) * named["group_size"]) for tensor in given]
    if name.startswith("reduce_scatter_tensor"):
        return [_with_rows(tensor, len(tensor) // named["group_size"]) for tensor in given]
    if name == "all_to_all_single":
        return [_with_rows(given[0], sum(named["output_split_sizes"]))]
    return None


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.new_empty([rows, *tensor.shape[1:]])


@handler("fsdp.chunk_cat_mixed_dtype.default")
def gradients_in_one(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ChunkCat.cu, since PyTorch 2.15: float32 and bfloat16 are cast as they are copied, other mixes before."""
    gradients, out = args[0], kwargs["out"]
    types = {gradient.dtype for gradient in gradients}
    with gpu.mode:
        if len(types) > 1 and types <= {torch.float32, torch.bfloat16}:
            gpu.memory.written(out)
        else:
            same = gradients if len(types) == 1 else [gradient.to(out.dtype) for gradient in gradients]
            torch._chunk_cat(same, *args[1:], out=out)


# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: operators written in Python that only move data


@handler("fsdp")
def sharding(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the code behind an operator of FSDP."""
    home = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    name = func._schema.name.split("::")[1]
    names = (f"{name}_cuda", f"_{name}_default", name)  # the plain one may be what calls the operator
    behind = next((getattr(home, each) for each in names if hasattr(home, each)), None)
    if behind is None:
        return NotImplemented
    with gpu.mode:
        return behind(*args, **kwargs)
