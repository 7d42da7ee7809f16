"""Where a loader's batches vary in size, the largest that the data holds is seen, not only the first."""

import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import ullage
from ullage.estimation.scripts.longest_batch import longest_batch

HEAD = """
import random, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
LENGTHS = [20 + (7 * n) % 40 for n in range(400)]
LENGTHS[333] = 512
class Texts(Dataset):
    reads = 0
    def __len__(self): return len(LENGTHS)
    def __getitem__(self, index):
        Texts.reads += 1
        random.random()
        return torch.randint(0, 100, (LENGTHS[index],))
def padded(items):
    return nn.utils.rnn.pad_sequence(items, batch_first=True)
model = nn.Sequential(nn.Embedding(100, 256), nn.Linear(256, 256)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(x):
    optimizer.zero_grad(); model(x.cuda()).sum().backward(); optimizer.step()
"""
TRAIN = """
for epoch in range(50):
    for x in DataLoader(Texts(), 8, shuffle=True, collate_fn=padded):
        print("shape", *x.shape)
        step(x)
"""


@pytest.fixture(autouse=True)
def short_look(monkeypatch):
    monkeypatch.setattr("ullage.estimation.scripts.when_to_stop.SHORTEST_LOOK", 0.1)


def told(values):
    return next((note for note in values["notes"] if "batches vary" in note), "")


def test_the_longest_batch_of_a_shuffled_loader_is_seen(estimated):
    torch.manual_seed(0)
    values = estimated(HEAD + TRAIN)
    shapes = [line for line in values["printed"].splitlines() if line.startswith("shape")]
    assert shapes.count("shape 8 512") >= 3 and "shape 8 512" not in shapes[:4]
    assert "one of the largest of all 400 items, (8, 512), was put in" in told(values)
    assert values["peak_allocated"] > 3 * 8 * 512 * 256 * 4
    assert not any("did not repeat" in note for note in values["notes"])
    (cached,) = [entry for entry in values["assumed"] if entry["what"].startswith("that batches of other sizes")]
    assert not cached["covered"] and cached["adds"] >= values["peak_reserved"] - values["peak_allocated"]


def test_the_longest_batch_follows_those_of_a_long_run(estimated):
    torch.manual_seed(0)
    values = estimated(HEAD.replace("20 + (7 * n) % 40", "n % 200") + TRAIN)
    lengths = [int(line.split()[-1]) for line in values["printed"].splitlines() if line.startswith("shape")]
    longest = lengths.index(512)
    assert longest == 5 and sorted(lengths[2:longest]) == lengths[2:longest]
    assert max(lengths[2:longest]) < 200 and lengths[longest + 3 : longest + 5] == [512, 512]


def test_images_scaled_to_one_height_appear_at_their_widest(estimated):
    source = """
    import random, torch
    from torch import nn
    from torch.utils.data import DataLoader
    drawn = random.Random(5)
    pictures = [torch.zeros(3, drawn.randint(80, 100), drawn.randint(100, 128)) for _ in range(200)]
    pictures[77] = torch.zeros(3, 40, 128)
    model = nn.Conv2d(3, 8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(50):
        for x in DataLoader(pictures, 1, shuffle=True):
            width = 400 * x.shape[-1] // x.shape[-2]
            print("width", width)
            model(torch.zeros(1, 3, 400, width, device="cuda")).sum().backward(); optimizer.step()
    """
    torch.manual_seed(0)
    assert "width 1280" in estimated(source)["printed"]


LONG_RUN = """
import random, torch
from torch import nn
from torch.utils.data import DataLoader
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mixed, self.out = nn.Embedding(2000, 1024), nn.Linear(1024, 3072), nn.Linear(1024, 2000)
    def forward(self, x):
        h = self.embedding(x)
        q, k, v = self.mixed(h).chunk(3, -1)
        return self.out(h + (q @ k.transpose(1, 2)).softmax(-1) @ v).square().mean()
drawn = random.Random(7)
texts = [torch.zeros(min(1000, int(30 + drawn.expovariate(1 / 150))), dtype=torch.int64) for _ in range(4800)]
def padded(items): return nn.utils.rnn.pad_sequence(items, batch_first=True)
model = Attention().cuda()
optimizer = torch.optim.Adam(model.parameters())
for x in DataLoader(texts, 32, shuffle=True, collate_fn=padded):
    optimizer.zero_grad(); model(x.cuda()).backward(); optimizer.step()
"""


@pytest.mark.slow
def test_memory_cached_by_150_batch_sizes_is_within_the_bound(estimated):
    taken = []
    for seed in range(4):
        torch.manual_seed(seed)
        with ullage.virtual_gpu("H200") as card:
            exec(LONG_RUN, {})
            taken.append((card.peak_reserved, card.process_memory))
    torch.manual_seed(9)
    values = estimated(LONG_RUN)
    assert max(taken)[0] > 1.5 * values["peak_allocated"] and values["upper"] >= max(taken)[1]
    assert values["peak_reserved"] >= 0.75 * sorted(taken)[1][0]


def test_the_longest_batch_of_a_validation_is_seen(estimated):
    validation = """
x = torch.zeros(8, 60, dtype=torch.int64)
for epoch in range(50):
    for i in range(3): step(x)
    model.eval()
    with torch.no_grad():
        for x in DataLoader(Texts(), 8, collate_fn=padded): model(x.cuda())
    model.train()
"""
    assert estimated(HEAD + validation)["peak_allocated"] > 2 * 8 * 512 * 256 * 4


def test_equal_batches_behave_as_without_a_longest_one(estimated):
    source = (
        HEAD.replace("LENGTHS[333] = 512", "LENGTHS = [64] * 400")
        + """
random.seed(3); torch.manual_seed(3)
order = []
for x in DataLoader(Texts(), 8, shuffle=True, collate_fn=padded):
    step(x); order.append(x[0, 0].item())
    if len(order) == 2: break
print(order, random.random(), Texts.reads)
"""
    )
    values = estimated(source)
    random.seed(3)
    expected = [random.random() for _ in range(17)][-1]
    assert str(expected) in values["printed"] and values["printed"].split()[-1] == "16"
    assert not told(values)


def test_a_loader_that_does_not_serve_the_gpu_is_left_alone(estimated):
    count = "print(sum(len(x) for x in DataLoader(Texts(), None)))\ntorch.zeros(1, device='cuda')"
    values = estimated(HEAD.replace(".cuda()\n", "\n") + count)
    assert values["printed"].split() == [str(sum(20 + (7 * n) % 40 for n in range(400)) - (20 + 7 * 333 % 40) + 512)]


def test_a_stream_that_varies_is_not_sure(estimated):
    stream = """
class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(10 + n, dtype=torch.int64) for n in range(50))
for x in DataLoader(Stream(), None): step(x)
"""
    values = estimated(HEAD + stream)
    assert "that no item is larger than those looked at" in [entry["what"] for entry in values["assumed"]]


class Items(Dataset):
    """Items of given lengths."""

    def __init__(self, lengths, make=torch.zeros):
        self.lengths, self.make = lengths, make

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.make(self.lengths[index])


class Graph:
    """An object with tensors inside, as data sets of graphs have."""

    def __init__(self, nodes):
        self.store = {"x": torch.zeros(nodes, 4)}


LENGTHS = [2, 3, 9, 3, 2, 8, 1, 1]
FOUND = {
    "in order, the batches are those that come": (
        lambda: DataLoader(Items(LENGTHS), 2, collate_fn=list),
        [2, 3],
    ),
    "shuffled, the largest may meet": (lambda: DataLoader(Items(LENGTHS), 2, shuffle=True, collate_fn=list), [2, 5]),
    "a sampler of batches": (
        lambda: DataLoader(Items(LENGTHS), batch_sampler=[[0, 1, 2], [3, 4], [5, 6]], collate_fn=list),
        [0, 1, 2],
    ),
    "single items": (lambda: DataLoader(Items(LENGTHS), None, shuffle=True), 2),
    "a sampler of its own kind": (
        lambda: DataLoader(
            Items(LENGTHS), batch_sampler=BatchSampler(SequentialSampler(LENGTHS[:2]), 1, False), collate_fn=list
        ),
        [1],
    ),
    "lists": (lambda: DataLoader(Items(LENGTHS, lambda n: {"ids": [1] * n}), 1, collate_fn=list), [2]),
    "objects": (lambda: DataLoader(Items(LENGTHS, Graph), 1, collate_fn=list), [2]),
    "texts": (lambda: DataLoader(Items(LENGTHS, lambda n: "a" * n), 1, collate_fn=list), [2]),
    "cut to one size when put together": (
        lambda: DataLoader(Items(LENGTHS), 2, collate_fn=lambda items: torch.stack([item[:1] for item in items])),
        None,
    ),
    "one size": (lambda: DataLoader(Items([4] * 8), 2), None),
    "one size, the last batch smaller": (lambda: DataLoader(Items([4] * 9), 2), None),
    "one size, as many as a sampler draws, like Opacus's": (
        lambda: DataLoader(Items([4] * 99), batch_sampler=[range(40), range(9, 90), range(7)]),
        range(9, 90),
    ),
    "items that cannot be read": (lambda: DataLoader(Items([4, -1]), 2), None),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_largest_batch_is_found(name):
    make, indices = FOUND[name]
    found = longest_batch(iter(make()), seconds=60.0)
    assert (found and found.indices) == indices


def test_a_hang_is_given_up():
    loader = DataLoader(Items([1, 2], lambda n: __import__("time").sleep(60)), 1)
    assert longest_batch(iter(loader), seconds=0.5) is None
