"""torch.save and torch.load with tensors of the virtual GPU."""

import pytest
import torch
from torch import nn

from ullage.virtual import virtual_gpu


@pytest.fixture(autouse=True)
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_is_small_and_has_the_right_shapes(gpu, path):
    model = nn.Linear(1000, 1000).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1000, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    assert path.stat().st_size < 20_000
    assert any("saved" in note for note in gpu.notes)

    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    checkpoint = torch.load(path)
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    assert after - before == 3 * (4_000_000 + 4000)
    weight = checkpoint["model"]["weight"]
    assert weight.device == torch.device("cuda:0") and weight.shape == (1000, 1000) and weight.is_contiguous()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert checkpoint["epoch"] == 3


def test_such_a_checkpoint_can_be_loaded_outside(path):
    torch.save(nn.Linear(1000, 10).cuda().state_dict(), path)
    with torch.utils._python_dispatch._disable_current_modes():
        state = torch.load(path, map_location="cpu")
    assert state["weight"].shape == (10, 1000) and state["weight"].device.type == "cpu"


@pytest.mark.parametrize(
    "map_location",
    ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, lambda storage, location: storage.cuda(0)],
    ids=["cuda", "cuda:0", "device", "dict", "function"],
)
def test_cpu_tensors_go_where_map_location_says(path, map_location):
    with torch.utils._python_dispatch._disable_current_modes():
        torch.save({"weight": torch.randn(100, 100)}, path)
    before = torch.cuda.memory_allocated()
    weight = torch.load(path, map_location=map_location)["weight"]
    assert weight.is_cuda and weight.shape == (100, 100)
    assert torch.cuda.memory_allocated() - before == 40448


@pytest.mark.parametrize("map_location", [None, "cpu", lambda storage, location: storage])
def test_cpu_tensors_stay_on_the_cpu_with_their_values(path, map_location):
    torch.save(torch.arange(5000), path)
    loaded = torch.load(path, map_location=map_location)
    assert loaded.device.type == "cpu" and loaded[-1] == 4999


def test_shared_storages_stay_shared(path):
    x = torch.randn(100)
    torch.save({"whole": x, "part": x[10:20]}, path)
    loaded = torch.load(path, map_location="cuda")
    assert loaded["part"].data_ptr() == loaded["whole"].data_ptr() + 40
    x = x.cuda()
    torch.save({"one": x, "same": x}, path)
    loaded = torch.load(path)
    assert loaded["one"].data_ptr() == loaded["same"].data_ptr()


def test_small_values_that_are_known_survive(path):
    torch.save(torch.tensor([1, 2, 3], device="cuda"), path)
    assert torch.load(path).tolist() == [1, 2, 3]


def test_whole_models_are_saved_and_loaded(path):
    torch.save(nn.Linear(10, 10).cuda(), path)
    model = torch.load(path, weights_only=False)
    assert isinstance(model.weight, nn.Parameter) and model.weight.is_cuda and model.weight.requires_grad
    assert model(torch.ones(2, 10, device="cuda")).shape == (2, 10)


def test_a_location_that_is_not_there_is_refused(path):
    torch.save(torch.ones(3), path)
    with pytest.raises(RuntimeError, match="device_count"):
        torch.load(path, map_location="cuda:1")


def test_a_resumed_optimizer_continues_its_steps_on_the_gpu(path):
    model = nn.Linear(10, 10).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.randn(2, 10, device="cuda")).sum().backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), path)
    optimizer.load_state_dict(torch.load(path, map_location="cuda"))  # which puts the counts on the GPU
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
