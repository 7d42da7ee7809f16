"""`ullage.estimate` of a function."""

import json

import pytest
import torch

import ullage


def training(steps=1000, width=512, batch=64):
    ran = []

    def train():
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for index in range(steps):
            ran.append(index)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(torch.randn(batch, width).cuda()), torch.randint(0, 10, (batch,)).cuda()
            ).backward()
            optimizer.step()

    return train, ran


def test_it_stops_when_memory_has_settled_and_gives_the_same_as_the_whole_run():
    train, ran = training(steps=40)
    short = ullage.estimate(train, gpu="H200")
    assert len(ran) == short.steps == 3
    whole = ullage.estimate(training(steps=40)[0], gpu="H200", steps=None)
    assert whole.steps == 40
    assert (short.peak_allocated, short.peak_reserved) == (whole.peak_allocated, whole.peak_reserved)


def test_the_breakdown_sums_up_to_the_process_memory():
    e = ullage.estimate(training()[0], gpu="A100-40GB")
    assert sum(e.breakdown.values()) == e.process_memory == e.peak_reserved + e.breakdown["context"]
    parameters = (512 * 512 + 512 + 512 * 10 + 10) * 4
    assert parameters <= e.breakdown["parameters"] < parameters + 2048
    assert e.fits and e.headroom == e.gpu_memory - e.process_memory
    assert e.upper >= e.process_memory


def test_a_job_that_does_not_fit_says_so_and_what_it_would_need():
    def train():
        torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")

    e = ullage.estimate(train, gpu="RTX-4060")
    assert not e.fits and e.headroom < 0
    assert e.peak_allocated == 10 * 2**30
    assert "CUDA out of memory" in e.out_of_memory and "DOES NOT FIT" in str(e)


def test_the_report_and_its_json_agree():
    e = ullage.estimate(training()[0], gpu="H200")
    values = json.loads(e.to_json())
    assert values["peak_reserved"] == e.peak_reserved and values["breakdown"] == e.breakdown
    assert "fits on H200" in str(e) and "optimizer" in str(e)
    assert max(point[1] for point in e.timeline) == e.peak_allocated


def test_bad_input_gets_one_clear_message():
    with pytest.raises(ullage.UllageError, match="H200"):
        ullage.estimate(training()[0], gpu="H20O")
    with pytest.raises(ullage.UllageError, match="function"):
        ullage.estimate(42, gpu="H200")


def test_an_error_of_the_function_comes_through():
    def train():
        raise KeyError("data")

    before = torch.cuda.is_available(), torch.cuda.device_count()
    with pytest.raises(KeyError, match="data"):
        ullage.estimate(train, gpu="H200")
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == before


def test_two_optimizers_in_turns_settle():
    ran = []

    def train():
        models = [torch.nn.Linear(256, 256).cuda() for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        for index in range(100):
            ran.append(index)
            for model, optimizer, rows in zip(models, optimizers, (64, 128), strict=True):
                optimizer.zero_grad()
                model(torch.randn(rows, 256, device="cuda")).sum().backward()
                optimizer.step()

    ullage.estimate(train, gpu="H200")
    assert 2 <= len(ran) <= 4
