"""Mixed precision in fp16 with a gradient scaler: torchvision's ResNet-50."""

import argparse

import torch
import torchvision
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--image-size", type=int, default=176)
args = parser.parse_args()

torch.backends.cudnn.benchmark = False
model = torchvision.models.resnet50(weights=None, num_classes=1000).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda")
criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda()

model.train()
for step in range(args.steps):
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size).cuda(non_blocking=True)
    labels = torch.randint(0, 1000, (args.batch_size,)).cuda(non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(images)
        loss = criterion(output, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
    scaler.step(optimizer)
    scaler.update()
    _, top5 = output.topk(5, dim=1)
    hits = (top5 == labels[:, None]).any(dim=1).float().mean().item()
    print(f"step {step} loss {loss.item():.3f} top5 {hits:.3f} scale {scaler.get_scale():.0f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
