"""A training loop as anybody writes it, and what it will take on two GPUs. No GPU is needed to run this file."""

import torch
from torch import nn

import ullage


def block(channels: int, out: int, stride: int) -> nn.Module:
    """Two convolutions with batch norm."""
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, 1, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


def train() -> None:
    """Mixed-precision training of a small convolutional network, as it would run on a real GPU."""
    model = nn.Sequential(
        block(3, 64, 2),
        block(64, 128, 2),
        block(128, 256, 2),
        block(256, 512, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        images = torch.randn(768, 3, 224, 224).cuda(non_blocking=True)
        labels = torch.randint(0, 1000, (768,)).cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    for gpu in ("H200", "RTX-4060"):
        print(ullage.estimate(train, gpu=gpu))
        print("\n" + "─" * 100 + "\n")
    print("The function train() above ran as it stands, on a GPU that is not there. Try your own:")
    print("    import ullage; print(ullage.estimate(your_function, gpu='A100-40GB'))")
