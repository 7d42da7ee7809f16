"""Rank 0 of many: DDP, FSDP, tensor parallelism and mixtures of them, drawn at random.

    python benchmarks/many_ranks.py draw --count 60 --seed 1 > ranks.jsonl
    python benchmarks/many_ranks.py measure ranks.jsonl --out ranks_h200.jsonl.gz

The second runs each on a GPU in a process of its own. PyTorch's fake process group has as many ranks as the line says
and sends nothing, so one GPU is asked for what the first of them would be; DDP has a real group of one. It needs a GPU,
PyTorch and transformers, and nothing else of this project.

    python benchmarks/many_ranks.py compare ranks_h200.jsonl.gz

estimates the same trainings without a GPU and prints how far off the estimates are, by strategy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 4
GIB = 1 << 30
Row = dict[str, Any]


# The models: a small Llama of our own, for which plans of tensor parallelism are easy to write, and those of others.


class Attention(nn.Module):
    """Self-attention with grouped heads."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q, k, v = (layer(x).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, middle, bias=False), nn.Linear(width, middle, bias=False)
        self.w2 = nn.Linear(middle, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width: int, heads: int, groups: int, middle: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, groups), FeedForward(width, middle)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        width = row["width"]
        self.tok_embeddings = nn.Embedding(row["vocabulary"], width)
        sizes = (width, row["heads"], row["groups"], row["middle"])
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(row["layers"]))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, row["vocabulary"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def build(row: Row) -> tuple[nn.Module, type[nn.Module]]:
    """The model on the device that is current, and the class of its blocks."""
    if row["model"] == "own":
        return Transformer(row), Block
    import transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    heads = {"num_attention_heads": row["heads"], "num_key_value_heads": row["groups"]}
    sizes = {"hidden_size": row["width"], "num_hidden_layers": row["layers"], "intermediate_size": row["middle"]}
    common: Row = {"vocab_size": row["vocabulary"], "use_cache": False}
    if row["model"] == "llama":
        made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **heads, **sizes))
        return made, LlamaDecoderLayer
    if row["model"] == "qwen2":
        made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common, **heads, **sizes))
        return made, Qwen2DecoderLayer
    config = transformers.GPT2Config(
        **common, n_embd=row["width"], n_layer=row["layers"], n_head=row["heads"], n_positions=row["length"]
    )
    return transformers.GPT2LMHeadModel(config), GPT2Block


# How the model is spread over the ranks.


def _types(row: Row) -> tuple[torch.dtype | None, torch.dtype | None]:
    kinds = {"fp32": (None, None), "bf16": (torch.bfloat16, torch.bfloat16), "mixed": (torch.bfloat16, torch.float32)}
    return kinds.get(row["precision"], (None, None))


def _checkpointed(row: Row, model: nn.Module, block: type[nn.Module]) -> None:
    if row["checkpointing"]:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block))


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


def spread(row: Row, turn: Callable[[], None] = lambda: None) -> nn.Module:
    """Build the model and spread it over the ranks; `turn` returns when the GPU may be used."""
    from torch.distributed.device_mesh import init_device_mesh

    strategy, ranks = row["strategy"], row["ranks"]
    if row["model"] != "own":
        import transformers.models.gpt2.modeling_gpt2  # which makes tensors: not inside the `with`
        import transformers.models.llama.modeling_llama
        import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    if row["made_on"] == "cuda":
        turn()
    with torch.device(row["made_on"]):
        model, block = build(row)
    if row["precision"] == "pure_bf16":
        model = model.to(torch.bfloat16)
    if row["made_on"] != "cuda":
        turn()
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


def train(row: Row, turn: Callable[[], None] = lambda: None) -> None:
    """Some steps, as rank 0 of so many; the process group is made here."""
    import torch.distributed as dist

    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    model = spread(row, turn)
    optimizers: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adamw_fused": functools.partial(torch.optim.AdamW, fused=True),
        "sgdm": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    kinds: dict[Any, list[nn.Parameter]] = {}  # one call of the optimizer takes tensors of one kind and mesh only
    for parameter in model.parameters():
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = optimizers[row["optimizer"]]([{"params": some} for some in kinds.values()])
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
    dist.destroy_process_group()


def _sync(row: Row, model: nn.Module, last: bool) -> Any:
    """Gradients that are summed over several batches are sent with the last of them."""
    if row["strategy"] in ("fsdp1", "ddp"):
        return contextlib.nullcontext() if last else model.no_sync()  # type: ignore[operator]
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    return contextlib.nullcontext()


# Drawing.

_SHAPES = (  # width, layers, heads, groups, middle
    (768, 12, 12, 12, 3072), (1024, 16, 16, 8, 2816), (1280, 20, 20, 20, 5120), (1536, 24, 16, 8, 4096),
    (2048, 16, 32, 8, 8192), (2048, 24, 16, 16, 5504), (2560, 32, 32, 8, 6912), (3072, 28, 24, 8, 8192),
    (4096, 16, 32, 8, 11008), (4096, 32, 32, 8, 14336),
)  # fmt: skip
_STRATEGIES = ("fsdp2", "fsdp1", "tp", "fsdp2+tp", "hsdp", "ddp")
_SHARES = (32, 22, 14, 12, 8, 12)
_MOST = 60 * GIB


def draw(count: int, seed: int, most: int = _MOST, only: str | None = None, limited: float = 0.8) -> list[Row]:
    """So many random trainings that take about `most` bytes or less; the same seed draws the same."""
    chance = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        row = _one(chance, limited)
        if row is not None and rough_need(row) <= most and only in (None, row["strategy"]):
            rows.append({"id": f"r{seed}n{len(rows):03d}", **row})
    return rows


def _one(chance: random.Random, limited: float) -> Row | None:
    strategy = chance.choices(_STRATEGIES, _SHARES)[0]
    own = "tp" in strategy
    model = "own" if own else chance.choice(("own", "llama", "qwen2", "gpt2"))
    width, layers, heads, groups, middle = chance.choice(_SHAPES)
    if model == "gpt2":
        groups, middle = heads, 4 * width
    row: Row = {
        "strategy": strategy, "model": model, "width": width, "layers": layers, "heads": heads, "groups": groups,
        "middle": middle, "vocabulary": chance.choice((32000, 32000, 50257, 50304, 128256)),
        "batch": chance.choice((1, 1, 2, 3, 4, 8)), "length": chance.choice((256, 512, 1024, 2048)),
        "ranks": 1 if strategy == "ddp" else chance.choice((2, 3, 4, 6, 8, 8, 16, 24, 32, 64)),
        "checkpointing": chance.random() < 0.35,
        "optimizer": chance.choice(("adamw", "adamw", "adamw_fused", "sgdm")),
        "accumulation": chance.choice((1, 1, 1, 2)),
        "clip": chance.random() < 0.4,
        "reads_loss": chance.random() < 0.4,
        "offload": False,
        "made_on": chance.choice(("cpu", "meta", "cuda")),
        "precision": "fp32",
    }  # fmt: skip
    if strategy == "ddp":
        row |= {
            "made_on": "cuda", "precision": chance.choice(("fp32", "autocast", "pure_bf16")),
            "bucket_mb": chance.choice((None, None, 10, 100)), "bucket_views": chance.random() < 0.5,
            "static_graph": chance.random() < 0.2, "find_unused": chance.random() < 0.2,
            "hook": chance.choice((None, None, None, "fp16", "bf16", "powersgd")),
        }  # fmt: skip
        if row["static_graph"]:
            row["find_unused"] = False
    elif strategy == "tp":
        split = chance.choice((2, 4, 8))
        if groups % split:
            return None
        row |= {"ranks": split, "precision": chance.choice(("fp32", "autocast", "pure_bf16"))}
    else:
        row |= {"precision": chance.choice(("fp32", "bf16", "mixed", "mixed", "pure_bf16", "autocast"))}
        row |= {"offload": chance.random() < 0.15, "prefetch": chance.random() < 0.3}
    if strategy in ("fsdp2", "hsdp", "fsdp2+tp"):
        row["reshard"] = chance.choice((True, True, True, False))
    if strategy == "hsdp":
        copies = [copies for copies in (2, 3, 4, 8) if row["ranks"] % copies == 0 and row["ranks"] > copies]
        if not copies:
            return None
        row["copies"] = chance.choice(copies)
    if strategy == "fsdp2+tp":
        split = chance.choice((2, 4, 8))
        if groups % split or row["ranks"] % split or row["ranks"] == split:
            return None
        row["split"] = split
    if own:
        row["sequence_parallel"] = chance.random() < 0.5
        row["clip"] &= row["sequence_parallel"]  # norms of parameters on different meshes cannot be added
    if strategy == "fsdp1":
        row |= {
            "sharding": chance.choice(("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
            "backward_prefetch": chance.choice(("pre", "pre", "post", "none")),
            "original_parameters": chance.random() < 0.6, "limit_all_gathers": chance.random() < limited,
        }  # fmt: skip
        if row["offload"] and row["accumulation"] > 1:
            return None
    if row["offload"]:
        row["clip"], row["optimizer"] = False, "adamw"
        if row["made_on"] == "cuda":
            return None
    if row["offload"] and strategy == "fsdp1" and row["made_on"] == "meta":
        return None
    parameters = parameters_of(row)
    if parameters > 9e9 or (row["made_on"] == "cpu" and parameters > 1.6e9):
        return None
    if row["offload"] and parameters / row["ranks"] > 6e8:
        return None
    return row


def parameters_of(row: Row) -> int:
    """About how many parameters the model has."""
    width = row["width"]
    attention = 2 * width * width + 2 * width * width * row["groups"] // row["heads"]
    layer = attention + (2 if row["model"] == "gpt2" else 3) * width * row["middle"]
    return int(row["layers"] * layer + (1 if row["model"] == "gpt2" else 2) * row["vocabulary"] * width)


def rough_need(row: Row) -> int:
    """About how many bytes the training takes; only to know how many can run at once."""
    parameters, strategy = parameters_of(row), row["strategy"]
    share = 1 if strategy == "ddp" or row.get("sharding") == "NO_SHARD" else row["ranks"] // row.get("copies", 1)
    states = 16 * parameters / share + (6 * parameters if row.get("reshard") is False else 0)
    if row["made_on"] == "cuda" or row.get("sharding") in ("SHARD_GRAD_OP", "NO_SHARD") or strategy == "ddp":
        states += 8 * parameters
    split = row["ranks"] if strategy == "tp" else row.get("split", 1)
    tokens = row["batch"] * row["length"]
    layer = 34 * tokens * row["width"] * 2 / split**0.5
    activations = layer * (3 if row["checkpointing"] else row["layers"]) + tokens * row["vocabulary"] * 16
    return int(1.3 * (states + activations) + 3 * GIB)


# Measuring, on a machine with a GPU.


def measure_one(row: Row, history: str | None) -> Row:
    """In a process of its own: the peaks of one training, by PyTorch and by NVML; it waits for its turn."""
    import torch.distributed as dist

    begin = time.perf_counter()

    def turn() -> None:
        nonlocal begin
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.perf_counter()

    torch.cuda.synchronize()
    context = _process_memory()
    if history:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=10_000_000)
    if row["strategy"] == "ddp":
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        dist.init_process_group("nccl")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=row["ranks"])
    answer: Row = {"nvml_ctx": context}
    try:
        train(row, turn)
    except torch.OutOfMemoryError as error:
        answer["oom"] = str(error).split(" If reserved")[0]
    torch.cuda.synchronize()
    answer |= {
        "peak_alloc": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved(),
        "end_reserved": torch.cuda.memory_reserved(), "nvml_end": _process_memory(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"], "wall_s": round(time.perf_counter() - begin, 2),
        "torch": torch.__version__, "device": torch.cuda.get_device_name(),
    }  # fmt: skip
    if history:
        _save(history)
    return answer


def _save(file: str) -> None:
    """The allocator's events: action, address, size, stream."""
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    kinds = {"alloc": 0, "free_requested": 1, "free_completed": 2, "segment_alloc": 3, "segment_free": 4}
    base = min((event["addr"] for event in events if event["action"] == "segment_alloc"), default=0)
    streams: dict[int, int] = {}
    with gzip.open(file, "wt", compresslevel=4) as out:
        for event in events:
            if event["action"] in kinds:
                stream = streams.setdefault(event["stream"], len(streams))
                out.write(f"{kinds[event['action']]} {event['addr'] - base} {event['size']} {stream}\n")


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _process_memory() -> int | None:
    """What `nvidia-smi` shows for this process."""
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        for line in subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines():
            pid, used = (word.strip() for word in line.split(","))
            if int(pid) == os.getpid() and used.isdecimal():
                return int(used) << 20
    return None


class _Card:
    """The memory of the card, shared by the runs that go on."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, size: Callable[[], int]) -> Iterator[bool]:
        """Wait for so much of the card, which may become less while we wait; whether it is all of it."""
        with self._changed:
            while self._free < (taken := min(size(), self.size)):
                self._changed.wait(1.0)
            self._free -= taken
        try:
            yield taken == self.size
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


def measure(rows: list[Row], given: argparse.Namespace) -> None:
    """Every row in a process of its own, as many at once as the card has room for; none begins after so long.

    Those that depend on timing (`--alone`) come last and have the card to themselves, while the next ones are imported
    and built on the CPU. When `--rest` seconds are left, those that are not measured yet share the card.
    """
    card = _Card(132 * GIB)
    end, lock = time.monotonic() + given.seconds, threading.Lock()
    environment = {"OMP_NUM_THREADS": "4", **os.environ}
    last = [row for row in rows if row["strategy"] in given.alone]

    def one(row: Row) -> None:
        need = row.get("estimate", {}).get("upper") or rough_need(row)

        def size() -> int:
            return card.size if row in last and end - time.monotonic() > given.rest else need

        if end - time.monotonic() < 20:
            return
        words = [sys.executable, __file__, "one"]
        if given.histories and row.get("history", True):
            words += ["--history", str(given.histories / f"{row['id']}.txt.gz")]
        with tempfile.TemporaryFile("w+") as errors:
            run = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
            watch = threading.Timer(max(end - time.monotonic(), 1), run.kill)
            watch.start()
            answer: Row = {}
            with run, contextlib.suppress(BrokenPipeError):
                assert run.stdin and run.stdout
                run.stdin.write(json.dumps(row) + "\n")
                run.stdin.flush()
                while run.stdout.readline().strip() not in ("ready", ""):
                    pass
                with card.holding(size) as answer["alone"]:
                    out, _ = run.communicate("go\n")
                found = [line for line in out.splitlines() if line.startswith("{")]
                answer |= json.loads(found[-1]) if found else {}
            watch.cancel()
            if "peak_reserved" not in answer:
                errors.seek(0)
                answer["failed"] = errors.read()[-1500:] or "it took too long"
        with lock, gzip.open(given.out, "at") as file:
            file.write(json.dumps(row | answer) + "\n")
            print(row["id"], row["strategy"], answer.get("wall_s"), answer.get("failed", ""), flush=True)

    given.out.unlink(missing_ok=True)
    if given.histories:
        given.histories.mkdir(parents=True, exist_ok=True)
    for some in ([row for row in rows if row not in last], last):
        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(one, some))
        print(f"{given.seconds - end + time.monotonic():.0f} s", flush=True)


# Comparing.


def compare(rows: list[Row], out: Path | None) -> None:
    """Estimate each and print how far off the estimates are."""
    from ullage.estimation.asking import estimate

    results = []
    for row in rows:
        begin = time.perf_counter()
        result: Row = {key: row.get(key) for key in ("id", "strategy", "peak_alloc", "peak_reserved", "failed", "oom")}
        try:
            found = estimate(functools.partial(train, row), gpu="H200", world_size=row["ranks"])
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        else:
            result |= {
                "allocated": found.peak_allocated, "reserved": found.peak_reserved, "upper": found.upper,
                "process": found.process_memory, "context": found.breakdown["context"],
                "connections": sum(entry["adds"] for entry in found.assumed if "NCCL" in entry["what"]),
            }  # fmt: skip
        result["seconds"] = round(time.perf_counter() - begin, 2)
        if row.get("nvml_end") and row.get("peak_reserved"):
            result["process_truth"] = row["nvml_end"] - row["end_reserved"] + row["peak_reserved"]
        results.append(result)
        print(json.dumps(result), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
    print(report(results))


def report(results: list[Row]) -> str:
    """A table of errors by strategy."""
    lines = ["strategy    runs  given  exact  median   90 %   worst  alloc. exact  upper holds"]
    judged = [row for row in results if row.get("peak_reserved") and not row.get("oom")]
    for strategy in ("all", *sorted({row["strategy"] for row in judged})):
        some = [row for row in judged if strategy in ("all", row["strategy"])]
        given = [row for row in some if row.get("reserved")]
        errors = sorted(abs(row["reserved"] / row["peak_reserved"] - 1) for row in given)
        if not errors:
            continue
        exact = sum(row["reserved"] == row["peak_reserved"] for row in given) / len(given)
        allocated = sum(row["allocated"] == row["peak_alloc"] for row in given) / len(given)
        bounded = [row for row in given if row.get("process_truth")]
        holds = sum(map(_holds, bounded))
        lines.append(
            f"{strategy:10} {len(some):5} {len(given):6} {exact:6.0%} {errors[len(errors) // 2]:7.2%} "
            f"{errors[min(len(errors) - 1, int(0.9 * len(errors)))]:6.2%} {errors[-1]:7.2%} {allocated:13.0%} "
            f"{holds:7} of {len(bounded)}"
        )
    return "\n".join(lines)


def _holds(row: Row) -> bool:
    """Whether the bound holds. A fake group takes nothing of what is counted for NCCL, so that must not help."""
    if row["strategy"] == "ddp":
        return bool(row["upper"] >= row["process_truth"])
    return bool(row["upper"] - row["context"] - row.get("connections", 0) >= row["peak_reserved"])


def _read(file: Path) -> list[Row]:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--only", choices=_STRATEGIES)
    drawing.add_argument("--limited", type=float, default=0.8, help="the share of FSDP1 with limit_all_gathers")
    drawing.add_argument("--most", type=float, default=_MOST / GIB, help="GiB that a training may take, roughly")
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--at-once", type=int, default=8)
    measuring.add_argument("--alone", nargs="*", default=(), help="strategies that have the card to themselves")
    measuring.add_argument("--rest", type=float, default=60.0, help="seconds at the end when they do not")
    measuring.add_argument("--histories", type=Path)
    measuring.add_argument("--seconds", type=float, default=3600.0)
    commands.add_parser("one").add_argument("--history")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--out", type=Path)
    comparing.add_argument("--only", help="one strategy, or the id of one line")
    comparing.add_argument("--part", default="0/1", help="every Nth line, as 3/8: for several processes at once")
    reporting = commands.add_parser("report", help="the table of what `compare --out` has written")
    reporting.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "draw":
        for row in draw(given.count, given.seed, int(given.most * GIB), given.only, given.limited):
            print(json.dumps(row))
    elif given.command == "measure":
        measure(_read(given.file), given)
    elif given.command == "one":
        print(json.dumps(measure_one(json.loads(sys.stdin.readline()), given.history)))
    elif given.command == "report":
        print(report(_read(given.file)))
    else:
        first, step = map(int, given.part.split("/"))
        rows = [row for row in _read(given.file) if not given.only or given.only in (row["id"], row["strategy"])]
        compare(rows[first::step], given.out)


if __name__ == "__main__":
    main()
