"""Scripts of `torch.distributed` with a group of one process: DDP and FSDP."""

import random

from drawn_scripts.parts import Part, Script, anything, convolutions, gpt, images, language, usual


def _start(chance: random.Random, script: Script, number: int, port: int) -> None:
    """How the group begins and ends."""
    script.imports.append("import torch.distributed as dist")
    way = chance.choice(("environment", "address", "file", "defaults"))
    if way == "address":
        begin = [f'dist.init_process_group("nccl", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)']
    elif way == "file":
        script.imports.append("import tempfile")
        begin = [
            "place = tempfile.mkdtemp()",
            'dist.init_process_group("nccl", init_method=f"file://{place}/group", rank=0, world_size=1)',
        ]
    else:
        script.imports.append("import os")
        given = "" if way == "environment" else ', device_id=torch.device("cuda", 0)'
        begin = [
            'os.environ.setdefault("MASTER_ADDR", "127.0.0.1")',
            f'os.environ.setdefault("MASTER_PORT", "{port}")',
            f'dist.init_process_group("nccl", rank=0, world_size=1{given})',
        ]
    script.before_model += [*begin, 'device = torch.device("cuda", 0)', "torch.cuda.set_device(device)"]
    if chance.random() < 0.7:
        script.at_end.append("dist.destroy_process_group()")


def replicated(chance: random.Random, number: int) -> str:
    """DistributedDataParallel with options drawn at random."""
    part = anything(chance)
    script = usual(chance, "Trains with DistributedDataParallel in one process.", part)
    _start(chance, script, number, 21_000 + number)
    script.imports.append("from torch.nn.parallel import DistributedDataParallel as DDP")
    options = ["device_ids=[0]"]
    if chance.random() < 0.3:
        options.append(f"bucket_cap_mb={chance.choice((1, 5, 50, 100))}")
    if chance.random() < 0.4:
        options.append("gradient_as_bucket_view=True")
    if chance.random() < 0.15:
        options.append("broadcast_buffers=False")
    kind = chance.choices(("", "static", "unused"), (6, 3, 2))[0]
    if kind == "static":
        options.append("static_graph=True")
    elif kind == "unused":
        options.append("find_unused_parameters=True")
    if "torchvision" in part.model and chance.random() < 0.3:
        script.after_model.append("model = nn.SyncBatchNorm.convert_sync_batchnorm(model)")
    script.after_model.append(f"model = DDP(model, {', '.join(options)})")
    hook = chance.choices(("", "bf16_compress_hook", "fp16_compress_hook", "allreduce_hook"), (7, 1, 1, 1))[0]
    if hook:
        script.imports.append(f"from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import {hook}")
        script.after_model.append(f"model.register_comm_hook(None, {hook})")
    elif chance.random() < 0.12 and "fused" not in script.optimizer:
        script.imports.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
        script.optimizer = "ZeroRedundancyOptimizer({0}, optimizer_class=torch.optim.AdamW, lr=1e-3)"
    if script.accumulate > 1 and chance.random() < 0.6 and kind != "static":
        script.no_sync = "model.no_sync()"
        script.imports.append("from contextlib import nullcontext")
    if chance.random() < 0.3:
        script.after_step += ["mean = loss.detach().clone()", "dist.all_reduce(mean, op=dist.ReduceOp.AVG)"]
    if chance.random() < 0.2:
        script.at_end.insert(0, "dist.barrier()")
    return script.text()


def sharded(chance: random.Random, number: int) -> str:
    """FSDP, the first and the second, with a group of one process."""
    return _second(chance, number) if number % 2 else _first(chance, number)


def _model(chance: random.Random) -> Part:
    return chance.choices((gpt, language, images, convolutions), (5, 3, 3, 1))[0](chance)


def _first(chance: random.Random, number: int) -> str:
    part = _model(chance)
    precision = chance.choice(("fp32", "fp32", "tf32", "amp_bf16"))
    script = usual(chance, "Trains with FSDP in one process.", part, precisions=(precision,))
    _start(chance, script, number, 22_000 + number)
    script.accumulate, script.steps = 1, 6
    script.imports.append("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP")
    options = ["device_id=0"]
    strategy = chance.choice(("", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    if strategy:
        script.imports.append("from torch.distributed.fsdp import ShardingStrategy")
        options.append(f"sharding_strategy=ShardingStrategy.{strategy}")
    if chance.random() < 0.5:
        options.append("use_orig_params=True")
    if precision == "fp32" and chance.random() < 0.6:
        script.imports.append("from torch.distributed.fsdp import MixedPrecision")
        options.append("mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)")
    if chance.random() < 0.6:
        if "GPT()" in part.model:
            script.imports += [
                "from functools import partial",
                "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy",
            ]
            options.append("auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})")
        elif "Config" not in part.model:  # tied weights stay together
            script.imports += [
                "from functools import partial",
                "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy",
            ]
            least = chance.choice((20_000, 100_000, 1_000_000))
            options.append(f"auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params={least})")
    if chance.random() < 0.2:
        options.append("limit_all_gathers=False")
    script.after_model.append(f"model = FSDP(model, {', '.join(options)})")
    if script.clip:
        script.clip = "model.clip_grad_norm_(1.0)"
    return script.text()


def _second(chance: random.Random, number: int) -> str:
    part = _model(chance)
    script = usual(chance, "Trains with fully_shard in one process.", part, precisions=("fp32", "tf32", "fp32"))
    _start(chance, script, number, 22_000 + number)
    script.imports.append("from torch.distributed.fsdp import fully_shard")
    options = []
    if chance.random() < 0.6 and ("GPT()" in part.model or "Config" in part.model):  # batch norm has float statistics
        script.imports.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
        script.after_model.append(
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
        options.append("mp_policy=policy")
    if chance.random() < 0.3:
        options.append("reshard_after_forward=False")
    given = "".join(f", {option}" for option in options)
    if part.definitions and "self.blocks" in part.definitions:
        script.after_model += ["for block in model.blocks:", f"    fully_shard(block{given})"]
    script.after_model.append(f"fully_shard(model{given})")
    script.optimizer = chance.choice(
        ("torch.optim.AdamW({0}, lr=3e-4)", "torch.optim.SGD({0}, lr=0.01, momentum=0.9)", "torch.optim.Adam({0})")
    )
    return script.text()
