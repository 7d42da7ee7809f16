"""How fast and how busy, as a part of every estimate."""

import json
from dataclasses import replace

import pytest
import torch

import ullage
from ullage.estimation.jobs.child import estimate_here
from ullage.estimation.over_gpus import estimate_over_gpus
from ullage.estimation.result import Estimate

SCRIPT = """\
import torch
model = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.zeros(8, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def train():
    exec(SCRIPT, {})


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def estimated() -> Estimate:
    return ullage.estimate(train, gpu="H200")


def test_a_function_a_script_and_a_model_say_how_long_a_step_takes(estimated, script):
    found = estimated.utilization
    assert found.gpu == "H200" and found.steady and found.gpu_s > 0 and found.kernels > 0
    assert ullage.estimate(script, gpu="H200").utilization == found
    model = ullage.estimate("torchvision:resnet18", batch_size=2, input_shape=[3, 32, 32], gpu="H200")
    assert model.utilization.flops > found.flops


def test_it_is_in_the_json_and_is_read_back(estimated):
    values = json.loads(estimated.to_json())
    assert values["utilization"]["step_s"] == estimated.utilization.step_s
    assert "step_calls" not in values
    assert Estimate.from_dict(values).utilization == estimated.utilization
    del values["utilization"]  # of an older version
    assert Estimate.from_dict(values).utilization is None


def test_gpus_that_share_a_run_have_a_utilization_of_their_own():
    runs = []

    def run(card):
        runs.append(card.name)
        return ullage.estimate(train, gpu=card)

    cards = [ullage.gpu(name) for name in ("A100-40GB", "A100-80GB")]
    small, large = estimate_over_gpus(run, cards)
    assert len(runs) == 1
    assert (small.utilization.gpu, large.utilization.gpu) == ("A100-40GB", "A100-80GB")


def test_it_is_unknown_where_no_step_was_seen():
    assert ullage.estimate(lambda: torch.zeros(10, device="cuda"), gpu="H200").utilization is None
    assert ullage.estimate("torchvision:resnet18", batch_size=2, estimator="accelerate").utilization is None


def test_an_estimate_of_memory_does_not_fail_because_of_it(estimated):
    broken = replace(estimated.step_calls, calls=[{}])
    found = estimated.with_utilization(broken, ullage.gpu("H200"))
    assert found.utilization is None and found.peak_reserved == estimated.peak_reserved
    assert "how long a step takes is not known: KeyError: 'operator'" in found.notes
    assert found.with_utilization(broken, ullage.gpu("T4")).notes == found.notes


def test_the_estimate_of_a_job_has_it_for_each_gpu():
    question = {"source": "torchvision:resnet18", "args": (), "module": False, "program": None, "launcher": ()}
    options = {"batch_size": 2, "input_shape": [3, 32, 32]}
    found = estimate_here(
        {"questions": [{**question, "options": options}], "conda": None, "gpus": ["H200", "T4"], "estimator": "ullage"}
    )
    assert found["utilization"].keys() == {"H200", "T4"}
    assert found["utilization"]["T4"]["gpu_s"] > found["utilization"]["H200"]["gpu_s"]
