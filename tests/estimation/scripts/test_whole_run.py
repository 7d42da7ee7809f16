"""A script is followed to its end: what comes beside training and after it, by the shortest way."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ullage.estimation.scripts import parent
from ullage.estimation.scripts.request import ScriptRequest
from ullage.hardware import gpu as find_gpu
from ullage.sandbox.interpreter import Interpreter

HEAD = """
import copy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
MIB = 1 << 20
def net():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
model = net().cuda()
optimizer = torch.optim.Adam(model.parameters())
def step(x=None):
    x = torch.randn(8, 64, device="cuda") if x is None else x
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
def rows(count=800):
    return DataLoader(TensorDataset(torch.randn(count, 64)), 8)
def large(size=400):
    return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
"""

ENDLESS = {
    "for": "for i in range(10**9):\n    step()",
    "while": "while True:\n    step()",
    "nested": "for epoch in range(10**9):\n    for i in range(10**9):\n        step()",
    "loader": "for epoch in range(10**9):\n    for x, in rows(): step(x.cuda())",
    "function": "def train():\n    for i in range(10**9):\n        step()\ntrain()",
    "single batches": "batches = iter(rows(8 * 10**4))\nfor i in range(10**4): step(next(batches)[0].cuda())",
    "generator": """
def batches():
    while True:
        for i in range(100):
            yield torch.randn(8, 64, device="cuda")
source = batches()
for i in range(10**9):
    step(next(source))
""",
    "a stream read by a generator": """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True: yield torch.randn(64)
def batches():
    for x in DataLoader(Stream(), 8):
        yield x.cuda()
source = batches()
for i in range(10**9):
    step(next(source))
""",
}


@pytest.fixture(autouse=True)
def short_look(monkeypatch):
    monkeypatch.setattr("ullage.estimation.scripts.when_to_stop.SHORTEST_LOOK", 0.1)


def test_a_cut_epoch_has_a_second_batch_for_its_mean(follow):
    """Scripts divide an epoch's loss by the index of its last batch."""
    epoch = "for epoch in range(4):\n    total = 0.0\n    for n, (x,) in enumerate(rows()):\n        step(x.cuda())\n"
    answer = follow(HEAD + epoch + "    total /= n\nfinal = large(1000)")
    assert answer["estimate"]["peak_allocated"] > 1000 << 20
    assert not any("failed" in note for note in answer["estimate"]["notes"])


@pytest.mark.parametrize("loop", ENDLESS)
def test_code_after_training_is_followed(estimated, loop):
    values = estimated(HEAD + ENDLESS[loop] + "\nmerged = large()\nprint('the end')")
    assert "the end" in values["printed"]
    assert values["phases"]["after training"] == values["peak_reserved"] > 400 << 20
    assert values["phases"]["training"] < 200 << 20


AFTERWARDS = {
    "a sampler": "for t in range(10**9): y = model(x)",
    "a while loop": "while True: y = model(x)",
    "a loader": "for x, in rows(10**6): model(x.cuda())",
    "a sampler that is a module": """
class Sampler(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x):
        for t in range(10**9): x = x + self.net(x).sum()
        return x
with torch.no_grad(): Sampler(model)(x)
""",
}


@pytest.mark.parametrize("what", AFTERWARDS)
def test_loops_without_training_end_as_soon_as_they_repeat(estimated, what):
    train = "for i in range(5): step()\nmodel.requires_grad_(False)\nx = torch.randn(8, 64, device='cuda')\n"
    values = estimated(HEAD + train + AFTERWARDS[what] + "\nmodel.eval(); print('the end')\nlarge()")
    assert "the end" in values["printed"] and values["peak_reserved"] > 400 << 20
    assert any("cut short once" in note for note in values["notes"])


WHOLE = {
    "a forward pass that is differentiated": """
class Again(nn.Module):
    def forward(self, x):
        self.rounds = 0
        for _ in range(40):
            model(x); self.rounds += 1
        return x
again = Again()
again(torch.randn(8, 64, device="cuda"))
print("rounds", again.rounds)
""",
    "layers of a forward pass": """
class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)] + [nn.Linear(64, 4096)])
    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        print("stages", len(self.stages))
        return x
with torch.no_grad():
    print(Stages().cuda()(torch.randn(8, 64, device="cuda")).shape)
""",
    "weights that are merged": """
weights = [torch.empty(64, 64, device="cuda")] * 6 + [torch.empty(10240, 10240, device="cuda")]
with torch.no_grad():
    for number, weight in enumerate(weights):
        weight.add_(torch.ones(weight.shape[0], 8, device="cuda") @ torch.ones(8, weight.shape[1], device="cuda"))
print("merged", number)
""",
    "results that are kept": """
kept = []
for number in range(40):
    with torch.no_grad():
        kept.append(model(torch.randn(1024, 64, device="cuda")))
print("kept", len(kept))
""",
}


@pytest.mark.parametrize("what", WHOLE)
def test_loops_whose_iterations_may_differ_are_followed_whole(estimated, what):
    values = estimated(HEAD + "for i in range(5): step()\n" + WHOLE[what])
    assert any(end in values["printed"] for end in ("[8, 4096]", "merged 6", "kept 40", "rounds 40"))


def test_a_rollout_before_training_settles_counts_completely(estimated):
    values = estimated(
        HEAD
        + """
for i in range(4):
    gathered = []
    for t in range(100):
        with torch.no_grad():
            gathered.append(model(torch.randn(1, 64, device="cuda")).cpu())
        seen = len(gathered)
    print("gathered", seen)
    step(torch.randn(seen, 64, device="cuda"))
"""
    )
    assert values["printed"].count("gathered 100") >= 3


def test_the_second_of_several_tasks_sees_the_rest_of_the_first(estimated):
    tasks = """
kept = []
for task in range(9):
    print("task", task)
    for i in range(10**9): step()
    kept.append(large(100))
"""
    values = estimated(HEAD + tasks)
    assert values["peak_allocated"] >= 200 << 20 and "task 2" not in values["printed"]


def test_training_that_cannot_be_ended_is_stopped_with_a_note(estimated):
    source = "def steps():\n    while True:\n        yield step()\nlist(steps())\nprint('the end')"
    values = estimated(HEAD + source)
    assert "the end" not in values["printed"]
    assert {"what comes after training"} <= {entry["what"] for entry in values["left_out"]}


def test_a_failure_after_a_loop_was_cut_is_a_note(estimated):
    source = "n = 0\nfor i in range(10**6):\n    step(); n += 1\nassert n == 10**6, '\\x1b[1mtoo few\\x1b[0m steps'"
    values = estimated(HEAD + source)
    assert any("failed (AssertionError: too few steps" in note for note in values["notes"])
    assert {"what comes after the script failed"} <= {entry["what"] for entry in values["left_out"]}


def test_a_second_stage_has_its_own_steps(estimated):
    values = estimated(
        HEAD
        + """
for i in range(10**6): step()
model = nn.Linear(64, 1 << 20).cuda()
optimizer = torch.optim.Adam(model.parameters())
for i in range(10**6): step()
print("steps", len(optimizer.state[model.weight]), i)
"""
    )
    assert "steps 3 2" in values["printed"], "three steps, with the state that the optimizer makes in the first"
    assert values["peak_allocated"] > 4 * 256 << 20


SEEN = """
loader, held_out = rows(), rows()
average = copy.deepcopy(model).eval()
number = 0
for epoch in range(1000):
    for x, in loader:
        step(x.cuda())
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters()):
                a.lerp_(b, 0.1)
        number += 1
    BESIDE
print("the end")
"""
BESIDE = {
    "validation": "model.eval(); [model(x.cuda()) for x, in held_out]; large(); model.train()",
    "generation": """tokens = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    while tokens.shape[1] < 50:
        with torch.no_grad():
            model(torch.randn(tokens.shape[1], 64, device="cuda"))
        tokens = torch.cat([tokens, tokens[:, -1:]], 1)
    large()""",
    "checkpoint": "torch.save(model.state_dict(), 'last.pt'); torch.load('last.pt', weights_only=True); large()",
    "average of the weights": "average(torch.randn(8, 64, device='cuda')); copy.deepcopy(average); large()",
}


@pytest.mark.parametrize("what", BESIDE)
def test_code_next_to_training_is_followed(estimated, what):
    values = estimated(HEAD + SEEN.replace("BESIDE", BESIDE[what]))
    assert "the end" in values["printed"] and values["peak_reserved"] > 400 << 20


def test_functions_that_a_library_compiles_are_left_as_they_are(estimated):
    values = estimated(
        HEAD
        + """
def njit(function):
    print("names", function.__code__.co_names)
    return function
@njit
def count():
    for i in range(3): pass
for i in range(5): step()
"""
    )
    assert "names ('range',)" in values["printed"]


def test_modules_next_to_the_script_are_followed_alike(estimated, tmp_path):
    (tmp_path / "engine_beside.py").write_text("def fit(step):\n    while True:\n        step()\n")
    values = estimated(HEAD + "import engine_beside\nengine_beside.fit(step)\nlarge(); print('the end')")
    assert "the end" in values["printed"] and values["peak_reserved"] > 400 << 20
    assert not list(tmp_path.glob("__pycache__/engine_beside*")), "bytecode that asks is not left behind"


EVERY_SO_OFTEN = {
    "at the head": "if i % 2000 == 0: now()",
    "not at first": "if i > 0 and i % 2000 == 0: now()",
    "the last of them": "if i % 2000 == 1999: now()",
    "not": "if not (i + 1) % 2000: now()",
    "in a function": "callback(i)",
    "by a function that is asked": "if i != 0 and divisible_by(i, 2000): now()",
}


def test_a_training_loop_in_a_library_ends_too(estimated, tmp_path_factory):
    library = tmp_path_factory.mktemp("site-packages")
    (library / "fitting.py").write_text(
        "def fit(model, optimizer, x):\n"
        "    for i in range(10**9):\n        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()\n"
        "    return i\n"
    )
    fitted = f"""
import sys
sys.path.append({str(library)!r})
import fitting
fitting.fit(model, optimizer, torch.randn(8, 64, device="cuda"))
large(); print("the end")
"""
    values = estimated(HEAD + fitted)
    assert "the end" in values["printed"] and values["peak_reserved"] > 400 << 20


@pytest.mark.parametrize("when", EVERY_SO_OFTEN)
def test_work_every_n_steps_is_brought_forward(estimated, when):
    functions = """
def now():
    print("now"); large()
def callback(i):
    if i % 2000 == 1: now()
def divisible_by(number, by): return number % by == 0
"""
    loop = f"for i in range(10**9):\n    {EVERY_SO_OFTEN[when]}\n    step()\n"
    values = estimated(HEAD + functions + loop)
    assert "now" in values["printed"] and values["peak_reserved"] > 400 << 20
    assert any("ran early" in note for note in values["notes"])


def test_conditions_of_other_kinds_are_left_alone(estimated):
    values = estimated(
        HEAD
        + """
class Alternating(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        for i in range(1, 8):
            if i % 100 == 0: raise AssertionError("in a forward pass")
            x = self.b(x) if i % 2 == 0 else self.a(x)
        return x
model = Alternating().cuda()
optimizer = torch.optim.SGD(model.parameters())
for i in range(40):
    if (i + 1) % 2 == 0: print("second", i)
    step()
for layer in range(1, 50):
    if layer % 100 == 0: raise AssertionError("in one step")
print("the end")
"""
    )
    assert "the end" in values["printed"] and not any("ran early" in note for note in values["notes"])
    seconds = [int(line.split()[1]) for line in values["printed"].splitlines() if line.startswith("second")]
    assert seconds and all(number % 2 for number in seconds)


def test_the_last_batch_of_an_epoch_is_seen_where_it_is_smaller(estimated):
    values = estimated(
        HEAD
        + """
for epoch in range(2):
    for x, in rows(803):
        print("train", len(x)); step(x.cuda())
    with torch.no_grad():
        for x, in rows(8005):
            print("validation", len(x)); model(x.cuda())
for x, in rows(800): print("even", len(x)); step(x.cuda())
"""
    )
    lines = values["printed"].splitlines()
    assert lines.count("train 3") == 2 and lines.count("validation 5") == 2 and len(lines) < 60
    assert {line for line in lines if line.startswith("even")} == {"even 8"}


COUNTED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(640, 64))
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(20):
    model.train()
    for x, in DataLoader(data, 64):
        optimizer.zero_grad(); model(x.cuda()).sum().backward(); optimizer.step()
    model.eval()
    seen = 0
    with torch.no_grad():
        for x, in DataLoader(data, 8):
            model(x.cuda()); seen += len(x)
    if seen != len(data) and torch.distributed.get_rank() == 0:
        print("counted", seen)
model(torch.randn(1 << 20, 64, device="cuda"))
"""


def test_a_script_that_counts_what_it_evaluated_goes_on(estimated):
    """As torchvision's do: without a process group they ask for their rank only if samples are missing."""
    found = estimated(COUNTED)
    assert "counted" in found["printed"] and not any("failed" in note for note in found["notes"])
    assert found["peak_reserved"] > 256 << 20


def test_a_metric_of_the_hub_has_a_stand_in(estimated, tmp_path_factory, monkeypatch):
    library = tmp_path_factory.mktemp("library")
    (library / "evaluate.py").write_text("def load(path): raise FileNotFoundError(path)")
    monkeypatch.syspath_prepend(library)
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    source = """
    import evaluate, torch
    metric = evaluate.load("accuracy")
    torch.ones(8, device="cuda")
    metric.add_batch(predictions=[1], references=[0])
    print(metric.compute()["f1"], list(metric.compute()))
    """
    found = estimated(source)
    assert "0.0 ['accuracy']" in found["printed"]
    assert any("the metric accuracy was not downloaded" in note for note in found["notes"])


def test_missing_data_sets_of_one_size_have_stand_ins(estimated):
    source = """
    import torch, torchvision.datasets as datasets
    from torch.utils.data import DataLoader
    from torchvision.transforms import ToTensor

    class Small(datasets.CIFAR100):
        def __getitem__(self, index):
            return super().__getitem__(index)[0]

    train = Small("data", train=True, transform=ToTensor())
    test = datasets.MNIST("data", train=False, transform=ToTensor())
    print(len(train), len(train.classes), len(test), len(datasets.EMNIST("data", split="letters").classes))
    print(datasets.SVHN("data", "test")[25][1], datasets.STL10("data", "train")[0][0].size)
    print(train.data[:9].std() > 50, test.data[:9].float().std() > 50, (train.data[0] != train.data[1]).any())
    model = torch.nn.Linear(3072, 10, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(train, 256):
        model(batch.cuda().flatten(1)).mean().backward()
        optimizer.step()
    """
    found = estimated(source)
    assert "50000 100 10000 27\n5 (96, 96)" in found["printed"]
    assert "True tensor(True) True" in found["printed"], "noise: a script may divide by the deviation of its data"
    assert any("Small is not in data" in note and "50,000" in note for note in found["notes"])


PLANETOID = """
class Planetoid:
    def __init__(self, root, name):
        self.root, self.name, self.pre_transform = root, name, None
        self.raw_paths, self.processed_paths = [root + "/raw"], [root + "/processed"]
        self.download()
        self.process()
    def download(self): raise ConnectionError("no network")
    def process(self): raise FileNotFoundError
    def save(self, graphs, path): self.graph, = graphs
"""


def test_a_graph_that_is_not_there_has_a_stand_in_of_its_size(estimated, tmp_path_factory, monkeypatch):
    library = tmp_path_factory.mktemp("library") / "torch_geometric"
    (library / "datasets").mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "data.py").write_text("from types import SimpleNamespace as Data")
    (library / "datasets" / "__init__.py").write_text("from torch_geometric.datasets.planetoid import Planetoid")
    (library / "datasets" / "planetoid.py").write_text(PLANETOID)
    monkeypatch.syspath_prepend(library.parent)
    source = """
    from torch_geometric.datasets import Planetoid
    graph = Planetoid("data", "Cora").graph
    print(tuple(graph.x.shape), tuple(graph.edge_index.shape), int(graph.train_mask.sum()), int(graph.y.max()))
    graph.x.cuda()
    """
    found = estimated(source)
    assert "(2708, 1433) (2, 10556) 140 6" in found["printed"]
    assert any("Cora is not in data: a synthetic graph of the same size" in note for note in found["notes"])


IGNITE = """
import enum
Events = enum.Enum("Events", "DATALOADER_STOP_ITERATION EPOCH_COMPLETED")

class Engine:
    def __init__(self, function): self.function, self.handlers = function, []
    def _fire_event(self, event):
        for handler in self.handlers if event is Events.EPOCH_COMPLETED else (): handler(self)
    def terminate_epoch(self): self.ended = True
    def terminate(self): self.stopped = True
    def run(self, loader, max_epochs=1):
        self.stopped = False
        for epoch in range(max_epochs):
            self.ended, self._dataloader_iter, counted = False, iter(loader), 0
            while counted < len(loader) and not self.ended:
                try:
                    batch = next(self._dataloader_iter)
                except StopIteration:
                    self._fire_event(Events.DATALOADER_STOP_ITERATION)
                    self._dataloader_iter = iter(loader)
                    continue
                self.function(self, batch)
                counted += 1
            self._fire_event(Events.EPOCH_COMPLETED)
            if self.stopped: return
"""


def test_an_engine_that_counts_batches_reaches_its_validation(estimated, tmp_path_factory, monkeypatch):
    """As PyTorch Ignite's does, by a small stand-in of it."""
    library = tmp_path_factory.mktemp("library") / "ignite"
    (library / "engine").mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "engine" / "__init__.py").write_text("from ignite.engine.engine import Engine")
    (library / "engine" / "engine.py").write_text(IGNITE)
    monkeypatch.syspath_prepend(library.parent)
    source = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from ignite.engine import Engine
    data = TensorDataset(torch.zeros(4000, 64))
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def train(engine, batch): optimizer.zero_grad(); model(batch[0].cuda()).sum().backward(); optimizer.step()
    def judge(engine, batch): model(batch[0].cuda().repeat(1 << 10, 1))
    trainer, evaluator = Engine(train), Engine(judge)
    trainer.handlers.append(lambda engine: evaluator.run(DataLoader(data, 256)))
    trainer.run(DataLoader(data, 8), max_epochs=30)
    print("done")
    """
    found = estimated(source)
    assert "done" in found["printed"] and found["peak_reserved"] > 64 << 20


def test_batches_that_a_step_is_made_of_are_all_seen(estimated, monkeypatch):
    monkeypatch.setattr("ullage.estimation.scripts.loops.LONGEST_LOOP", 0.0)
    accumulate = """
for batch in range(40):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    if batch == 39: optimizer.step()
print("batches", batch + 1)
"""
    assert "batches 40" in estimated(HEAD + accumulate)["printed"]


SELECTS = """
mask = torch.rand(64, 512, 1024, device="cuda") > 0.9
pictures = torch.randn(64, 512, 1024, device="cuda")
for i in range(10):
    crops = torch.masked_select(pictures, mask)CROP
    step()
"""


def test_a_selection_known_from_a_shape_is_known_in_another_run(follow):
    script = HEAD + SELECTS.replace("CROP", ".view(64, 32, 32)")
    first = follow(script)
    assert first["sizes"] == {"masked_select of (64, 512, 1024)": 1 << 16}
    second = follow(script, sizes=first["sizes"])
    assert "sizes" not in second
    saved = (64 * 512 * 1024 - (1 << 16)) * (4 + 3 * 8)  # the elements, and where they are
    peaks = [answer["estimate"]["peak_allocated"] for answer in (first, second)]
    assert peaks[0] - peaks[1] >= saved
    assert any("as a later shape implies" in note for note in second["estimate"]["notes"])


def test_a_selection_without_a_shape_is_as_large_as_possible(follow):
    both = SELECTS.replace("CROP", ".view(64, 32, 32)") + SELECTS.replace("CROP", "")
    assert follow(HEAD + both).get("sizes", {}) == {}


def test_a_script_whose_shapes_reveal_selections_runs_again(monkeypatch):
    asked = []

    def run(entry, values, **options):
        asked.append(values["sizes"])
        answer = {"status": "estimated", "number": len(asked)} | ({"sizes": {"x": 3}} if len(asked) == 1 else {})
        return SimpleNamespace(answer=answer, reason=None, failure=None, last_lines=lambda count: "")

    monkeypatch.setattr(parent, "run", run)
    request = ScriptRequest(
        path="train.py", args=[], module=False, gpu=find_gpu("H200"), steps=3, timeout=1.0, limited=True
    )
    _, found = parent.follow(parent.Run(request=request, python=Interpreter(sys.executable, {})))
    assert asked == [{}, {"x": 3}] and found["number"] == 2


def test_module_of_the_script_is_imported_before_a_waiting_one(follow, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "httpx"]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setitem(sys.modules, "httpx", ModuleType("httpx"))
    (tmp_path / "httpx.py").write_text("print('of the script')")
    assert "of the script" in follow("import httpx")["printed"]
