"""A one-stage detector on a feature pyramid: box and class losses over all anchors, a focal loss."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--image-size", type=int, default=320)
args = parser.parse_args()
device, CLASSES, ANCHORS = torch.device("cuda"), 20, 3


def conv(channels, out, stride=1):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.SiLU(inplace=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(3, 32, 2), conv(32, 64, 2))
        self.stages = nn.ModuleList(
            nn.Sequential(conv(a, b, 2), conv(b, b), conv(b, b)) for a, b in ((64, 128), (128, 256), (256, 512))
        )
        self.lateral = nn.ModuleList(nn.Conv2d(channels, 128, 1) for channels in (128, 256, 512))
        self.head = nn.Sequential(conv(128, 128), conv(128, 128), nn.Conv2d(128, ANCHORS * (CLASSES + 4), 1))

    def forward(self, x):
        x, levels = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        merged, above = [], None
        for lateral, level in zip(reversed(self.lateral), reversed(levels), strict=True):
            level = lateral(level)
            if above is not None:
                level = level + F.interpolate(above, size=level.shape[-2:], mode="nearest")
            above = level
            merged.append(self.head(level).permute(0, 2, 3, 1).reshape(len(x), -1, CLASSES + 4))
        return torch.cat(merged, dim=1)


def focal_loss(logits, targets, gamma=2.0):
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    probability = torch.exp(-loss)
    return ((1 - probability) ** gamma * loss).sum() / targets.sum().clamp(min=1)


model = Detector().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4)
for step in range(args.steps):
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device)
    output = model(images.to(memory_format=torch.channels_last))
    logits, boxes = output[..., :CLASSES], output[..., CLASSES:]
    labels = torch.zeros_like(logits)
    labels.scatter_(2, torch.randint(0, CLASSES, (args.batch_size, output.shape[1], 1), device=device), 1.0)
    positive = torch.rand(args.batch_size, output.shape[1], 1, device=device) < 0.05
    loss = focal_loss(logits, labels * positive)
    loss = loss + (F.smooth_l1_loss(boxes, torch.rand_like(boxes), reduction="none") * positive).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
