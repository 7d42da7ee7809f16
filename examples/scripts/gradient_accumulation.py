"""An encoder trained with gradient accumulation and gradient clipping."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16, help="of one micro-batch")
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()

device = torch.device("cuda:0")
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True, norm_first=True)
model = nn.ModuleDict(
    {
        "embed": nn.Embedding(10000, 512),
        "encoder": nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        "head": nn.Linear(512, 10000),
    }
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))

for step in range(args.steps):
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for _ in range(args.accumulate):
        tokens = torch.randint(0, 10000, (args.batch_size, args.length), device=device)
        logits = model["head"](model["encoder"](model["embed"](tokens)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / args.accumulate
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(f"step {step} loss {total:.4f} norm {norm.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
