"""An exponential moving average of the weights, kept as a copy of the model and used for evaluation."""

import argparse
import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=512)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=4096)
args = parser.parse_args()

device = "cuda"
model = nn.Sequential(
    nn.Linear(1024, args.width),
    nn.LayerNorm(args.width),
    nn.SiLU(),
    nn.Dropout(0.1),
    nn.Linear(args.width, args.width),
    nn.LayerNorm(args.width),
    nn.SiLU(),
    nn.Linear(args.width, 1024),
).to(device)
by_hand = copy.deepcopy(model).eval().requires_grad_(False)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)


@torch.no_grad()
def update(target, source, decay=0.999):
    for mean, value in zip(target.parameters(), source.parameters(), strict=True):
        mean.mul_(decay).add_(value, alpha=1 - decay)


for step in range(args.steps):
    x = torch.randn(args.batch_size, 1024, device=device)
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update(by_hand, model)
    averaged.update_parameters(model)
    if (step + 1) % 10 == 0:
        with torch.inference_mode():
            test = torch.randn(4 * args.batch_size, 1024, device=device)
            print(f"step {step} loss {loss.item():.4f} ema {nn.functional.mse_loss(by_hand(test), test).item():.4f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
