"""`torch.jit.script` and `torch.jit.trace` under a virtual GPU."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import ullage
from ullage.virtual import virtual_gpu


def test_scripted_code_runs_as_python_and_leaks_nothing():
    before = torch.jit.script
    with virtual_gpu("H200"):

        @torch.jit.script
        def scale(x: torch.Tensor, length: int):
            return x * torch.sqrt(torch.tensor(length, dtype=torch.float)).to(x.device)

        assert scale(torch.ones(3, device="cuda"), 4).is_cuda
    assert torch.jit.script is before


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.out = nn.Conv2d(1, 8, 3), nn.Linear(8, 10)

    def forward(self, x):
        return self.out(torch.relu(self.convolution(x)).view(x.shape[0], 8, -1).mean(2))


def test_a_traced_module_is_called_once_and_trains_as_python(tmp_path):
    with virtual_gpu("H200") as gpu:
        model, images = Pooled().cuda(), torch.zeros(4, 1, 28, 28).cuda()
        traced = torch.jit.trace(model, images)
        traced(images).sum().backward()
        torch.jit.freeze(torch.jit.script(model.eval())).save(str(tmp_path / "model.pt"))
        torch.jit.save(traced, str(tmp_path / "traced.pt"))
    assert model.out.weight.grad is not None
    assert any("torch.jit.trace was skipped" in note for note in gpu.notes)


def test_tensorboard_draws_no_graph_and_keeps_training_mode(tmp_path):
    with virtual_gpu("H200"), SummaryWriter(tmp_path) as writer:
        model = Pooled().cuda()
        writer.add_graph(model, torch.zeros(4, 1, 28, 28).cuda())
        assert model.training


def test_tensorboard_is_given_a_traced_model_without_inputs(tmp_path):
    """As YOLOv5 does it: what is traced is not called again."""
    calls = []
    with virtual_gpu("H200"), SummaryWriter(tmp_path) as writer:
        model = Pooled().cuda()
        model.register_forward_hook(lambda *_: calls.append(model.training))
        writer.add_graph(torch.jit.trace(model, torch.zeros(4, 1, 28, 28).cuda(), strict=False), [])
        assert calls == [True] and model.training


def test_a_model_trains_on_after_tensorboard_could_not_draw_it(tmp_path):
    with virtual_gpu("H200"), SummaryWriter(tmp_path) as writer:
        model = Pooled().cuda()
        with pytest.raises(RuntimeError):
            writer.add_graph(model, torch.zeros(4, 2, 28, 28).cuda())
        assert model.training


def test_a_script_module_runs_as_python():
    compiled = torch.jit.script(nn.Linear(2, 2))
    with virtual_gpu("H200"):

        class Gated(torch.jit.ScriptModule):
            def __init__(self):
                super().__init__()
                self.gate = nn.Linear(4, 4)

            @torch.jit.script_method
            def forward(self, x):
                return nn.functional.normalize(x.view(2, 4), dim=-1, p=2.0) * torch.sigmoid(self.gate(x))

        model = Gated().cuda()
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        assert model.gate.weight.grad is not None and isinstance(compiled, torch.jit.ScriptModule)
        assert not isinstance(model.gate, torch.jit.ScriptModule) and not isinstance(compiled, Gated)


SCRIPTED = """
import torch

@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

class Doubled(torch.nn.Linear):
    def forward(self, x):
        return double(super().forward(x))
"""


def test_parts_that_an_import_skipped_count_in_later_runs(tmp_path, monkeypatch):
    """An answer does not depend on what was asked before: a module is imported once in a process."""
    tmp_path.joinpath("scripted_once.py").write_text(SCRIPTED)
    monkeypatch.syspath_prepend(tmp_path)

    def train(name, module):
        layer = getattr(importlib.import_module(module), name)(64, 64).cuda()
        layer(torch.zeros(64, 64, device="cuda")).sum().backward()

    first, again = (ullage.estimate(lambda: train("Doubled", "scripted_once"), gpu="H200") for _ in range(2))
    other = ullage.estimate(lambda: train("Linear", "torch.nn"), gpu="H200")
    assert first.left_out and first.notes == ["torch.jit.script was skipped: the Python code ran instead"]
    assert (again.notes, again.left_out, again.upper) == (first.notes, first.left_out, first.upper)
    assert not other.left_out
