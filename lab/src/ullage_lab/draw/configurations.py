"""Random training runs to measure: any model of torchvision and timm, transformers from small to billions, MLPs.

The same seed draws the same runs, as far as the installed packages name the same models.
"""

import random
from collections.abc import Collection
from typing import Any

_BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_SIDES = (64, 96, 112, 128, 160, 192, 224, 224, 224, 240, 256, 288, 320, 384)
_OPTIMIZERS = ("sgd", "sgdm", "adam", "adamw", "adamw_fused", "rmsprop", "adagrad", "adafactor")
_PRECISIONS = ("fp32", "fp32", "amp_bf16", "amp_fp16", "bf16")
_SEQUENCES = (32, 64, 128, 200, 256, 384, 512, 768, 1024, 1536, 2048)
_PIXELS = 128 * 224 * 224  # most pixels of a batch
_TOKENS = 16_384
_VOCABULARIES = (8_000, 30_522, 32_000, 50_257)


def _sizes(hidden: str, layers: str, heads: str, middle: str | None = None, **more: str) -> dict[str, str]:
    return {"hidden": hidden, "layers": layers, "heads": heads, **({"middle": middle} if middle else {}), **more}


_LLAMA = _sizes(
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", kv="num_key_value_heads"
)
_BERT = _sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_DISTIL = _sizes("dim", "n_layers", "n_heads", "hidden_dim", length="max_position_embeddings")
_GPT2 = _sizes("n_embd", "n_layer", "n_head", length="n_positions")
# Class, the name of its configuration, and that one's names of sizes.
_TRANSFORMERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("LlamaForCausalLM", "Llama", _LLAMA),
    ("Qwen2ForCausalLM", "Qwen2", _LLAMA),
    ("Qwen3ForCausalLM", "Qwen3", _LLAMA),
    ("MistralForCausalLM", "Mistral", _LLAMA),
    ("StableLmForCausalLM", "StableLm", _LLAMA),
    ("Starcoder2ForCausalLM", "Starcoder2", _LLAMA),
    ("OlmoForCausalLM", "Olmo", _LLAMA),
    ("GraniteForCausalLM", "Granite", _LLAMA),
    ("SmolLM3ForCausalLM", "SmolLM3", _LLAMA),
    ("PhiForCausalLM", "Phi", _LLAMA),
    ("GPTNeoXForCausalLM", "GPTNeoX", _BERT),
    ("PersimmonForCausalLM", "Persimmon", _BERT),
    ("GPT2LMHeadModel", "GPT2", _GPT2),
    ("GPTBigCodeForCausalLM", "GPTBigCode", _GPT2),
    ("CodeGenForCausalLM", "CodeGen", _GPT2),
    ("GPTJForCausalLM", "GPTJ", _GPT2),
    ("BloomForCausalLM", "Bloom", _sizes("hidden_size", "n_layer", "n_head")),
    ("BertForMaskedLM", "Bert", _BERT | {"length": "max_position_embeddings"}),
    ("RobertaForMaskedLM", "Roberta", _BERT | {"length": "max_position_embeddings"}),
    ("ElectraForMaskedLM", "Electra", _BERT | {"length": "max_position_embeddings"}),
    ("DebertaV2ForMaskedLM", "DebertaV2", _BERT | {"length": "max_position_embeddings"}),
    ("BartForConditionalGeneration", "Bart", _sizes("d_model", "encoder_layers", "encoder_attention_heads")),
    ("DistilBertForMaskedLM", "DistilBert", _DISTIL),
    ("AlbertForMaskedLM", "Albert", _BERT | {"length": "max_position_embeddings"}),
)
# Hidden size, layers, heads, middle: from a few million parameters to four billion.
_SHAPES = ((256, 4, 4), (384, 6, 6), (512, 8, 8), (640, 10, 10), (768, 12, 12), (1024, 12, 16), (1280, 10, 20))
_LARGE = ((2048, 20, 16), (2048, 24, 32), (2304, 26, 18), (2560, 28, 20), (3072, 24, 24), (3072, 30, 24))


def draw(count: int, seed: int = 0, avoid: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return N random runs in the form of a file of configurations; `avoid` names models to leave out."""
    chance = random.Random(seed)
    makers = (_vision("tv"), _vision("timm"), draw_transformer, _perceptron)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        make = chance.choices(makers, (25, 35, 32, 8))[0]
        row = make(chance)
        again = sum(row["model"] == other["model"] for other in rows)
        if row["model"] not in avoid and (again < 2 or not row["model"].startswith(("tv:", "timm:"))):
            rows.append({"id": f"s{seed}n{len(rows):04d}", **row})
    return rows


def names_of(source: str) -> list[str]:
    """Return the names of all models of torchvision (`tv`) or timm."""
    from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable

    make_torchvision_importable()
    if source == "tv":
        import torchvision

        names: list[str] = torchvision.models.list_models(module=torchvision.models)
    else:
        import timm

        names = timm.list_models()
    return sorted(names)


def native_side(name: str) -> int:
    import timm

    settings: Any = timm.get_pretrained_cfg(name)
    return int(settings.input_size[-1]) if settings is not None and settings.input_size else 224


def _vision(source: str) -> Any:
    names = names_of(source)

    def make(chance: random.Random) -> dict[str, Any]:
        name = chance.choice(names)
        if source == "timm":
            side = native_side(name)
        else:
            side = 224 if name.startswith(("vit", "maxvit")) else chance.choice(_SIDES)
            side = max(side, 299 if name == "inception_v3" else 0)
        fitting = [batch for batch in _BATCHES if batch * side * side <= _PIXELS]
        return {
            "model": f"{source}:{name}",
            "batch": chance.choice(fitting or [1]),
            "input": [3, side, side],
            **_ways(chance),
            "channels_last": chance.random() < 0.2,
        }

    return make


def _ways(chance: random.Random) -> dict[str, Any]:
    return {"opt": chance.choice(_OPTIMIZERS), "precision": chance.choice(_PRECISIONS)}


def draw_transformer(chance: random.Random) -> dict[str, Any]:
    name, configuration, keys = chance.choice(_TRANSFORMERS)
    large = chance.random() < 0.15 and "kv" in keys
    hidden, layers, heads = chance.choice(_LARGE if large else _SHAPES)
    length = chance.choice([size for size in _SEQUENCES if not large or size <= 1024])
    vocabulary = chance.choice(_VOCABULARIES)
    settings: dict[str, Any] = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings |= {keys["hidden"]: hidden, keys["layers"]: layers, keys["heads"]: heads}
    if "middle" in keys:
        settings[keys["middle"]] = hidden * chance.choice((2, 3, 4))
    if "kv" in keys:
        settings[keys["kv"]] = chance.choice(
            [number for number in (heads, heads // 2, 1) if heads % max(1, number) == 0]
        )
    if "length" in keys:
        settings[keys["length"]] = max(512, length + 8)
    if configuration == "Bart":
        settings |= {"decoder_layers": layers, "decoder_attention_heads": heads, "max_position_embeddings": 2048}
    if configuration in ("GPTJ", "CodeGen"):
        settings["rotary_dim"] = hidden // heads // 2
    if configuration == "Albert":
        settings["embedding_size"] = 128
    fitting = [batch for batch in _BATCHES if batch * length <= (_TOKENS // 8 if large else _TOKENS) and batch <= 32]
    row = {
        "model": f"hf:{name}",
        "conf": configuration,
        "hf_config": settings,
        "vocab": vocabulary,
        "batch": chance.choice(fitting or [1]),
        "seq": length,
        **_ways(chance),
        "ckpt": chance.random() < (0.5 if large else 0.25),
        "attn": chance.choice(("sdpa", "sdpa", "eager")) if length <= 1024 else "sdpa",
    }
    if configuration in ("DebertaV2", "GPTJ", "CodeGen"):
        row["attn"] = "eager"  # the only one they have
    return row


def draw_t5(chance: random.Random) -> dict[str, Any]:
    """Draw an encoder and a decoder with relative positions, both over the whole length."""
    hidden, layers, heads = chance.choice(_SHAPES)
    length, vocabulary = chance.choice((32, 64, 128, 256, 512)), chance.choice(_VOCABULARIES)
    sizes = {
        "vocab_size": vocabulary,
        "d_model": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "d_kv": hidden // heads,
        "d_ff": hidden * chance.choice((2, 3, 4)),
        "decoder_start_token_id": 0,
    }
    fitting = [batch for batch in _BATCHES if batch * length <= _TOKENS and batch <= 32]
    return {
        "model": "hf:T5ForConditionalGeneration",
        "conf": "T5",
        "hf_config": sizes,
        "vocab": vocabulary,
        "batch": chance.choice(fitting),
        "seq": length,
        **_ways(chance),
    }


def _perceptron(chance: random.Random) -> dict[str, Any]:
    depth = chance.randint(2, 12)
    widths = [max(8, round(2 ** chance.uniform(4, 13))) for _ in range(depth)]
    return {
        "model": "mlp:x",
        "widths": [*widths, chance.choice((2, 10, 100, 1000, 10_000))],
        "batch": chance.choice((16, 100, 256, 1000, 1024, 4096, 10_000)),
        "bn": chance.random() < 0.4,
        "drop": chance.random() < 0.4,
        "act": chance.choice(("ReLU", "GELU", "Tanh", "SiLU", "ELU")),
        **_ways(chance),
    }
