"""A loop written for accelerate (needs accelerate): bf16, gradient accumulation, metrics gathered."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True)
model = nn.Sequential(nn.Linear(64, 384), nn.TransformerEncoder(layer, 6), nn.Flatten(), nn.Linear(384 * 128, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=1000)


def series(count):
    return TensorDataset(torch.randn(count, 128, 64), torch.randint(0, 20, (count,)))


train_loader = DataLoader(series(1024), args.batch_size, shuffle=True)
val_loader = DataLoader(series(256), args.batch_size)
model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, val_loader, scheduler
)
for epoch in range(args.epochs):
    model.train()
    for inputs, labels in train_loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = seen = 0
    for inputs, labels in val_loader:
        with torch.no_grad():
            outputs = model(inputs)
        guesses, labels = accelerator.gather_for_metrics((outputs.argmax(dim=-1), labels))
        right, seen = right + (guesses == labels).sum().item(), seen + labels.numel()
    accelerator.print(f"epoch {epoch} loss {loss.item():.4f} accuracy {right / seen:.3f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
