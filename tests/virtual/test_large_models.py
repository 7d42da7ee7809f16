"""Large models cost the estimator neither their memory nor their initialisation."""

import subprocess
import sys

import pytest
import torch

import ullage
from ullage.virtual.memory import deferred_cpu

PROGRAM = """
import resource, torch, ullage

def train():
    model = torch.nn.Sequential(*[torch.nn.Linear(20480, 20480) for _ in range(10)])
    assert not model[0].weight.is_cuda
    model = model.to(torch.bfloat16).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 20480, dtype=torch.bfloat16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

estimate = ullage.estimate(train, gpu="H200")
print(estimate.breakdown["parameters"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_four_billion_parameters_take_less_than_two_gibibytes():
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    parameters, resident_kib = map(int, answer.stdout.split())
    assert parameters == 10 * (20480 * 20480 + 20480) * 2
    assert resident_kib < 2 * 2**20


def test_a_batch_beyond_host_memory_moves_to_the_gpu_unreadable(monkeypatch):
    def no_memory(make, *more):
        def refuse():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000 bytes.")

        return address_space(refuse, *more)

    address_space = deferred_cpu._address_space
    monkeypatch.setattr(deferred_cpu, "_address_space", no_memory)
    with ullage.virtual_gpu("H200"):
        batch = torch.randn(1000, 1000)
        assert batch.to("cuda").shape == (1000, 1000) and batch.to(torch.bfloat16).cuda().dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            batch[:3].tolist()
