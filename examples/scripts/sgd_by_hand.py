"""Weights as plain tensors, updated by hand: no module, no optimizer."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4096)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--width", type=int, default=8192)
args = parser.parse_args()

device = torch.device("cuda")
sizes = [1024, args.width, args.width, 10]
weights = [torch.randn(a, b, device=device) / a**0.5 for a, b in zip(sizes, sizes[1:], strict=False)]
biases = [torch.zeros(b, device=device) for b in sizes[1:]]
parameters = weights + biases
for parameter in parameters:
    parameter.requires_grad_()

for step in range(args.steps):
    x = torch.randn(args.batch_size, 1024, device=device)
    y = torch.randint(0, 10, (args.batch_size,), device=device)
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = x @ weight + bias
        if number < len(weights) - 1:
            x = x.clamp(min=0)
    loss = -torch.log_softmax(x, dim=1)[torch.arange(len(y), device=device), y].mean()
    loss.backward()
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 1e-3 * parameter.grad
            parameter.grad.zero_()
    if step % 10 == 0:
        print(f"step {step} loss {loss:.4f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
