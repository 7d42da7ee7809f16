"""A word language model: LSTM, truncated backpropagation, perplexity, weights tied."""

import argparse
import math

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--bptt", type=int, default=70)
parser.add_argument("--hidden", type=int, default=650)
args = parser.parse_args()
device, WORDS = torch.device("cuda"), 20000


class RNNModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.5), nn.Embedding(WORDS, hidden)
        self.rnn = nn.LSTM(hidden, hidden, 2, dropout=0.5)
        self.decoder = nn.Linear(hidden, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, words, state):
        output, state = self.rnn(self.drop(self.encoder(words)), state)
        return torch.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), dim=1), state


def batchify(count, size):
    return torch.randint(0, WORDS, (count // size, size)).to(device)


def detach(state):
    return tuple(part.detach() for part in state)


model = RNNModel(args.hidden).to(device)
criterion, lr = nn.NLLLoss(), 20.0
train_data, val_data = batchify(64_000, args.batch_size), batchify(8_000, 10)


def zeros(size):
    return torch.zeros(2, size, args.hidden, device=device), torch.zeros(2, size, args.hidden, device=device)


for epoch in range(args.epochs):
    model.train()
    state = zeros(args.batch_size)
    for start in range(0, train_data.size(0) - 1, args.bptt):
        length = min(args.bptt, len(train_data) - 1 - start)
        data, target = train_data[start : start + length], train_data[start + 1 : start + 1 + length].reshape(-1)
        model.zero_grad()
        output, state = model(data, detach(state))
        loss = criterion(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-lr)
    model.eval()
    total, state = 0.0, zeros(10)
    with torch.no_grad():
        for start in range(0, val_data.size(0) - 1, args.bptt):
            length = min(args.bptt, len(val_data) - 1 - start)
            output, state = model(val_data[start : start + length], state)
            total += length * criterion(output, val_data[start + 1 : start + 1 + length].reshape(-1)).item()
    print(f"epoch {epoch} loss {loss.item():.3f} perplexity {math.exp(min(20, total / len(val_data))):.1f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
