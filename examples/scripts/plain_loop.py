"""A convolutional network on images, the plainest training loop there is."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()


def block(channels, out):
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    )


device = torch.device("cuda")
model = nn.Sequential(block(3, 64), block(64, 128), block(128, 256), block(256, 512), nn.Flatten())
model.append(nn.Linear(512 * 8 * 8, 100))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
criterion = nn.CrossEntropyLoss()

for step in range(args.steps):
    images = torch.randn(args.batch_size, 3, 128, 128, device=device)
    labels = torch.randint(0, 100, (args.batch_size,), device=device)
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
