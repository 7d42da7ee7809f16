"""What each option does to the memory of a run, by a comparison that can fail."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import ullage
from ullage.errors import InvalidValue, MissingPackage, UllageError, UnknownName
from ullage.jobs.optimizers import make_optimizer, optimizer_class
from ullage.jobs.sources.build import checkpoint_activations, freeze
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

RESNET = {"batch_size": 8, "input_shape": [3, 64, 64]}


_found = {}


def run(source="torchvision:resnet18", **options):
    """Each estimate once: several tests compare with the same one."""
    key = source, repr(sorted(options.items()))
    if key not in _found:
        _found[key] = ullage.estimate(ullage.Model(source, **RESNET | options), gpu="A100-40GB")
    return _found[key]


@pytest.fixture
def plain():
    return run()


def test_optimizers_keep_what_they_keep(plain):
    weights = sum(p.numel() * 4 for p in __import__("torchvision").models.resnet18().parameters())
    sgd = run(optimizer="sgd").peak_allocated
    assert plain.breakdown["optimizer"] >= 2 * weights > run(optimizer="sgd").breakdown["optimizer"]
    assert run(optimizer="momentum").peak_allocated == run(optimizer="sgdm").peak_allocated > sgd


def test_lower_precision_takes_less(plain):
    assert run(precision="bf16").breakdown["parameters"] < 0.6 * plain.breakdown["parameters"]
    assert run(precision="fp16").peak_allocated == run(precision="bf16").peak_allocated
    large = {"input_shape": [3, 224, 224]}
    assert run(precision="amp_bf16", **large).peak_allocated < run(**large).peak_allocated
    before = torch.get_float32_matmul_precision()
    assert run(precision="tf32").fits
    assert torch.get_float32_matmul_precision() == before


def test_checkpointing_accumulation_inference_and_frozen_layers(plain):
    large = {"input_shape": [3, 224, 224], "batch_size": 32}
    whole = run(**large).peak_allocated
    assert run(checkpointing=True, **large).peak_allocated < 0.8 * whole
    assert run(inference=True, **large).peak_allocated < 0.4 * whole
    assert run(freeze=["conv1", "bn1", "layer*"]).breakdown["optimizer"] < 0.1 * plain.breakdown["optimizer"]
    accumulated = run(gradient_accumulation=4)
    assert plain.peak_allocated <= accumulated.peak_allocated < 1.5 * plain.peak_allocated
    assert accumulated.steps == 3


def test_attention_kernels_are_chosen():
    vit = {"source": "timm:test_vit", "input_shape": [3, 160, 160], "precision": "amp_bf16", "batch_size": 64}
    assert run(attention="math", **vit).peak_allocated > run(attention="flash", **vit).peak_allocated
    with pytest.raises(UllageError, match="attention flash: RuntimeError: No available kernel"):
        run("timm:test_vit", attention="flash", input_shape=[3, 160, 160])


def test_any_optimizer_of_pytorch_by_its_name():
    parameters = [nn.Parameter(torch.zeros(2))]
    assert isinstance(make_optimizer("RAdam", parameters), torch.optim.RAdam)
    assert make_optimizer("adamw_fused", parameters).defaults["fused"]
    assert optimizer_class("asgd_single")[1] == {"foreach": False}
    with pytest.raises(UnknownName, match="RAdam"):
        optimizer_class("radem")
    with pytest.raises(InvalidValue, match="cannot create"):
        make_optimizer("rmsprop_fused", parameters)


def test_freezing_what_is_not_there_or_everything():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UllageError, match="nothing to train"):
        freeze(model, ("*",))
    with pytest.raises(UnknownName, match="layer to freeze"):
        freeze(model, ("9",))


def test_lora_without_peft_gets_the_line_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackage, match="pip install peft"):
        run(lora=8)


def test_checkpointing_a_model_without_blocks(plain):
    with pytest.raises(InvalidValue, match="no blocks"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2)), __import__("types").SimpleNamespace(name="x:y"))


def test_lora_trains_little():
    make_torchvision_importable()  # which peft imports
    pytest.importorskip("peft")
    tiny = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000}
    model = ullage.Model("hf:GPT2LMHeadModel", batch_size=2, sequence_length=16, settings=tiny)
    whole = ullage.estimate(model, gpu="A100-40GB")
    adapted = ullage.estimate(replace(model, lora=2), gpu="A100-40GB")
    assert adapted.steps == 3 and adapted.breakdown["optimizer"] < 0.5 * whole.breakdown["optimizer"]
    assert any("LoRA of rank 2" in note for note in adapted.notes)
