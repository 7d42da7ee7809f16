"""Models from every source run on the virtual GPU, with the defaults that they are made for."""

import json

import pytest

import ullage
from ullage.errors import MissingPackage, UllageError
from ullage.jobs import Model, build
from ullage.jobs.sources.names import model_names

TINY_BERT = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
TINY_VIT = TINY_BERT | {"image_size": 32, "patch_size": 8}
TINY_T5 = {"num_layers": 1, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_heads": 2}
TINY_BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}


def estimate(source, **options):
    return ullage.estimate(ullage.Model(source, **{"batch_size": 2} | options), gpu="A100-40GB")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("torchvision:squeezenet1_0", {"input_shape": [3, 64, 64]}),
        ("torchvision:lraspp_mobilenet_v3_large", {"input_shape": [3, 64, 64]}),
        ("torchvision:deeplabv3_mobilenet_v3_large", {"input_shape": [3, 64, 64], "settings": {"aux_loss": True}}),
        ("torchvision:r3d_18", {"input_shape": [3, 4, 32, 32]}),
        ("torchvision:ssdlite320_mobilenet_v3_large", {"input_shape": [3, 64, 64]}),
        ("torchvision:vit_b_32", {"input_shape": [3, 64, 64], "inference": True}),
        ("timm:resnet10t", {"input_shape": [1, 64, 64]}),
        ("timm:test_vit", {"input_shape": [3, 96, 96], "checkpointing": True}),
        ("timm:test_vit", {"attention": "eager"}),
    ],
)
def test_vision_models_run(source, options):
    e = estimate(source, **options)
    assert e.fits and e.peak_allocated > 0
    assert e.steps == (0 if options.get("inference") else 3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BertForMaskedLM", TINY_BERT),
        ("BertForSequenceClassification", TINY_BERT),
        ("BertForTokenClassification", TINY_BERT),
        ("BertForQuestionAnswering", TINY_BERT),
        ("BertForMultipleChoice", TINY_BERT),
        ("BertModel", TINY_BERT),
        ("GPT2LMHeadModel", {"n_layer": 1, "n_embd": 32, "n_head": 2}),
        ("GPT2ForSequenceClassification", {"n_layer": 1, "n_embd": 32, "n_head": 2}),
        ("T5ForConditionalGeneration", TINY_T5),
        ("BartForConditionalGeneration", TINY_BART),
        ("ViTForImageClassification", TINY_VIT),
        ("AutoModelForCausalLM", {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}),
    ],
)
def test_transformers_inputs_and_labels_come_from_the_config(name, settings):
    length = {} if name.startswith("ViT") else {"sequence_length": 16}
    for inference in (False, True):
        e = estimate(f"hf:{name}", settings=settings, inference=inference, **length)
        assert e.fits and e.steps == (0 if inference else 3)


def test_a_model_folder_and_a_config_file(tmp_path):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_positions": 64, "dtype": "bfloat16"}))
    folder = estimate(f"hf:{tmp_path}")
    file = estimate("hf:AutoModelForCausalLM", config=tmp_path / "config.json", precision="bf16")
    assert folder.peak_reserved == file.peak_reserved
    assert any("sequence length 64" in note for note in folder.notes)
    assert any("weights in bfloat16" in note for note in folder.notes)
    larger = estimate(f"hf:{tmp_path}", settings={"n_embd": 64})
    assert larger.peak_allocated > folder.peak_allocated


def test_defaults_are_those_of_the_model_and_are_noted():
    assert any("3,299,299" in note for note in estimate("torchvision:inception_v3").notes)
    assert any("3,160,160" in note for note in estimate("timm:test_vit").notes)
    roberta = estimate("hf:RobertaForMaskedLM", settings=TINY_BERT | {"max_position_embeddings": 34})
    assert any("sequence length 32 " in note for note in roberta.notes)


OWN = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self, words=100):
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, 16), nn.Linear(16, words)
    def forward(self, ids):
        return self.outer(self.inner(ids))

def images(num_classes=10):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(num_classes))

def pixels():
    return nn.Conv2d(3, 5, 1)

def pair():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
        def forward(self, x):
            return {"first": self.layer(x), "second": x}
    return Pair()

def broken(): raise ValueError("first line\\nno such size")
def nothing(): return 3
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "my_models.py"


@pytest.mark.tiny
def test_a_factory_in_a_file_or_a_module(own, monkeypatch, tmp_path):
    assert estimate(f"{own}:Words", sequence_length=8, settings={"words": 50}).steps == 3
    assert estimate(f"{own}:pixels", input_shape=[3, 8, 8]).steps == 3
    assert estimate(f"{own}:pair", input_shape=[4]).steps == 3
    monkeypatch.syspath_prepend(tmp_path)
    assert estimate("my_models:pixels", input_shape=[3, 8, 8], checkpointing=False).steps == 3


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("broken", {}, "raised ValueError: no such size"),
        ("nothing", {}, "must return an nn.Module, got int"),
        ("number", {}, "must be a callable"),
        ("pixel", {}, "did you mean 'pixels'"),
        ("pixels", {}, "--input-shape"),
        ("pixels", {"sequence_length": 8}, "no nn.Embedding"),
        ("pixels", {"input_shape": [4, 8, 8]}, "does not run with"),
        ("pixels", {"settings": {"wrong": 1}}, "unexpected keyword"),
    ],
)
def test_a_factory_that_does_not_work_gets_one_message(own, name, options, text):
    with pytest.raises(UllageError, match=text):
        estimate(f"{own}:{name}", **options)


def test_a_missing_package_gets_the_line_to_type(monkeypatch):
    for package, source in (
        ("torchvision", "torchvision:resnet18"),
        ("timm", "timm:resnet18"),
        ("transformers", "hf:BertModel"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            with pytest.raises(MissingPackage, match=rf"package {package}; type: pip install '\.\[models\]'"):
                build(Model(source, batch_size=1))


def test_names_are_found_without_importing_the_packages():
    assert {"resnet50", "fcn_resnet50", "r3d_18"} <= set(model_names("torchvision"))
    assert {"vit_small_patch16_224", "resnet10t"} <= set(model_names("timm"))
    assert {"GPT2LMHeadModel", "AutoModelForCausalLM", "T5ForConditionalGeneration"} <= set(model_names("hf"))


def test_a_line_may_say_that_its_model_is_compiled():
    row = {"model": "mlp:x", "widths": [8, 4], "batch": 2}
    plain, compiled = (build(Model.from_row({**row, "compiled": wanted})) for wanted in (False, True))
    assert not hasattr(plain, "_orig_mod") and type(compiled._orig_mod) is type(plain)
