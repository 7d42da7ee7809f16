"""Weights that a script loads by name: the real libraries, a hub on this machine, and no byte of a weight."""

import json
import math
import os
import sys
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from tests.hub import COMMIT, Hub, checkpoint, use
from tests.scripts import estimate_script

from ullage.errors import ScriptFailed
from ullage.estimation.scripts import parent
from ullage.sandbox.guard import Sandbox
from ullage.units import MIB

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 16384,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (16384, 256),
    "model.norm.weight": (256,),
    f"{LAYER}input_layernorm.weight": (256,),
    f"{LAYER}post_attention_layernorm.weight": (256,),
    f"{LAYER}self_attn.q_proj.weight": (256, 256),
    f"{LAYER}self_attn.k_proj.weight": (128, 256),
    f"{LAYER}self_attn.v_proj.weight": (128, 256),
    f"{LAYER}self_attn.o_proj.weight": (256, 256),
    f"{LAYER}self_attn.q_norm.weight": (128,),
    f"{LAYER}self_attn.k_norm.weight": (128,),
    f"{LAYER}mlp.gate_proj.weight": (512, 256),
    f"{LAYER}mlp.up_proj.weight": (512, 256),
    f"{LAYER}mlp.down_proj.weight": (256, 512),
}
BYTES = 2 * sum(math.prod(shape) for shape in SHAPES.values())
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEAD = f"""
import torch
from transformers import AutoModelForCausalLM
def load(name, loaded=torch.bfloat16, size={BYTES}, **options):
    before = torch.cuda.memory_allocated()
    model = AutoModelForCausalLM.from_pretrained(name, **options).cuda()
    assert model.dtype == loaded, model.dtype
    taken = torch.cuda.memory_allocated() - before
    assert size <= taken <= size + 65536, (name, size, taken)
    return model
"""


def config(**values) -> bytes:
    return json.dumps(CONFIG | values).encode()


def sharded() -> dict[str, bytes]:
    parts = [dict(list(SHAPES.items())[:1]), dict(list(SHAPES.items())[1:])]
    places = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    index = {"metadata": {}, "weight_map": places}
    files = {file: checkpoint(part, "bfloat16") for file, part in zip(SHARDS, parts, strict=True)}
    return {"config.json": config(dtype="bfloat16"), "model.safetensors.index.json": json.dumps(index).encode()} | files


@pytest.fixture(scope="module")
def hub():
    whole = checkpoint(SHAPES, "bfloat16")
    repositories = {
        "org/whole": {"config.json": config(), "model.safetensors": whole},
        "org/shards": sharded(),
        "org/pickled": {"config.json": config(dtype="bfloat16"), "pytorch_model.bin": bytes(8 * MIB)},
    }
    with Hub(repositories) as server:
        yield server


@pytest.fixture
def script(hub, tmp_path, monkeypatch, warm):
    """Estimate a script with this hub, or without a network; the cache is `script.cache`."""
    use(monkeypatch, hub.address, tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    hub.sent.clear()

    def run(text, **options):
        (tmp_path / "train.py").write_text(text)
        return estimate_script("train.py", gpu="RTX-4090", **options)

    return SimpleNamespace(run=run, cache=tmp_path / "hub")


def in_cache(cache, name, **files):
    """Put files into the cache as a download does."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


@pytest.mark.slow
def test_checkpoints_are_loaded_by_their_headers(hub, script):
    """In the type of the header, straight to the GPU or over the CPU, in one file, in several, or pickled."""
    loads = f"""
load("org/whole", device_map="cuda")
load("org/whole", torch.float32, {2 * BYTES}, dtype="float32")
load("org/shards")
load("org/pickled")
"""
    found = script.run(HEAD + loads, network=True)
    assert sum("were not downloaded" in note for note in found.notes) == 4
    assert 0 < hub.bytes_of(".safetensors") <= 3 * 2**17 and hub.bytes_of(".bin") == 0
    assert not script.cache.exists() or not list(script.cache.rglob("*.safetensors"))


@pytest.mark.slow
def test_without_a_network_a_config_in_the_cache_is_enough(hub, script):
    before = in_cache(script.cache, "org/known", **{"config.json": config(dtype="bfloat16")})
    real = checkpoint(SHAPES, "float16")
    whole = in_cache(script.cache, "org/here", **{"config.json": config(), "model.safetensors": real})
    loads = """
import timm, torchvision
load("org/known", device_map="cuda")
load("org/here", torch.float16)
torchvision.models.resnet18(weights="DEFAULT").cuda()
timm.create_model("test_vit", pretrained=True, num_classes=7).cuda()
"""
    found = script.run(HEAD + loads)
    said = [note for note in found.notes if "were not downloaded" in note]
    assert [word for note in said for word in ("org/known", "resnet18", "timm/test_vit") if word in note] == [
        "org/known",
        "resnet18",
        "timm/test_vit",
    ]
    assert not hub.sent and [file.name for file in before.iterdir()] == ["config.json"]
    assert (whole / "model.safetensors").read_bytes() == real


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [True, False])
def test_where_writes_are_redirected_the_cache_stays_as_it_is(script, monkeypatch, namespaces):
    monkeypatch.setattr(parent, "Sandbox", partial(Sandbox, overlays=False, namespaces=namespaces))
    known = in_cache(script.cache, "org/known", **{"config.json": config(dtype="bfloat16")})
    real = checkpoint(SHAPES, "float16")
    whole = in_cache(script.cache, "org/here", **{"config.json": config(), "model.safetensors": real})
    found = script.run(HEAD + "load('org/known')\nload('org/here', torch.float16)\n")
    assert any("org/known were not downloaded" in note for note in found.notes)
    assert [file.name for file in known.iterdir()] == ["config.json"]
    assert (whole / "model.safetensors").read_bytes() == real


@pytest.mark.slow
@pytest.mark.parametrize(("overlays", "namespaces"), [(True, True), (False, True), (False, False)])
def test_of_folder_without_weights_the_configuration_is_enough(script, tmp_path, monkeypatch, overlays, namespaces):
    """Also where an index names pieces that are not there, and where it is not said which class was saved."""
    monkeypatch.setattr(parent, "Sandbox", partial(Sandbox, overlays=overlays, namespaces=namespaces))
    files = {
        "plain": {"config.json": config(dtype="bfloat16")},
        "pieces": {name: content for name, content in sharded().items() if name.endswith(".json")},
        "fresh": {"config.json": config(architectures=None, dtype="bfloat16")},
    }
    for folder, given in files.items():
        (tmp_path / folder).mkdir()
        for name, content in given.items():
            (tmp_path / folder / name).write_bytes(content)
    found = script.run(HEAD + "load('plain'); load('./pieces', device_map='cuda'); load('fresh')\n")
    said = [note for note in found.notes if "weights of" in note]
    assert len(said) == 3 and all("shapes and types are those of its configuration" in note for note in said)
    assert {folder: {file.name for file in (tmp_path / folder).iterdir()} for folder in files} == {
        folder: set(given) for folder, given in files.items()
    }


def test_missing_cache_files_name_the_command_to_type(hub, script):
    with pytest.raises(ScriptFailed) as caught:
        script.run("import torch; from huggingface_hub import hf_hub_download as get\nget('org/whole', 'config.json')")
    line = str(caught.value).splitlines()[0]
    assert "needs config.json of org/whole" in line and "Type: ullage estimate train.py --network" in line
    assert "hf download org/whole" in line and not caught.value.own and not hub.sent


def test_a_checkpoint_larger_than_host_memory_is_cast_unread(tmp_path, monkeypatch):
    """Only what is looked at is read."""
    import ullage
    from ullage.virtual.call.replacements import Replacements
    from ullage.virtual.torch_cuda.safetensors import install_safetensors

    safetensors, in_torch = pytest.importorskip("safetensors"), pytest.importorskip("safetensors.torch")
    rows = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2048
    content = checkpoint({"small": (8192,)})
    (tmp_path / "small.safetensors").write_bytes(content[:-4] + b"\0\0\x80?")
    header = json.dumps({"large": {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [0, rows * 2048]}}).encode()
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, sys.byteorder) + header)
        file.truncate(8 + len(header) + rows * 2048)
    replacements = Replacements()
    with ullage.virtual_gpu("H200") as gpu:
        install_safetensors(replacements)
        try:
            with safetensors.safe_open(tmp_path / "large.safetensors", framework="pt") as file:
                part = file.get_slice("large")[...].to(torch.float32)[:1000].clone()
            assert part.cuda().shape == (1000, 1024) and gpu.peak_allocated == part.numel() * 4
            loaded = in_torch.load_file(tmp_path / "small.safetensors")["small"]
            assert loaded.to(torch.float64).sum() == 1.0
        finally:
            replacements.undo()
            gpu.host.forget()
