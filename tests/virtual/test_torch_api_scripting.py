"""`torch.jit.script` under a virtual GPU."""

import torch

from ullage.virtual import virtual_gpu


def test_what_is_scripted_inside_runs_as_python_and_nothing_leaks_out():
    before = torch.jit.script
    with virtual_gpu("H200"):

        @torch.jit.script
        def scale(x: torch.Tensor, length: int):
            return x * torch.sqrt(torch.tensor(length, dtype=torch.float)).to(x.device)

        assert scale(torch.ones(3, device="cuda"), 4).is_cuda
    assert torch.jit.script is before
