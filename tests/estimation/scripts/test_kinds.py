"""Every kind of training script gives an estimate."""

import textwrap

import pytest
import torch

HEAD = """
import copy, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

def data(count=40, width=64):
    return TensorDataset(torch.randn(count, width), torch.randint(0, 4, (count,)))

def net(width=64):
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 4))
"""

LOOPS = {
    "plain loop": """
        model = net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(100):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 64).cuda()), torch.randint(0, 4, (8,)).cuda()).backward()
            optimizer.step()
    """,
    "two optimizers": """
        g, d = nn.Linear(8, 64).cuda(), nn.Linear(64, 1).cuda()
        og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
        for step in range(100):
            fake = g(torch.randn(16, 8, device="cuda"))
            od.zero_grad(); d(fake.detach()).mean().backward(); od.step()
            og.zero_grad(); (-d(fake).mean()).backward(); og.step()
    """,
    "gradient accumulation": """
        model = net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (x, y) in enumerate(DataLoader(data(400), 4)):
            (F.cross_entropy(model(x.cuda()), y.cuda()) / 4).backward()
            if (number + 1) % 4 == 0:
                optimizer.step(); optimizer.zero_grad()
    """,
    "amp, old names": """
        model = net().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.cuda.amp.GradScaler()
        for step in range(50):
            with torch.cuda.amp.autocast():
                loss = model(torch.randn(8, 64, device="cuda")).float().pow(2).mean()
            optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0); scaler.step(optimizer); scaler.update()
    """,
    "weights updated by hand": """
        w = torch.randn(64, 64, device="cuda", requires_grad=True)
        for step in range(100):
            (torch.randn(8, 64, device="cuda") @ w).pow(2).mean().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                w.grad = None
    """,
    "closure": """
        model = net().cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)
        x = torch.randn(8, 64, device="cuda")
        def closure():
            optimizer.zero_grad(); loss = model(x).pow(2).mean(); loss.backward(); return loss
        for step in range(5):
            print(optimizer.step(closure).item())
    """,
    "torch.compile": """
        model = torch.compile(net().cuda())
        @torch.compile
        def loss_of(x):
            return model(x).pow(2).mean()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(20):
            optimizer.zero_grad(); loss_of(torch.randn(8, 64, device="cuda")).backward(); optimizer.step()
    """,
    "spawn and DDP": """
        import os, torch.distributed as dist, torch.multiprocessing as mp
        from torch.nn.parallel import DistributedDataParallel
        def train(rank, world_size):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29533"
            dist.init_process_group("nccl", rank=rank, world_size=world_size)
            model = DistributedDataParallel(net().to(rank), device_ids=[rank])
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(5):
                optimizer.zero_grad(); model(torch.randn(8, 64, device=rank)).sum().backward(); optimizer.step()
            mean = torch.tensor([2.5], device=rank)
            dist.all_reduce(mean); dist.barrier()
            gathered = [torch.zeros(1, device=rank)]
            dist.all_gather(gathered, mean)
            print(dist.get_backend(), mean.item(), gathered[0].item())
            dist.destroy_process_group()
        mp.spawn(train, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
    """,
    "workers and pinned memory": """
        class Squares(Dataset):
            def __len__(self): return 40
            def __getitem__(self, index): return torch.full((64,), float(index)), index
        model = net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in range(2):
            for x, y in DataLoader(Squares(), 8, num_workers=1, pin_memory=True):
                assert x[0, 0] == y[0]
                optimizer.zero_grad(); model(x.cuda(non_blocking=True)).sum().backward(); optimizer.step()
    """,
    "checked distributions": """
        policy = nn.Linear(4, 2).cuda()
        optimizer = torch.optim.Adam(policy.parameters())
        for step in range(20):
            choice = torch.distributions.Categorical(logits=policy(torch.randn(6, 4, device="cuda")))
            normal = torch.distributions.Normal(policy.weight, policy.weight.exp())
            loss = choice.log_prob(choice.sample()).mean() + normal.rsample().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "torch.compile" else name for name in LOOPS]
)
def test_a_kind_of_script_settles(estimated, name):
    values = estimated(HEAD + "\n" + textwrap.dedent(LOOPS[name]))
    assert values["steps"] >= 3
    assert values["phases"]["training"] == values["peak_reserved"] > 0
    assert not any("before the requests repeated" in note for note in values["notes"]), values["notes"]


VALIDATION = """
model = net().cuda()
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
average = copy.deepcopy(model).eval()
train, val = DataLoader(data(1600), 8, shuffle=True), DataLoader(data(12000), 4000)
for epoch in range(50):
    model.train()
    for number, (x, y) in enumerate(train):
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters()):
                a.lerp_(b, 0.1)
    model.eval()
    right = 0
    {no_grad}
        for x, y in val:
            right += (EVALUATED(x.cuda()).argmax(1) == y.cuda()).sum().item()
    scheduler.step(right)
    torch.save(model.state_dict(), "best.pt")
    model.load_state_dict(torch.load("best.pt", weights_only=True))
    print("epoch", epoch, number, right)
"""


# A copy that never trained, evaluated with gradients, is left out: nothing tells that it is validation.
@pytest.mark.parametrize(
    ("evaluated", "no_grad"),
    [
        ("model", "with torch.no_grad():"),
        pytest.param("average", "with torch.no_grad():", marks=pytest.mark.slow),
        pytest.param("model", "if True:", marks=pytest.mark.slow),
    ],
)
def test_validation_is_reached_and_its_peak_separated(estimated, evaluated, no_grad):
    values = estimated(HEAD + VALIDATION.format(no_grad=no_grad).replace("EVALUATED", evaluated))
    assert values["phases"]["validation"] > values["phases"]["training"]
    assert values["phases"]["validation"] == values["peak_reserved"]
    assert "epoch 0" in values["printed"] and "epoch 49" not in values["printed"]


def test_a_frozen_teacher_is_no_validation(estimated):
    values = estimated(
        HEAD
        + """
student, teacher = net().cuda(), net().cuda().eval()
optimizer = torch.optim.SGD(student.parameters(), 0.1)
for step in range(10):
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        wanted = teacher(x)
    optimizer.zero_grad(); F.mse_loss(student(x), wanted).backward(); optimizer.step()
"""
    )
    assert set(values["phases"]) == {"training"}


def test_ddp_keeps_buckets_in_addition_to_gradients(estimated):
    source = (
        HEAD
        + """
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:29577")
model = nn.Linear(1024, 1024).cuda()
WRAP
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad(); model(torch.randn(4, 1024, device="cuda")).sum().backward(); optimizer.step()
"""
    )
    alone = estimated(source.replace("WRAP", ""))
    wrapped = estimated(source.replace("WRAP", "model = nn.parallel.DistributedDataParallel(model, device_ids=[0])"))
    bucket = 1024 * 1025 * 4
    assert bucket <= wrapped["peak_allocated"] - alone["peak_allocated"] <= 2 * bucket
    assert not torch.distributed.is_initialized()


def test_memory_that_the_loop_keeps_is_noted(estimated):
    values = estimated(
        HEAD
        + """
model, kept = net().cuda(), []
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(50):
    x = torch.randn(8192, 64, device="cuda")
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
    kept.append(x)
"""
    )
    assert any("grows by 2.00 MiB in each iteration" in note for note in values["notes"])


def test_memory_goes_on_as_it_was_after_the_repetition(estimated):
    """The settled iterations are repeated on the allocator; the blocks of living tensors move, and still are theirs."""
    values = estimated(
        HEAD
        + """
import collections
model = net().cuda()
optimizer = torch.optim.Adam(model.parameters())
recent = collections.deque(maxlen=4)
for step in range(12):
    optimizer.zero_grad()
    out = model(torch.randn(64, 64, device="cuda"))
    out.sum().backward()
    recent.append(out.detach())
    optimizer.step()
    print(torch.cuda.memory_allocated())
del out, optimizer, model, recent
print("left", torch.cuda.memory_allocated())
"""
    )
    printed = values["printed"].split()
    assert len(set(printed[6:10])) == 1
    assert int(printed[-1]) < 80 << 20  # cuBLAS's workspaces alone


def test_settings_that_the_script_makes_for_the_allocator_hold(estimated):
    values = estimated(
        """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
for size in (21, 30):
    torch.empty(size << 20, dtype=torch.uint8, device="cuda")
"""
    )
    assert values["peak_reserved"] == 40 << 20  # one segment that has grown, not 22 and 30 MiB
