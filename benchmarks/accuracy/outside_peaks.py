"""Peaks that other people measured and published, on other cards than the H200, beside estimates of the same training.

`benchmarks/data/outside_peaks.json` has the published figures, each with its source, card, versions and settings. The
trainings are written anew here, from what the sources say; nothing of theirs is needed. No GPU is needed either:

    python benchmarks/accuracy/outside_peaks.py                       # all cases that the installed packages can run
    python benchmarks/accuracy/outside_peaks.py --only qwen           # some of them

A case names the packages that its authors had. Where others are installed, the table says so: another version of
transformers may keep other tensors. PyTorch is followed by the rules of the authors' release, or of the oldest that
Ullage knows.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import ullage
from ullage.jobs.ranks import Rank
from ullage.units import GIB, MIB
from ullage.virtual.releases import VARIABLE

CASES = Path(__file__).parents[1] / "data" / "outside_peaks.json"
DEVICE = "cuda"
STEPS = 3


def on_the_gpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model that was built without memory on the GPU, with tied weights once."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty_like(tensor, device=DEVICE)
                    kind = torch.nn.Parameter(empty, tensor.requires_grad) if tensors is module._parameters else empty
                    moved[id(tensor)] = kind
                tensors[name] = moved[id(tensor)]
    return model.train()


def qwen_model(size: str, method: str) -> Any:
    """Qwen3.5 in bfloat16, where tensors are made now; with adapters in 32 bits, as peft adds them."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    hidden, intermediate = {"0.8B": (1024, 3584), "2B": (2048, 6144)}[size]
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if method != "lora":
        return model.train()
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules="all-linear")
    return get_peft_model(model, lora).train()


def qwen_batch(vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens on the GPU, of which the first half is no target."""
    tokens = torch.randint(100, vocabulary, (1, length))
    labels = tokens.clone()
    labels[:, : length // 2] = -100
    positions = torch.arange(length).view(1, 1, length).expand(3, 1, length).clone()
    given = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


def qwen(size: str, method: str, checkpoint: bool, accumulate: int, length: int) -> None:
    """Supervised fine-tuning of Qwen3.5, one update by AdamW without `foreach`."""
    with torch.device("meta"):
        model = qwen_model(size, method)
    vocabulary = model.config.vocab_size
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if method == "lora":
            model.enable_input_require_grads()
    model = on_the_gpu(model)
    batches = []
    for _ in range(accumulate):
        batches.append(qwen_batch(vocabulary, length))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    for number, batch in enumerate(batches, start=1):
        outputs = model(**batch, use_cache=False)
        loss = outputs.loss / accumulate
        loss.backward()
        if number < accumulate:
            del outputs, loss
    optimizer.step()


def qwen_of_ranks(method: str, ranks: int, length: int) -> int:
    """One update of Qwen3.5 0.8B, in pieces over several ranks: all weights by FSDP, or adapters by FSDP2. Returns the
    peak of the step, without what was loaded before it, as the authors read it."""
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.distributed.init_process_group("nccl")
    model: Any = qwen_model("0.8B", method)
    layers = list((model.base_model.model.model if method == "lora" else model.model).layers)
    if method == "lora":
        model.to(DEVICE)
        mesh = init_device_mesh(DEVICE, (ranks,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            device_id=torch.device("cuda:0"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            backward_prefetch=None,
            forward_prefetch=False,
            limit_all_gathers=True,
            use_orig_params=False,
        )
    torch.cuda.synchronize()
    batch = qwen_batch(model.config.vocab_size, length)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    torch.cuda.reset_peak_memory_stats()
    outputs = model(**batch, use_cache=False)
    loss = outputs.loss
    torch.cuda.synchronize()
    loss.backward()
    torch.cuda.synchronize()
    optimizer.step()
    return torch.cuda.max_memory_allocated()


def vision_transformer(precision: str, batch: int, accumulate: int, optimizer: str) -> None:
    """ViT-L/16 with ten classes on images of 224 x 224; `true` precision casts the weights, `mixed` uses autocast."""
    from torchvision.models import vit_l_16

    with torch.device("meta"):
        model = vit_l_16(num_classes=10)
    model = on_the_gpu(model)
    kind = torch.bfloat16 if precision == "bf16-true" else torch.float32
    model.to(kind)
    make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    update = make(model.parameters(), lr=5e-5)
    mixed = precision == "16-mixed"
    scaler = torch.amp.GradScaler(DEVICE, enabled=mixed)
    for step in range(STEPS * accumulate):
        images = torch.zeros(batch, 3, 224, 224).to(DEVICE).to(kind)
        targets = torch.zeros(batch, dtype=torch.int64).to(DEVICE)
        with torch.autocast(DEVICE, torch.float16, enabled=mixed):
            logits = model(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), targets) / accumulate
        if accumulate == 1:
            update.zero_grad()
        scaler.scale(loss).backward()
        if step % accumulate == 0:
            scaler.step(update)
            scaler.update()
            if accumulate > 1:
                update.zero_grad()


def bert(
    batch: int, accumulate: int = 1, checkpoint: bool = False, fp16: bool = False, optimizer: str = "adamw"
) -> None:
    """BERT large that classifies sequences of 512 tokens, as `Trainer` trains it, with attention in single steps."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model = on_the_gpu(model)
    update: Any
    if optimizer == "adafactor":
        from transformers.optimization import Adafactor

        update = Adafactor(model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False)
    else:
        update = torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)
    scaler = torch.amp.GradScaler(DEVICE, enabled=fp16)
    total = torch.zeros((), device=DEVICE)
    for step in range(STEPS * accumulate):
        tokens = torch.randint(100, 30000, (batch, 512)).to(DEVICE)
        labels = torch.randint(0, 2, (batch,)).to(DEVICE)
        with torch.autocast(DEVICE, torch.float16, enabled=fp16):
            loss = model(input_ids=tokens, labels=labels).loss / accumulate
        scaler.scale(loss).backward()
        total += loss.detach()
        if (step + 1) % accumulate == 0:
            scaler.unscale_(update)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(update)
            scaler.update()
            model.zero_grad()


TRAININGS: dict[str, Callable[..., int | None]] = {
    "qwen": qwen,
    "qwen of ranks": qwen_of_ranks,
    "vit": vision_transformer,
    "bert": bert,
}


def other_versions(packages: dict[str, str]) -> list[str]:
    """List packages whose installed version differs from the authors'; `None` if missing."""
    others = []
    for name, wanted in packages.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if not version.startswith(wanted):
            others.append(f"{name} {version} for {wanted}")
    return others


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Return the published and the estimated bytes of a case."""
    os.environ[VARIABLE] = case["release"]
    with Rank(case["settings"].get("ranks", 1)).entered(), ullage.virtual_gpu(case["gpu"]) as gpu:
        peak = TRAININGS[case["training"]](**case["settings"])
    ours = peak or (gpu.peak_reserved if case["figure"] == "reserved" else gpu.peak_allocated)
    theirs = round(case["published"] * {"GiB": GIB, "GB": 10**9, "MiB": MIB}[case["unit"]])
    return {
        "id": case["id"],
        "gpu": case["gpu"],
        "figure": case["figure"],
        "theirs": theirs,
        "ours": ours,
        "error": ours / theirs - 1,
        "other_versions": other_versions(case["packages"]),
    }


def results(only: str) -> Iterator[dict[str, Any]]:
    """Yield every case that can run here; name the others on stderr."""
    for case in json.loads(CASES.read_text()):
        if not case["id"].startswith(only):
            continue
        try:
            yield compare(case)
        except ImportError as error:
            print(f"{case['id']} was not run: {error}", file=sys.stderr)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the comparison in Markdown, with the error of each group of cases."""
    print("| case | GPU | figure | theirs, GiB | ours, GiB | error | other versions here |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        versions = ", ".join(row["other_versions"]) or "none"
        sizes = " | ".join(f"{row[name] / GIB:.3f}" for name in ("theirs", "ours"))
        print(f"| {row['id']} | {row['gpu']} | {row['figure']} | {sizes} | {row['error']:+.2%} | {versions} |")
    for group in dict.fromkeys(row["id"].split("-")[0] for row in rows):
        errors = [abs(row["error"]) for row in rows if row["id"].split("-")[0] == group]
        print(f"\n{group}: {len(errors)} cases, error {statistics.median(errors):.2%} median, {max(errors):.2%} worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    print_table(list(results(parser.parse_args().only)))


if __name__ == "__main__":
    main()
