"""Epochs with validation (a larger batch), a scheduler on the validation loss, checkpoints and early stopping."""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--val-batch-size", type=int, default=1024)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--patience", type=int, default=2)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
folder = tempfile.mkdtemp()


def images(count):
    return TensorDataset(torch.randn(count, 3, 48, 48), torch.randint(0, 10, (count,)))


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Conv2d(channels, out, 1, stride) if stride > 1 or channels != out else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


model = nn.Sequential(
    Residual(3, 64, 1),
    Residual(64, 128, 2),
    Residual(128, 256, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(256, 10),
).to(device)
train_loader = DataLoader(images(2048), args.batch_size, shuffle=True, drop_last=True)
val_loader = DataLoader(images(2048), args.val_batch_size)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
criterion = nn.CrossEntropyLoss()
best, waited, confusion = float("inf"), 0, torch.zeros(10, 10, dtype=torch.int64)

for epoch in range(args.epochs):
    model.train()
    running = 0.0
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item() * inputs.size(0)

    model.eval()
    val_loss, correct = 0.0, 0
    with torch.no_grad():
        for inputs, targets in val_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = model(inputs)
            val_loss += criterion(outputs, targets).item() * inputs.size(0)
            predicted = outputs.argmax(dim=1)
            correct += (predicted == targets).sum().item()
            for truth, guess in zip(targets.cpu(), predicted.cpu(), strict=True):
                confusion[truth, guess] += 1
    val_loss /= len(val_loader.dataset)
    scheduler.step(val_loss)
    print(f"epoch {epoch} train {running / 2048:.4f} val {val_loss:.4f} accuracy {correct / 2048:.3f}")

    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/last.pt")
    if val_loss < best:
        best, waited = val_loss, 0
        torch.save(model.state_dict(), os.path.join(folder, "best.pt"))
    else:
        waited += 1
        if waited >= args.patience:
            print("early stopping")
            break

model.load_state_dict(torch.load(os.path.join(folder, "best.pt"), map_location=device, weights_only=True))
print("max_memory_reserved", torch.cuda.max_memory_reserved())
