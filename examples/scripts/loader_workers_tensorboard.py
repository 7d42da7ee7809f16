"""DataLoader workers, pinned memory, TensorBoard and tqdm (the last two are used if they are installed)."""

import argparse
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None
try:
    from tqdm import tqdm
except ImportError:
    tqdm = iter

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--workers", type=int, default=4)
args = parser.parse_args()


class Spectrograms(Dataset):
    """Made when they are asked for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 128, 256, generator=generator), index % 35


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        Spectrograms(1024),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
        persistent_workers=args.workers > 0,
    )
    channels = [1, 32, 64, 128, 256]
    layers = []
    for a, b in zip(channels, channels[1:], strict=False):
        layers += [
            nn.Conv2d(a, b, 5, padding=2),
            nn.GroupNorm(8, b),
            nn.GELU(),
            nn.Conv2d(b, b, 3, stride=2, padding=1),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 35)).cuda()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    writer = SummaryWriter(tempfile.mkdtemp()) if SummaryWriter else None
    step = 0
    for epoch in range(args.epochs):
        for batch, labels in tqdm(loader):
            batch, labels = batch.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            if writer and step % 5 == 0:
                writer.add_scalar("loss", loss.item(), step)
                writer.add_histogram("weights", model[0].weight, step)
        print(f"epoch {epoch} loss {loss.item():.4f}")
    if writer:
        writer.close()
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
