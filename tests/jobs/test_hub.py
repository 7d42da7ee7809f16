"""Names of the hub: `hf:ORG/NAME` needs the config alone, from the local cache or from the hub."""

import json
import os
import sys
from importlib.util import find_spec

import pytest
from tests import nursery
from tests.hub import COMMIT, Hub, use

import ullage
from ullage.cli.completion import sources
from ullage.errors import InvalidValue, MissingPackage, UnknownName
from ullage.jobs.model import Model
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SIZE = {"batch_size": 2, "sequence_length": 32}


def config(**values) -> bytes:
    return json.dumps(TINY | values).encode()


@pytest.fixture(scope="module")
def hub():
    repositories = {
        "org/tiny": {"config.json": config(torch_dtype="bfloat16"), "model.safetensors": b"never asked for"},
        "org/plain": {"config.json": config()},
        "org/quantized": {"config.json": config(quantization_config={"quant_method": "gptq", "bits": 4})},
        "org/own-code": {"config.json": json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "x.M"}}).encode()},
        "org/data": {"README.md": b"no model"},
        "org/secret": {"config.json": config()},
        "oldest": {"config.json": config()},
    }
    with Hub(repositories, gated=("org/secret",)) as server:
        yield server


@pytest.fixture(autouse=True)
def hub_library(hub, tmp_path, monkeypatch):
    """The hub's own library, with this server and an empty cache."""
    use(monkeypatch, hub.address, tmp_path)
    hub.sent.clear()


def test_a_hub_name_loads_only_its_config_and_saved_dtype(hub):
    found = ullage.estimate(ullage.Model("hf:org/tiny", **SIZE), gpu="RTX-4090")
    assert {path for _, path, _ in hub.sent if "/org/" in path} == {"/org/tiny/resolve/main/config.json"}
    assert any("weights in bfloat16, the type in which org/tiny was saved" in note for note in found.notes)
    wide = ullage.estimate(ullage.Model("hf:org/tiny", dtype="float32", **SIZE), gpu="RTX-4090")
    assert wide.breakdown["parameters"] > 1.9 * found.breakdown["parameters"]
    assert any("float32 as requested; the config says bfloat16" in note for note in wide.notes)
    mixed = ullage.estimate(ullage.Model("hf:org/tiny", dtype="bfloat16", precision="amp_bf16", **SIZE), gpu="RTX-4090")
    assert mixed.breakdown["parameters"] == found.breakdown["parameters"]


def test_a_config_in_the_cache_needs_no_hub(hub):
    first = ullage.estimate(ullage.Model("hf:org/plain", **SIZE), gpu="RTX-4090")
    assert any("its config does not say so" in note for note in first.notes)
    hub.sent.clear()
    again = ullage.estimate(ullage.Model(f"hf:org/plain@{COMMIT}", **SIZE), gpu="RTX-4090")
    assert not hub.sent and again.peak_reserved == first.peak_reserved
    assert "hf:org/plain" in sources("hf:org/pl")
    by_class = ullage.estimate(ullage.Model("hf:AutoModelForCausalLM", config="org/plain", **SIZE), gpu="RTX-4090")
    assert not hub.sent and by_class.peak_reserved == first.peak_reserved


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nothing", ["no model org/nothing", "hf auth login"]),
        ("org/secret", ["org/secret is gated", "accept its terms", "hf auth login"]),
        ("org/tiny@nowhere", ["no revision nowhere"]),
        ("org/data", ["has no config.json"]),
        ("org/quantized", ["quantized by gptq"]),
        ("org/own-code", ["trust_remote_code=True"]),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(name, words):
    with pytest.raises(InvalidValue) as caught:
        ullage.estimate(ullage.Model(f"hf:{name}", **SIZE), gpu="RTX-4090")
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_old_names_without_organisation_are_known_by_class():
    assert ullage.estimate(ullage.Model("hf:oldest", **SIZE), gpu="RTX-4090").fits
    with pytest.raises(UnknownName, match="GPT2LMHeadModel"):
        ullage.estimate(ullage.Model("hf:GPT2LMHeadModl", **SIZE), gpu="RTX-4090")


def test_without_a_network_the_line_to_type_comes_at_once(monkeypatch, tmp_path):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(InvalidValue, match="hf download org/tiny config.json$"):
        ullage.estimate(ullage.Model("hf:org/tiny", **SIZE), gpu="RTX-4090")


COMMAND = """
import importlib
from huggingface_hub import constants
from ullage.cli.main import main
importlib.reload(constants)  # it read its variables when the nursery imported it
main()
"""


def command(*words):
    return nursery.current().run([*words], dict(os.environ), os.getcwd(), timeout=300, program=COMMAND)


def test_a_command_says_at_once_that_there_is_no_such_name():
    missing = command("estimate", "hf:org/nothing")
    assert missing.returncode == 2 and "no model org/nothing" in missing.stderr


@pytest.mark.slow
def test_commands_take_such_names():
    done = command("estimate", "hf:org/tiny", "-b", "2", "--sequence-length", "32", "--lora", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert any("LoRA of rank 4" in note for note in json.loads(done.stdout)["notes"])


def test_adapters_stay_in_32_bits_at_the_named_modules():
    make_torchvision_importable()  # which peft imports
    pytest.importorskip("peft")
    everywhere = ullage.estimate(ullage.Model("hf:org/tiny", lora=8, **SIZE), gpu="RTX-4090")
    few = ullage.estimate(ullage.Model("hf:org/tiny", lora=8, lora_targets="q_proj", **SIZE), gpu="RTX-4090")
    assert any("on q_proj" in note for note in few.notes)
    assert 0 < few.breakdown["optimizer"] < everywhere.breakdown["optimizer"]
    with pytest.raises(UnknownName, match="q_proj"):
        ullage.estimate(ullage.Model("hf:org/tiny", lora=8, lora_targets=["q_porj"], **SIZE), gpu="RTX-4090")


def test_quantized_weights_need_adapters_and_their_package(monkeypatch):
    with pytest.raises(InvalidValue, match="add --lora 16"):
        ullage.estimate(ullage.Model("hf:org/tiny", quantize="nf4", **SIZE), gpu="RTX-4090")
    with pytest.raises(InvalidValue, match="for models of transformers"):
        ullage.estimate(ullage.Model("timm:test_vit", quantize="nf4", lora=4))
    with pytest.raises(UnknownName, match="'nf4'"):
        ullage.estimate(ullage.Model("hf:org/tiny", quantize="nf5", lora=4))
    with pytest.raises(InvalidValue, match="does not know weights in int8"):
        ullage.estimate(ullage.Model("hf:org/tiny", quantize="int8", lora=4), estimator="accelerate")
    for package in ("bitsandbytes", "accelerate", "peft"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match="type: pip install bitsandbytes accelerate peft"):
        ullage.estimate(ullage.Model("hf:org/tiny", quantize="nf4", lora=4, **SIZE), gpu="RTX-4090")


def test_contradicting_dtypes_and_precisions_are_refused():
    with pytest.raises(InvalidValue, match="leave out dtype float16"):
        Model("timm:x", precision="bf16", dtype="float16")
    assert Model("timm:x", dtype="float16").precision == "fp16"
    with pytest.raises(UnknownName, match="bfloat16"):
        Model("timm:x", dtype="bfloat")


def test_quantized_weights_take_less():
    pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
    size = SIZE | {"lora": 4, "settings": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}}
    plain = ullage.estimate(ullage.Model("hf:org/tiny", **size))
    for kind in ("nf4", "fp4", "int8"):
        found = ullage.estimate(ullage.Model("hf:org/tiny", quantize=kind, **size))
        assert found.steps == 3 and any(f"linear layers in {kind}" in note for note in found.notes)
        assert found.peak_allocated < plain.peak_allocated
    assert ullage.estimate(ullage.Model("hf:org/tiny", quantize="nf4", inference=True, **SIZE), gpu="RTX-4090").fits
