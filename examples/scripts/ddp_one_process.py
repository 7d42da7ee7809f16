"""DistributedDataParallel with one process for each GPU that there is (NCCL)."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, world_size, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1000))
    model = DistributedDataParallel(model.to(rank), device_ids=[rank])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(4096, 2048), torch.randint(0, 1000, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, pin_memory=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(rank)), labels.to(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world_size:.4f}")
    if rank == 0:
        print("max_memory_reserved", torch.cuda.max_memory_reserved())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    count = torch.cuda.device_count()
    mp.spawn(train, args=(count, arguments), nprocs=count)
