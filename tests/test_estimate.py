"""`ullage.estimate` of a function."""

import gc
import inspect
import json
import os
import pickle
import weakref

import pytest
import torch

import ullage
from ullage.allocator import AllocatorConfig
from ullage.errors import (
    DamagedRecord,
    DeviceLost,
    InvalidValue,
    JobNotFound,
    MissingPackage,
    PolicyFailed,
    ScriptFailed,
    UnknownName,
)


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


def test_tensors_of_a_run_out_of_memory_are_released():
    held = []

    def train():
        batch = torch.randn(1 << 24)
        held.append(weakref.ref(batch))
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

    before = torch.get_rng_state()
    gc.disable()
    try:
        assert not ullage.estimate(train, gpu="T4").fits
        assert len(held) == 2 and not any(batch() is not None for batch in held)
    finally:
        gc.enable()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_stops_early_equals_the_whole_run():
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


def test_options_are_parameters_in_the_signature():
    parameters = inspect.signature(ullage.estimate).parameters
    assert len(parameters) < 15 and {"job", "gpu", "batch_size", "args", "ranks", "training"} <= set(parameters)
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    assert all(f"{name}:" in (ullage.estimate.__doc__ or "") for name in parameters)
    assert pickle.loads(pickle.dumps(ullage.estimate)) is ullage.estimate


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("torchvision:resnet18", {"batchsize": 8}, "no option named 'batchsize'; did you mean 'batch_size'"),
        ("torchvision:resnet18", {"precison": "bf16"}, "did you mean 'precision'"),
        ("torchvision:resnet18", {"args": ["-b"]}, "'args' is an option for a script; this is a model"),
        ("train.py", {"batch_size": 8}, r"this is a script. A script takes its own arguments: args="),
        (print, {"batch_size": 8}, "this is a function. Wrap the call"),
        (print, {"optimizer": "sgd"}, r"optimizer is a field of Model: estimate\(Model\(name, optimizer=\.\.\.\)\)"),
        (print, {"timeout": 3.0}, r"timeout is a field of Script: estimate\(Script\(path, timeout="),
        (print, {"nodes": 2}, r"nodes is a field of Ranks: estimate\(job, ranks=Ranks\(size, nodes="),
        (print, {"epochs": 2}, r"epochs is a field of Training: estimate\(job, training=Training\(epochs="),
    ],
)
def test_an_option_that_the_job_does_not_have_is_refused(source, options, said):
    with pytest.raises(ullage.UllageError, match=said):
        ullage.estimate(source, **options)


def test_allocator_settings_are_taken():
    settings = AllocatorConfig.parse("expandable_segments:True")
    plain = ullage.estimate(training(width=1500)[0], gpu="H200")
    new = ullage.estimate(training(width=1500)[0], gpu="H200", allocator=settings)
    assert new.peak_reserved < plain.peak_reserved


ERRORS = (
    UnknownName("GPU", "H20O", ["H200"]),
    MissingPackage("timm", "models"),
    ScriptFailed("a", "b", own=True),
    DeviceLost("GPU-1", "lost"),
    PolicyFailed("mine.py:choose", 7, "none"),
    DamagedRecord(17, "no JSON"),
    JobNotFound("17"),
    InvalidValue("x"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_another_process_gets_an_error_as_it_was(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_a_function_that_draws_its_layers_takes_the_same_again():
    def train():
        x = torch.zeros(256, 512, device="cuda")
        for layer in [torch.nn.Linear(512, 512).cuda() for _ in range(20)]:
            x = layer(x) if torch.rand([]) < 0.5 else x
        x.sum().backward()

    first, again = (ullage.estimate(train, gpu="H200") for _ in range(2))
    assert again.peak_allocated == first.peak_allocated


def test_allocator_settings_of_a_function_end_with_it(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def train():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.nn.Linear(512, 512).cuda()(torch.zeros(256, 512, device="cuda")).sum().backward()

    first, again = (ullage.estimate(train, gpu="H200") for _ in range(2))
    assert again.peak_reserved == first.peak_reserved
    assert "PYTORCH_ALLOC_CONF" not in os.environ
