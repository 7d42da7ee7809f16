"""`torch.jit.script` and `torch.jit.trace` under a virtual GPU."""

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from ullage.virtual import virtual_gpu


def test_what_is_scripted_inside_runs_as_python_and_nothing_leaks_out():
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
    assert any("torch.jit.trace was left out" in note for note in gpu.notes)


def test_tensorboard_draws_no_graph_and_the_model_stays_in_training(tmp_path):
    with virtual_gpu("H200"), SummaryWriter(tmp_path) as writer:
        model = Pooled().cuda()
        writer.add_graph(model, torch.zeros(4, 1, 28, 28).cuda())
        assert model.training
