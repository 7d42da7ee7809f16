"""A training as one rank of many: how the model is spread over the ranks, and some steps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rank_trainings.models import Row, build, checkpoint_blocks
from rank_trainings.pipelines import schedule_of

STEPS = 4


def _types(row: Row) -> tuple[torch.dtype | None, torch.dtype | None]:
    kinds = {"fp32": (None, None), "bf16": (torch.bfloat16, torch.bfloat16), "mixed": (torch.bfloat16, torch.float32)}
    return kinds.get(row["precision"], (None, None))


def _checkpointed(row: Row, model: nn.Module, block: type[nn.Module]) -> None:
    if row["checkpointing"]:
        checkpoint_blocks(model, block)


def _tensor_parallel(row: Row, model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    over_sequence = row["sequence_parallel"]
    spread = Shard(1) if over_sequence else Replicate()
    outer: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=spread),
        "output": ColwiseParallel(input_layouts=spread, output_layouts=Replicate()),
    }
    inner: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "attention.wo": RowwiseParallel(output_layouts=spread),
        "feed_forward.w2": RowwiseParallel(output_layouts=spread),
    }
    if over_sequence:
        outer["norm"] = SequenceParallel()
        inner |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        inner |= {name: PrepareModuleInput(**gathered) for name in ("attention", "feed_forward")}
    parallelize_module(model, mesh, outer)
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, inner)


def _fully_shard(row: Row, model: nn.Module, block: type[nn.Module], mesh: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    param, reduce = _types(row)
    options = {
        "mesh": mesh,
        "reshard_after_forward": row["reshard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce),
        "offload_policy": CPUOffloadPolicy() if row["offload"] else OffloadPolicy(),
    }
    blocks = [module for module in model.modules() if isinstance(module, block)]
    for module in blocks:
        fully_shard(module, **options)
    fully_shard(model, **options)
    if row["prefetch"]:
        for here, there in zip(blocks, blocks[1:], strict=False):
            here.set_modules_to_forward_prefetch([there])  # type: ignore[operator]
            there.set_modules_to_backward_prefetch([here])  # type: ignore[operator]


def _fsdp1(row: Row, model: nn.Module, block: type[nn.Module]) -> nn.Module:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    param, reduce = _types(row)
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        sharding_strategy=ShardingStrategy[row["sharding"]],
        mixed_precision=MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param) if param else None,
        backward_prefetch=prefetch[row["backward_prefetch"]],
        forward_prefetch=row["prefetch"],
        cpu_offload=CPUOffload(offload_params=True) if row["offload"] else None,
        use_orig_params=row["original_parameters"],
        limit_all_gathers=row["limit_all_gathers"],
        device_id=torch.device("cuda", 0),
        param_init_fn=None if row["made_on"] != "meta" else _on_gpu,
    )


def _on_gpu(module: nn.Module) -> None:
    module.to_empty(device="cuda", recurse=False)


def _ddp(row: Row, model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    made = nn.parallel.DistributedDataParallel(
        model.cuda(),
        device_ids=[0],
        bucket_cap_mb=row["bucket_mb"],
        gradient_as_bucket_view=row["bucket_views"],
        static_graph=row["static_graph"],
        find_unused_parameters=row["find_unused"],
    )
    if row["hook"] == "powersgd":
        made.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
        )
    elif row["hook"]:
        made.register_comm_hook(None, getattr(default_hooks, f"{row['hook']}_compress_hook"))
    return made


def spread(row: Row) -> nn.Module:
    """Build the model and spread it over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    strategy, ranks = row["strategy"], row["ranks"]
    if row["model"] != "own":
        import transformers.models.gpt2.modeling_gpt2  # which makes tensors: not inside the `with`
        import transformers.models.llama.modeling_llama
        import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    with torch.device(row["made_on"]):
        model, block = build(row)
    if row["precision"] == "pure_bf16":
        model = model.to(torch.bfloat16)
    if strategy == "ddp":
        _checkpointed(row, model, block)
        return _ddp(row, model)
    if strategy == "fsdp1":
        made = _fsdp1(row, model, block)
        _checkpointed(row, made, block)
        return made
    if strategy == "tp":
        mesh = init_device_mesh("cuda", (ranks,))
        _tensor_parallel(row, model, mesh)
        _checkpointed(row, model, block)
    else:
        if strategy == "fsdp2":
            data = init_device_mesh("cuda", (ranks,))
        elif strategy == "hsdp":
            data = init_device_mesh("cuda", (row["copies"], ranks // row["copies"]), mesh_dim_names=("copy", "shard"))
        else:
            both = init_device_mesh("cuda", (ranks // row["split"], row["split"]), mesh_dim_names=("data", "tensor"))
            data = both["data"]
            _tensor_parallel(row, model, both["tensor"])
        _checkpointed(row, model, block)
        _fully_shard(row, model, block, data)
    if row["made_on"] == "meta":
        model.to_empty(device="cpu" if row["offload"] else "cuda")
    else:
        model = model if row["offload"] else model.cuda()
    return model


def train(row: Row) -> None:
    """Some steps, as one rank of so many; the process group is made here."""
    import torch.distributed as dist

    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    if row["strategy"] == "pp":
        _train_pipeline(row, torch.device("cuda", 0))
    else:
        _train_model(row)
    dist.destroy_process_group()


def _train_pipeline(row: Row, device: torch.device) -> None:
    parts, schedule, own = schedule_of(row, device)
    optimizer = optimizer_of(row, parts)
    last = row["ranks"] * (2 if row["schedule"] == "interleaved" else 1) - 1
    for _ in range(STEPS):
        tokens = torch.randint(0, row["vocabulary"], (row["batch"], row["length"])).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=row["precision"] == "autocast"):
            schedule.step(*([tokens] if 0 in own else []), **({"target": tokens} if last in own else {}))
        if row["clip"]:
            nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _train_model(row: Row) -> None:
    model = spread(row)
    optimizer = optimizer_of(row, model)
    autocast = row["precision"] == "autocast"
    shape = (row["batch"], row["length"])
    for _ in range(STEPS):
        for part in range(row["accumulation"]):
            tokens = torch.randint(0, row["vocabulary"], shape).cuda()
            last = part == row["accumulation"] - 1
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast), _sync(row, model, last):
                out = model(tokens)
                logits = out if isinstance(out, torch.Tensor) else out.logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
                loss.backward()
        if row["clip"]:
            whole = row["strategy"] == "fsdp1"
            model.clip_grad_norm_(1.0) if whole else nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if row["reads_loss"]:
            loss.item()


def optimizer_of(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all parameters."""
    optimizers: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adamw_fused": functools.partial(torch.optim.AdamW, fused=True),
        "sgdm": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    kinds: dict[Any, list[nn.Parameter]] = {}  # one call of the optimizer takes tensors of one kind and mesh only
    for parameter in model.parameters():
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    made: torch.optim.Optimizer = optimizers[row["optimizer"]]([{"params": some} for some in kinds.values()])
    return made


def _sync(row: Row, model: nn.Module, last: bool) -> Any:
    """Gradients that are summed over several batches are sent with the last of them."""
    if row["strategy"] in ("fsdp1", "ddp"):
        return contextlib.nullcontext() if last else model.no_sync()  # type: ignore[operator]
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    return contextlib.nullcontext()
