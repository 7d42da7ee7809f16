"""A GPT by hand, sharded over all ranks by FSDP2: torchrun --nproc-per-node 8 fully_shard.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GPT(nn.Module):
    def __init__(self, width, layers, vocabulary=32000):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)

with torch.device("meta"):
    model = GPT(args.width, args.layers)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
for parameter in model.parameters():
    nn.init.normal_(parameter, std=0.02)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = TensorDataset(torch.randint(0, 32000, (1024, 1025)))
loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data), drop_last=True)
for step, (tokens,) in enumerate(loader):
    tokens = tokens.cuda()
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        break

mean = loss.detach().clone()
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
if dist.get_rank() == 0:
    print(f"loss {mean.item():.3f}, {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB reserved")
dist.destroy_process_group()
