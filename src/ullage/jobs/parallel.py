"""Strategies for a model by name over the ranks of a job: PyTorch's own DDP, FSDP2, tensor parallelism and pipelines.

PyTorch is imported only to spread a model, because shell completion needs the names fast.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ullage.errors import InvalidValue, ModelLacks, UnknownName

if TYPE_CHECKING:
    from torch import nn

    from ullage.jobs.model import Model
    from ullage.jobs.ranks import Rank

DDP, FSDP2, TP, PP = "ddp", "fsdp2", "tp", "pp"
PARALLEL = {
    DDP: "a whole model on each GPU (DistributedDataParallel)",
    FSDP2: "weights, gradients and optimizer state in pieces over all GPUs (fully_shard), block by block",
    TP: "each layer in pieces over the GPUs of a machine (parallelize_module by the model's own plan), and between "
    "machines as fsdp2",
    PP: "the layers in stages, one on each GPU (torch.distributed.pipelining, 1F1B)",
}
_PLAIN_STYLES = ("replicated", "isolated", "local")  # in plans of transformers: layers that are whole on each GPU


def check_parallel(name: str) -> str:
    """Return the name of a strategy; refuse an unknown one."""
    if name not in PARALLEL:
        raise UnknownName("way to spread a model", name, PARALLEL, hint="one of " + ", ".join(PARALLEL))
    return name


def data_ranks(how: str, rank: "Rank") -> int:
    """Return the number of groups of ranks with their own samples."""
    return {TP: rank.nodes, PP: 1}.get(how, rank.world_size)


def spread(model: "nn.Module", how: str, configuration: "Model", device: str) -> "nn.Module":
    """Move a model from the CPU to the GPU of this rank, and prepare it to train with the other ranks."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    join_ranks(how, configuration)
    if how == DDP:
        return torch.nn.parallel.DistributedDataParallel(model.to(device))
    ranks = distributed.get_world_size()
    if how == FSDP2:
        return _shard(model, init_device_mesh(device, (ranks,)), configuration, device)
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    mesh = init_device_mesh(device, (ranks // on_node, on_node), mesh_dim_names=("data", "tensor"))
    model = _split(model, mesh["tensor"], configuration)
    return _shard(model, mesh["data"], configuration, device) if on_node < ranks else model.to(device)


def join_ranks(how: str, configuration: "Model") -> int:
    """Join the other ranks, select the GPU of this rank, and return its number on this machine."""
    import torch

    if configuration.quantize is not None:
        raise InvalidValue(f"quantized weights are not spread over ranks by name; estimate a script ({how})")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return local


def casts_itself(how: str | None, ranks_on_node: int, ranks: int) -> bool:
    """Whether sharded weights are cast when they are gathered, so that autocast is not needed."""
    return how == FSDP2 or (how == TP and ranks_on_node < ranks)


def _shard(model: "nn.Module", mesh: Any, configuration: "Model", device: str) -> "nn.Module":
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    cast = configuration.types.autocast
    policy = (
        MixedPrecisionPolicy()
        if cast is None
        else MixedPrecisionPolicy(param_dtype=getattr(torch, cast), reduce_dtype=torch.float32)
    )
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to(device)


def repeated_blocks(model: "nn.Module") -> Iterator["nn.Module"]:
    """Yield the outermost blocks of a model that repeat in a row; each is gathered by itself."""
    from torch import nn

    for child in model.children():
        kinds = [type(item) for item in child.children() if next(item.parameters(), None) is not None]
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(kinds) > 1 and len(set(kinds)) == 1:
            yield from child.children()
        else:
            yield from repeated_blocks(child)


def _split(model: Any, mesh: Any, configuration: "Model") -> "nn.Module":
    """Apply tensor parallelism by the plan that comes with a model of transformers."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    given = getattr(model, "_tp_plan", None) or {}
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    wanted = {name: style for name, style in given.items() if not str(style).startswith(_PLAIN_STYLES)}
    unknown = sorted({str(style) for style in wanted.values()} - set(styles))
    if not wanted or unknown:
        plan_text = f"a plan with {', '.join(unknown)}" if unknown else "none"
        raise ModelLacks(
            f"{configuration.name}: tensor parallelism needs a plan that comes with the model (tp_plan of "
            f"transformers), got {plan_text}"
        )
    _check_heads(model, mesh.size())
    return parallelize_module(model, mesh, {name: styles[str(style)]() for name, style in wanted.items()})


def _check_heads(model: Any, ranks: int) -> None:
    config = getattr(model.config, "text_config", None) or model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise InvalidValue(f"{name} must be divisible by {ranks} for tensor parallelism, got {heads}")
