"""Denoising diffusion: a U-Net with time embeddings and attention, the old names of AMP, a sampling loop at the end."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--image-size", type=int, default=64)
args = parser.parse_args()
device, TIMES = "cuda", 1000


class ResBlock(nn.Module):
    def __init__(self, channels, out, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class SelfAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(8, channels), nn.MultiheadAttention(channels, 4, batch_first=True)

    def forward(self, x):
        batch, channels, height, width = x.shape
        h = self.norm(x).view(batch, channels, -1).transpose(1, 2)
        h, _ = self.attention(h, h, h, need_weights=False)
        return x + h.transpose(1, 2).view(batch, channels, height, width)


class UNet(nn.Module):
    def __init__(self, width=64, time=256):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.width, sizes = width, [width, 2 * width, 4 * width]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(ResBlock(a, b, time) for a, b in zip([width, *sizes], sizes, strict=False))
        self.middle = nn.ModuleList([ResBlock(sizes[-1], sizes[-1], time), SelfAttention(sizes[-1])])
        self.up = nn.ModuleList(
            ResBlock(2 * a, b, time) for a, b in zip(sizes[::-1], [*sizes[-2::-1], width], strict=False)
        )
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, times):
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(10000) / (self.width // 2)))
        angles = times[:, None].float() * rates[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle[1](self.middle[0](x, t))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), t)
        return self.leave(x)


model = UNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
scaler = torch.cuda.amp.GradScaler()
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, device=device), dim=0)
for step in range(args.steps):
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device) * 2 - 1
    times = torch.randint(0, TIMES, (args.batch_size,), device=device)
    noise = torch.randn_like(images)
    level = alphas[times].view(-1, 1, 1, 1)
    with torch.cuda.amp.autocast():
        loss = F.mse_loss(model(level.sqrt() * images + (1 - level).sqrt() * noise, times), noise)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    x = torch.randn(16, 3, args.image_size, args.image_size, device=device)
    for time in reversed(range(0, TIMES, 200)):
        x = x - 0.1 * model(x, torch.full((16,), time, device=device))
print("max_memory_reserved", torch.cuda.max_memory_reserved())
