"""A GPT written out by hand, bf16 autocast, flash attention, evaluated now and then."""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--block-size", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--eval-interval", type=int, default=15)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
VOCABULARY = 16384


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = (
            heads,
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, args.width), nn.Embedding(args.block_size, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.width // 64) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


data = torch.randint(0, VOCABULARY, (200_000,))


def get_batch():
    starts = torch.randint(len(data) - args.block_size - 1, (args.batch_size,))
    x = torch.stack([data[i : i + args.block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in starts])
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)


@torch.no_grad()
def evaluate(model):
    model.eval()
    losses = torch.zeros(5)
    for number in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            losses[number] = model(*get_batch())[1].item()
    model.train()
    return losses.mean()


model = GPT().cuda()
if args.compile:
    model = torch.compile(model)
decay = [p for p in model.parameters() if p.dim() >= 2]
plain = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
    if step % args.eval_interval == 0:
        print(f"step {step} val loss {evaluate(model):.4f}")
    begin = time.time()
    with torch.autocast("cuda", torch.bfloat16):
        _, loss = model(*get_batch())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} time {1e3 * (time.time() - begin):.1f} ms")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
