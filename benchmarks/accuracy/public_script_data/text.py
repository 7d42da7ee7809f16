"""Words, characters, tokens, conversations, and small language models."""

import gzip
import json
import pickle

import numpy as np

from .maker import Maker

LETTERS = [chr(40 + index) for index in range(65)]
HIDDEN = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
MODELS = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **HIDDEN},
    "gpt": {
        "model_type": "gpt2",
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "n_positions": 512,
        "architectures": ["GPT2LMHeadModel"],
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "max_position_embeddings": 512,
        "architectures": ["LlamaForCausalLM"],
    },
    "vit": {
        "model_type": "vit",
        "image_size": 224,
        "patch_size": 16,
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "intermediate_size": 768,
        "encoder_stride": 16,
        "architectures": ["ViTForMaskedImageModeling"],
    },
}
BOOK_PLACES = [
    "Mega-pytorch",
    "PaLM-pytorch/examples/enwik8_deepspeed",
    "perceiver-ar-pytorch",
    "x-transformers",
    "performer-pytorch/examples/enwik8_simple",
    "MEGABYTE-pytorch",
    "simple-hierarchical-transformer",
    "recurrent-memory-transformer-pytorch",
    "reformer-pytorch/examples/enwik8_simple",
    "PaLM-rlhf-pytorch",
    "block-recurrent-transformer-pytorch",
    "minGRU-pytorch",
]


def text(maker: Maker) -> None:
    """Words, characters, tokens and names for language models."""
    for split, count in (("train", 200_000), ("valid", 20_000), ("test", 20_000)):
        maker.words(maker.src / "pytorch+examples/word_language_model/data/wikitext-2" / f"{split}.txt", count, 12_000)
    tutorial = maker.src / "yunjey+pytorch-tutorial/tutorials/02-intermediate/language_model/data"
    maker.words(tutorial / "train.txt", 60_000, 10_000)
    maker.words(maker.src / "Andras7+word2vec-pytorch/input.txt", 60_000, 10_000)
    maker.words(maker.data / "text" / "train.txt", 150_000, 8_000)
    maker.words(maker.data / "text" / "valid.txt", 15_000, 8_000)
    tokens = maker.src / "karpathy+nanoGPT/data/shakespeare_char"
    for split, count in (("train", 400_000), ("val", 40_000)):
        maker.write(tokens / f"{split}.bin", maker.random.integers(0, 65, count).astype(np.uint16).tobytes())
    known = {"vocab_size": 65, "itos": dict(enumerate(LETTERS)), "stoi": {c: i for i, c in enumerate(LETTERS)}}
    maker.write(tokens / "meta.pkl", pickle.dumps(known))
    characters = "".join(LETTERS[index] for index in maker.random.integers(0, 65, 300_000))
    printable = "".join(chr(code) for code in maker.random.integers(32, 127, 300_000))
    maker.write(maker.src / "karpathy+minGPT/projects/chargpt/input.txt", printable)
    maker.write(maker.src / "karpathy+ng-video-lecture/input.txt", characters)
    lengths = maker.random.integers(3, 15, 30_000)
    names = ["".join(chr(97 + letter) for letter in maker.random.integers(0, 26, length)) for length in lengths]
    maker.write(maker.src / "karpathy+makemore/names.txt", "\n".join(names) + "\n")


def more_text(maker: Maker) -> None:
    """Words, characters and tokens for the language models that came later."""
    for place, prefix in (("ahmetumutdurmus+zaremba/data", "ptb."), ("salesforce+awd-lstm-lm/data/penn", "")):
        for split, count in (("train", 200_000), ("valid", 15_000), ("test", 15_000)):
            maker.words(maker.src / place / f"{prefix}{split}.txt", count, 9_998)
    test = maker.src / "ahmetumutdurmus+zaremba/data"  # one line: this script knows no word that it has not seen
    known = (test / "ptb.train.txt").read_text().split()
    maker.write(test / "ptb.train.txt", " " + " ".join(known))
    for split in ("valid", "test"):
        maker.write(test / f"ptb.{split}.txt", " " + " ".join(known[:15_000]))
    printable = "".join(chr(code) for code in maker.random.integers(32, 127, 300_000))
    maker.write(maker.data / "characters.txt", printable)
    for split, count in (("train", 400_000), ("valid", 40_000), ("test", 40_000)):
        codes = " ".join(map(str, maker.random.integers(32, 127, count)))
        maker.write(maker.data / "enwik8" / f"{split}.txt", codes)
    for index in range(3):
        tokens = maker.random.integers(0, 512, 400_000).astype(np.uint16)
        maker.write(maker.src / f"karpathy+llama2.c/data/tok512/data{index:02d}.bin", tokens.tobytes())
    for split, count in (("train", 400_000), ("val", 40_000)):
        tokens = maker.random.integers(0, 50257, count).astype(np.uint16)
        maker.write(maker.src / f"wolfecameron+nanoMoE/data/shakespeare_char/{split}.bin", tokens.tobytes())
    lines = []
    for _ in range(320):
        words = maker.random.integers(1, 50_000, 60 + int(maker.random.integers(0, 100))).tolist()
        lines.append(json.dumps({"context": words[:40], "completion": words[40:]}))
    maker.write(maker.data / "lora.jsonl", "\n".join(lines) + "\n")


def models(maker: Maker) -> None:
    """A tokenizer and configurations of small models, in Hugging Face's form."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(8_000))]
    for name, configuration in MODELS.items():
        size = {} if name == "vit" else {"vocab_size": len(vocabulary)}
        maker.write(maker.data / name / "config.json", json.dumps(configuration | size))
    maker.write(maker.data / "bert" / "vocab.txt", "\n".join(vocabulary) + "\n")
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 512}
    maker.write(maker.data / "bert" / "tokenizer_config.json", json.dumps(tokenizer))
    maker.write(maker.data / "fsdp.json", json.dumps({"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 224, "width": 224}}
    processor = json.dumps({"image_processor_type": "ViTImageProcessor", **half})
    maker.write(maker.data / "vit" / "preprocessor_config.json", processor)


def books(maker: Maker) -> None:
    """95 million bytes that gzip makes small, as many as enwik8 has, and texts for two more language models."""
    page = bytes(maker.random.integers(32, 127, 20_000).astype(np.uint8))
    packed = gzip.compress(page * 4_800, compresslevel=1, mtime=0)
    for place in BOOK_PLACES:
        maker.write(maker.src / f"lucidrains+{place}/data/enwik8.gz", packed)
    letters = "".join(chr(code) for code in maker.random.integers(32, 127, 300_000))
    maker.write(maker.src / "karpathy+minGPT/projects/chargpt/input.txt", "O God, O God!" + letters)


def talks(maker: Maker) -> None:
    """Texts and conversations for minimind's and TRL's scripts."""

    def words_of(words: int) -> str:
        return " ".join(f"w{word}" for word in maker.random.integers(0, 8_000, words))

    def turns(words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": words_of(20)}, {"role": "assistant", "content": words_of(words)}]

    rows = {
        "texts": [{"text": words_of(120)} for _ in range(400)],
        "pairs": [{"chosen": turns(60), "rejected": turns(60)} for _ in range(300)],
        "plain_pairs": [{"prompt": words_of(20), "chosen": words_of(60), "rejected": words_of(60)} for _ in range(300)],
    }
    for name, lines in rows.items():
        maker.write(maker.data / "talks" / name / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def small_models(maker: Maker) -> None:
    """A small language model and a small Stable Diffusion with random weights, in Hugging Face's form."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(8_000))]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} </s> {% endfor %}"
    options = MODELS["llama"] | {"vocab_size": len(words)}
    options.pop("architectures")
    configuration = AutoConfig.for_model(options.pop("model_type"), **options)
    AutoModelForCausalLM.from_config(configuration).save_pretrained(maker.data / "chat_model")
    tokenizer.save_pretrained(maker.data / "chat_model")
    sizes = {"block_out_channels": (64, 128), "layers_per_block": 1, "norm_num_groups": 32, "sample_size": 32}
    unet = UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=128,
        attention_head_dim=8,
        **sizes,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **sizes,
    )
    text = CLIPTextConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=len(words),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    tokenizer.model_max_length = 77
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(maker.data / "small_diffusion")


def news(maker: Maker) -> None:
    """Headlines of characters, and vectors of words."""
    place = maker.src / "649453932+Chinese-Text-Classification-Pytorch/THUCNews/data"
    for split, count in (("train", 6000), ("dev", 1000), ("test", 1000)):
        lines = ("".join(chr(0x4E00 + c) for c in maker.random.integers(0, 3000, 5 + n % 25)) for n in range(count))
        maker.write(place / f"{split}.txt", "".join(f"{line}\t{n % 10}\n" for n, line in enumerate(lines)))
    (place.parent / "saved_dict").mkdir(parents=True, exist_ok=True)
    vectors = maker.random.standard_normal((400, 50)).round(3)
    lines = (f"w{n} " + " ".join(map(str, vector)) + "\n" for n, vector in enumerate(vectors))
    maker.write(maker.src / "jiesutd+NCRFpp/sample_data/sample.word.emb", "".join(lines))
