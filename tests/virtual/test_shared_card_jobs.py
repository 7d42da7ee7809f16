"""Unmodified programs, each in a process of its own, on virtual cards that they share."""

import os
import subprocess
import sys
import time

import pytest

from ullage.virtual.shared_card.cards import STARTUP, Cards, environment

GIB = 1 << 30


@pytest.fixture
def card(tmp_path):
    return Cards.create(tmp_path / "cards", "T4").cards[0]


def start(card, code, folder, *args, **more):
    """A process such as a launcher starts it."""
    script = folder / f"job{len(list(folder.glob('job*.py')))}.py"
    script.write_text(code)
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, script, *map(str, args)],
        env=base | environment(card.path.parent, [card.uuid], base=base) | more,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, seconds=120):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def until(condition, what, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


TRAIN = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ullage.virtual.shared_card.cards import Cards

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
epoch = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt", map_location="cuda")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epoch = state["epoch"]
data = TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
seen = set()
for x, y in DataLoader(data, batch_size=16, num_workers=2, pin_memory=True, shuffle=True):
    loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen |= set(Cards.open(os.environ["ULLAGE_CARDS"]).cards[0].processes())
steps = {int(state["step"]) for state in optimizer.state.values()}
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "checkpoint.pt")
assert seen == {os.getpid()}, "workers of a DataLoader took memory"
print(epoch, loss.item() > 0, steps, torch.cuda.device_count())
"""


@pytest.mark.slow
def test_training_checkpoints_and_resumes(card, tmp_path):
    first = end(start(card, TRAIN, tmp_path))
    assert first == (0, "0 True {4} 1\n", ""), first
    assert card.processes() == {}
    second = end(start(card, TRAIN, tmp_path))
    assert second == (0, "1 True {8} 1\n", ""), second


HOLD = """
import pathlib, sys, time, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
"""


def test_overbooking_ends_only_the_requesting_process(card, tmp_path):
    proceed = tmp_path / "proceed"
    first = start(card, HOLD, tmp_path, 9 * GIB, proceed)
    until(lambda: card.used() > 9 * GIB, "the first job takes its memory")
    context = card.used() - 9 * GIB
    code, _, err = end(start(card, HOLD, tmp_path, 9 * GIB, proceed))
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total")
    assert f"Process {first.pid} has " in last
    assert "Including non-PyTorch memory, this process has " in last
    assert f"{(card.total - 9 * GIB - 2 * context) / GIB:.2f} GiB is free" in last
    assert card.processes() == {first.pid: 9 * GIB + context}
    first.kill()
    assert end(first)[0] == -9 and card.processes() == {} and card.used() == 0


def test_a_card_without_room_for_a_context(card, tmp_path):
    assert card.take(card.total - 1000)
    code, _, err = end(start(card, HOLD, tmp_path, 512, tmp_path))
    card.give(card.total - 1000)
    assert code == 1 and "CUDA error: out of memory" in err and f"{os.getpid()} with " in err


CHILDREN = """
import multiprocessing, os, sys
import torch
from ullage.virtual.shared_card.cards import Cards

def use(queue, size):
    card = Cards.open(os.environ["ULLAGE_CARDS"]).cards[0]
    try:
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        queue.put((card.processes()[os.getpid()] - size, sorted(card.processes())))
    except RuntimeError as error:
        queue.put(str(error))

def run(method, size):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=use, args=(queue, size))
    child.start()
    answer = queue.get()
    child.join()
    return child.pid, answer

if __name__ == "__main__":
    size = 1 << 30
    pid, (context, pids) = run("fork", size)  # the parent has not used CUDA yet
    assert pids == [pid] and context > 0, (pid, pids)
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    small = torch.empty(4, device="cuda")
    assert "Cannot re-initialize CUDA in forked" in run("fork", size)[1]
    assert "Cannot re-initialize CUDA in forked" in run("fork", 16)[1]  # not even from the parent's cache
    pid, (again, pids) = run("spawn", size)
    assert pids == sorted([pid, os.getpid()]) and again == context
    print("fine")
"""


@pytest.mark.slow
def test_children_own_what_they_take_themselves(card, tmp_path):
    assert end(start(card, CHILDREN, tmp_path)) == (0, "fine\n", "")


LATE = """
import os, sys, threading
assert os.environ["OTHER"] == "was run", "the other sitecustomize"
assert not {"ullage", "torch", "importlib.util"} & (set(sys.modules) - before)
import torch
assert torch.cuda.is_available() and torch.cuda.get_device_name() == "Tesla T4"
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
found = []
thread = threading.Thread(target=lambda: found.append(torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")))
thread.start()
thread.join()
assert torch.cuda.memory_reserved() == 20 << 20 and found[0].is_cuda
free, total = torch.cuda.mem_get_info()
from ullage.virtual.shared_card.cards import Cards
card = Cards.open(os.environ["ULLAGE_CARDS"]).cards[0]
assert total - free == card.used() > 20 << 20
del found
torch.cuda.empty_cache()
assert total - card.used() == torch.cuda.mem_get_info()[0] == free + (20 << 20)
assert str(torch.cuda.get_device_properties(0).uuid) == card.uuid.removeprefix("GPU-")
"""


@pytest.mark.slow
def test_pytorch_imported_late_with_another_sitecustomize(card, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import os; os.environ['OTHER'] = 'was run'")
    code = "import sys; before = set()\n" + LATE
    paths = os.pathsep.join([str(STARTUP), str(other)])
    assert end(start(card, code, tmp_path, PYTHONPATH=paths)) == (0, "", "")


@pytest.mark.slow
def test_a_process_that_is_to_see_no_card_sees_none(card, tmp_path):
    code = "import torch; assert not torch.cuda.is_available()"
    assert end(start(card, code, tmp_path, CUDA_VISIBLE_DEVICES=""))[0] == 0


@pytest.mark.slow
def test_a_folder_without_cards_is_reported_once(card, tmp_path):
    code, out, err = end(start(card, "import torch", tmp_path, ULLAGE_CARDS=str(tmp_path / "none")))
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert "cannot use its virtual card: " in err and "must be a folder of virtual cards" in err
