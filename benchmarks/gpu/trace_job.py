"""One job of `manager_trace.py`: a training script as people write them, with data loading, validation and checkpoints.

    python benchmarks/gpu/trace_job.py torchvision:resnet50 --batch-size 64 --steps 50 --epochs 2 --validate 10 --save

It prints one JSON object with seconds since 1970: when Python `began`, when PyTorch was `imported`, when the GPU had
finished the `first_step` and the `last_step`, and [begin, end] of each validation (`evaluated`) and checkpoint
(`saved`). `steps` counts all steps, and `reserved` is the most memory that PyTorch held.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402  the time before PyTorch is imported is measured too
import json  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


def image_model(name: str) -> nn.Module:
    source, _, short = name.partition(":")
    if source == "timm":
        import timm

        return timm.create_model(short)
    import torchvision

    more = {"aux_logits": False, "init_weights": False} if short == "inception_v3" else {}
    return getattr(torchvision.models, short)(**more)


def language_model(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    with torch.device("cuda"):  # random weights are made there, as saved ones would be loaded
        return kind(kind.config_class())


class Samples(Dataset):
    """Samples in memory; reading a batch takes `wait` seconds, as a slow disk would."""

    def __init__(self, batches: int, batch_size: int, shape: list[int], words: int | None, wait: float) -> None:
        self.batches, self.wait = batches, wait
        self.inputs = torch.randn(batch_size, *shape) if words is None else torch.randint(words, (batch_size, *shape))
        self.targets = torch.randint(10, (batch_size,)) if words is None else self.inputs

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.wait)
        return self.inputs, self.targets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--validate", type=int, default=0, help="batches after each epoch")
    parser.add_argument("--save", action="store_true", help="a checkpoint after each epoch")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to read a batch")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args()
    times: dict[str, object] = {"began": BEGAN, "imported": time.time(), "evaluated": [], "saved": []}

    source, _, short = options.model.partition(":")
    is_text = source == "hf"
    model = (language_model(short) if is_text else image_model(options.model)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = [options.length] if is_text else [3, options.side, options.side]
    words = model.config.vocab_size if is_text else None
    sizes = options.batch_size, shape, words, options.wait
    batches = DataLoader(Samples(options.steps, *sizes), batch_size=None, shuffle=True)
    validation = DataLoader(Samples(options.validate, *sizes), batch_size=None)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=options.amp):
            if is_text:
                return model(input_ids=inputs, labels=targets).loss
            return F.cross_entropy(model(inputs), targets)

    steps = 0
    for _ in range(options.epochs):
        model.train()
        for inputs, targets in batches:
            loss = loss_of(inputs.cuda(), targets.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps in (1, options.steps * options.epochs):
                torch.cuda.synchronize()
                times["first_step" if steps == 1 else "last_step"] = time.time()
        if options.validate:
            model.eval()
            begin, total = time.time(), 0.0
            with torch.no_grad():
                for inputs, targets in validation:
                    total += loss_of(inputs.cuda(), targets.cuda()).item()
            times["evaluated"].append([begin, time.time()])
        if options.save:
            begin = time.time()
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), Path(folder, "last.pt"))
            times["saved"].append([begin, time.time()])
    print(json.dumps({**times, "steps": steps, "reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main()
