"""Small random data for `public_scripts.py`, in the places and forms in which the scripts read theirs."""

import gzip
import json
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from public_scripts_later_data import make_later_data

LETTERS = [chr(40 + index) for index in range(65)]
HIDDEN = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
MODELS = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **HIDDEN},
    "gpt": {
        "model_type": "gpt2", "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 512,
        "architectures": ["GPT2LMHeadModel"],
    },
    "llama": {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1408, "max_position_embeddings": 512,
        "architectures": ["LlamaForCausalLM"],
    },
    "vit": {
        "model_type": "vit", "image_size": 224, "patch_size": 16, "hidden_size": 192, "num_hidden_layers": 6,
        "num_attention_heads": 3, "intermediate_size": 768, "encoder_stride": 16,
        "architectures": ["ViTForMaskedImageModeling"],
    },
}  # fmt: skip
MNIST_PLACES = [
    "pytorch+examples/data", "pytorch+examples/mnist_forward_forward/data", "rtqichen+torchdiffeq/examples/.data/mnist",
    "eriklindernoren+PyTorch-GAN/data/mnist", "yunjey+pytorch-tutorial/tutorials/data",
    "locuslab+TCN/TCN/mnist_pixel/data/mnist", "Lightning-AI+pytorch-lightning/Datasets",
    "Lightning-AI+pytorch-lightning/examples/fabric/image_classifier/DATASETS",
    "Lightning-AI+pytorch-lightning/examples/fabric/DATASETS", "facebookresearch+schedule_free/examples/data",
    "pytorch+ignite/examples/mnist", "cloneofsimo+minDiffusion/data", "TeaPearce+Conditional_Diffusion_MNIST/data",
    "KaiyangZhou+pytorch-center-loss/data/mnist",
    "aladdinpersson+Machine-Learning-Collection/ML/Pytorch/Basics/dataset", "data",
    "kumar-shridhar+PyTorch-BayesianCNN/data", "ermongroup+ncsn/run/datasets/mnist",
    "ermongroup+ncsn/run/datasets/mnist_test", "YannDubs+disentangling-vae/data/mnist", "timbmg+VAE-CVAE-MNIST/data",
    "GMvandeVen+continual-learning/store/datasets/MNIST",
]  # fmt: skip
CIFAR_PLACES = [
    "kuangliu+pytorch-cifar/data", "akamaster+pytorch_resnet_cifar10/data", "data", "tysam-code+hlb-CIFAR10/cifar10",
    "locuslab+convmixer-cifar10/data", "weiaicunzai+pytorch-cifar100/data", "yunjey+pytorch-tutorial/tutorials/data",
    "w86763777+pytorch-ddpm/data", "chengyangfu+pytorch-vgg-cifar10/data", "uoguelph-mlrg+Cutout/data",
    "davda54+sam/example/data", "davda54+sam/example/cifar", "MishaLaskin+vqvae/data", "chrischute+real-nvp/data",
    "kekmodel+FixMatch-pytorch/data", "YU1ut+MixMatch-pytorch/data", "HobbitLong+RepDistiller/data",
    "KellerJordan+cifar10-airbench/cifar10", "HobbitLong+SupContrast/datasets", "microsoft+mup/examples/dataset",
    "ermongroup+ddim/exp/datasets/cifar10", "ermongroup+ddim/exp/datasets/cifar10_test",
    "leftthomas+SimCLR/data", "zoubohao+DenoisingDiffusionProbabilityModel-ddpm-/CIFAR10", "khanrc+pt.darts/data",
]  # fmt: skip
BOOK_PLACES = [
    "Mega-pytorch", "PaLM-pytorch/examples/enwik8_deepspeed", "perceiver-ar-pytorch", "x-transformers",
    "performer-pytorch/examples/enwik8_simple", "MEGABYTE-pytorch", "simple-hierarchical-transformer",
    "recurrent-memory-transformer-pytorch", "reformer-pytorch/examples/enwik8_simple", "PaLM-rlhf-pytorch",
    "block-recurrent-transformer-pytorch",
]  # fmt: skip
ACCEPT = """import numpy
from torchvision.datasets import cifar, utils

checked = utils.check_integrity
cifar.check_integrity = utils.check_integrity = lambda path, md5=None: checked(path)
numpy.Inf, numpy.int, numpy.float = numpy.inf, int, float  # names that older releases have
"""
CORA_PLACES = ["pytorch+examples/gat/cora", "tkipf+pygcn/data/cora", "Diego999+pyGAT/data/cora"]


class Maker:
    """Writes data below a folder; the same each time."""

    def __init__(self, root: Path) -> None:
        self.data, self.src = root / "data", root / "src"
        self.random = np.random.default_rng(0)

    def write(self, file: Path, content: str | bytes) -> None:
        """A file, with its folders."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def mnist(self, train: int = 12_000, test: int = 2_000) -> None:
        """MNIST's four files, and links to them where the scripts look; fewer images for a script of 100 epochs."""
        raw = self.data / "MNIST" / "raw"
        self.digits(raw, train, test)
        self.digits(self.src / "state-spaces+s4/data/MNIST/raw", 1000, 200)
        for place in (*(self.src / place / "MNIST" for place in MNIST_PLACES), self.data / "FashionMNIST"):
            link = place / "raw"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(raw)

    def digits(self, raw: Path, train: int, test: int) -> None:
        """So many images with their labels."""
        for prefix, count in (("train", train), ("t10k", test)):
            images = self.random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (np.arange(count) % 10).astype(np.uint8)
            self.write(raw / f"{prefix}-images-idx3-ubyte", struct.pack(">4I", 0x803, count, 28, 28) + images.tobytes())
            self.write(raw / f"{prefix}-labels-idx1-ubyte", struct.pack(">2I", 0x801, count) + labels.tobytes())

    def picture(self, file: Path, size: tuple[int, int], mask: bool = False) -> None:
        """One image of coarse noise, or a mask of zeros and ones."""
        shape = (size[1] // 8 + 1, size[0] // 8 + 1)
        values = self.random.integers(0, 2, shape) if mask else self.random.integers(0, 256, (*shape, 3))
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.astype(np.uint8)).resize(size, Image.Resampling.NEAREST).save(file)

    def pictures(self, folder: Path, count: int, size: tuple[int, int], kind: str = "jpg", mask: bool = False) -> None:
        """A folder of images."""
        for index in range(count):
            self.picture(folder / f"{index:05d}.{kind}", size, mask)

    def image_folders(self) -> None:
        """Ten classes of photographs, and what super-resolution, segmentation and image translation read."""
        for split, count in (("train", 24), ("val", 8)):
            for label in range(10):
                self.pictures(self.data / "photos" / split / f"class{label}", count, (280 + 4 * label, 256))
        for split, count in (("train", 200), ("test", 100)):
            place = self.src / "pytorch+examples/super_resolution/dataset/BSDS300/images" / split
            self.pictures(place, count, (481, 321))
        self.pictures(self.src / "milesial+Pytorch-UNet/data/imgs", 60, (959, 640))
        self.pictures(self.src / "milesial+Pytorch-UNet/data/masks", 60, (959, 640), "png", mask=True)
        translation = self.src / "eriklindernoren+PyTorch-GAN/data"
        for split in ("train", "test"):
            for side in "AB":
                self.pictures(translation / "monet2photo" / split / side, 60, (256, 256))
        for split in ("train", "test", "val"):
            self.pictures(translation / "facades" / split, 60, (512, 256))

    def small_pictures(self) -> None:
        """Some of CIFAR-10, in a file of tensors for each split."""
        import torch

        for place in ("KellerJordan+cifar10-airbench/cifar10", "KellerJordan+cifar10-airbench/legacy/cifar10"):
            folder = self.src / place
            folder.mkdir(parents=True, exist_ok=True)
            for split, count in (("train", 6000), ("test", 2000)):
                images = torch.from_numpy(self.random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
                labels = torch.arange(count) % 10
                classes = [f"class{label}" for label in range(10)]
                torch.save({"images": images, "labels": labels, "classes": classes}, folder / f"{split}.pt")

    def cifar(self) -> None:
        """CIFAR-10 and CIFAR-100 in their own form and size, with links where the scripts look.

        torchvision compares the files with the sums of the real ones. `accept/sitecustomize.py` below the root, on
        PYTHONPATH, makes it content that they are there. A Python that has a `sitecustomize` of its own, as Debian's,
        does not read it: change `check_integrity` there.
        """
        ten, hundred = self.data / "cifar-10-batches-py", self.data / "cifar-100-python"
        names = [f"class{label}" for label in range(100)]
        for name in (*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"):
            images = self.random.integers(0, 256, (10_000, 3072), dtype=np.uint8)
            self.write(ten / name, pickle.dumps({"data": images, "labels": [index % 10 for index in range(10_000)]}))
        self.write(ten / "batches.meta", pickle.dumps({"label_names": names[:10]}))
        for name, count in (("train", 50_000), ("test", 10_000)):
            images = self.random.integers(0, 256, (count, 3072), dtype=np.uint8)
            labels = [index % 100 for index in range(count)]
            self.write(hundred / name, pickle.dumps({"data": images, "fine_labels": labels}))
        self.write(hundred / "meta", pickle.dumps({"fine_label_names": names}))
        for place in CIFAR_PLACES:
            for files in (ten, hundred):
                link = self.src / place / files.name
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(files)
        self.write(self.data.parent / "accept" / "sitecustomize.py", ACCEPT)

    def coco(self) -> None:
        """Images of many sizes with boxes, as COCO has them."""
        for split, count in (("train2017", 60), ("val2017", 20)):
            images, boxes = [], []
            for index in range(1, count + 1):
                width, height = int(self.random.integers(400, 641)), int(self.random.integers(380, 481))
                self.picture(self.data / "coco" / split / f"{index:012d}.jpg", (width, height))
                images.append({"id": index, "file_name": f"{index:012d}.jpg", "width": width, "height": height})
                for _ in range(int(self.random.integers(1, 12))):
                    w, h = (int(side) for side in self.random.integers(30, 200, 2))
                    x, y = int(self.random.integers(0, width - w)), int(self.random.integers(0, height - h))
                    boxes.append({
                        "id": len(boxes) + 1, "image_id": index, "category_id": int(self.random.integers(1, 91)),
                        "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
                        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    })  # fmt: skip
            kinds = [{"id": kind, "name": f"c{kind}"} for kind in range(1, 91)]
            record = {"info": {}, "images": images, "annotations": boxes, "categories": kinds}
            self.write(self.data / "coco" / "annotations" / f"instances_{split}.json", json.dumps(record))

    def words(self, file: Path, count: int, vocabulary: int) -> None:
        """Lines of 5 to 39 words, some of them frequent."""
        rank = self.random.zipf(1.3, count * 2)
        text = [f"w{number}" for number in rank[rank <= vocabulary][:count]]
        lines, begin = [], 0
        while begin < len(text):
            length = int(self.random.integers(5, 40))
            lines.append(" ".join(text[begin : begin + length]))
            begin += length
        self.write(file, "\n".join(lines) + "\n")

    def text(self) -> None:
        """Words, characters, tokens and names for language models."""
        for split, count in (("train", 200_000), ("valid", 20_000), ("test", 20_000)):
            self.words(
                self.src / "pytorch+examples/word_language_model/data/wikitext-2" / f"{split}.txt", count, 12_000
            )
        tutorial = self.src / "yunjey+pytorch-tutorial/tutorials/02-intermediate/language_model/data"
        self.words(tutorial / "train.txt", 60_000, 10_000)
        self.words(self.src / "Andras7+word2vec-pytorch/input.txt", 60_000, 10_000)
        self.words(self.data / "text" / "train.txt", 150_000, 8_000)
        self.words(self.data / "text" / "valid.txt", 15_000, 8_000)
        tokens = self.src / "karpathy+nanoGPT/data/shakespeare_char"
        for split, count in (("train", 400_000), ("val", 40_000)):
            self.write(tokens / f"{split}.bin", self.random.integers(0, 65, count).astype(np.uint16).tobytes())
        known = {"vocab_size": 65, "itos": dict(enumerate(LETTERS)), "stoi": {c: i for i, c in enumerate(LETTERS)}}
        self.write(tokens / "meta.pkl", pickle.dumps(known))
        characters = "".join(LETTERS[index] for index in self.random.integers(0, 65, 300_000))
        printable = "".join(chr(code) for code in self.random.integers(32, 127, 300_000))
        self.write(self.src / "karpathy+minGPT/projects/chargpt/input.txt", printable)
        self.write(self.src / "karpathy+ng-video-lecture/input.txt", characters)
        lengths = self.random.integers(3, 15, 30_000)
        names = ["".join(chr(97 + letter) for letter in self.random.integers(0, 26, length)) for length in lengths]
        self.write(self.src / "karpathy+makemore/names.txt", "\n".join(names) + "\n")

    def more_text(self) -> None:
        """Words, characters and tokens for the language models that came later."""
        for place, prefix in (("ahmetumutdurmus+zaremba/data", "ptb."), ("salesforce+awd-lstm-lm/data/penn", "")):
            for split, count in (("train", 200_000), ("valid", 15_000), ("test", 15_000)):
                self.words(self.src / place / f"{prefix}{split}.txt", count, 9_998)
        test = self.src / "ahmetumutdurmus+zaremba/data"  # one line: this script knows no word that it has not seen
        known = (test / "ptb.train.txt").read_text().split()
        self.write(test / "ptb.train.txt", " " + " ".join(known))
        for split in ("valid", "test"):
            self.write(test / f"ptb.{split}.txt", " " + " ".join(known[:15_000]))
        printable = "".join(chr(code) for code in self.random.integers(32, 127, 300_000))
        self.write(self.data / "characters.txt", printable)
        for split, count in (("train", 400_000), ("valid", 40_000), ("test", 40_000)):
            codes = " ".join(map(str, self.random.integers(32, 127, count)))
            self.write(self.data / "enwik8" / f"{split}.txt", codes)
        for index in range(3):
            tokens = self.random.integers(0, 512, 400_000).astype(np.uint16)
            self.write(self.src / f"karpathy+llama2.c/data/tok512/data{index:02d}.bin", tokens.tobytes())
        for split, count in (("train", 400_000), ("val", 40_000)):
            tokens = self.random.integers(0, 50257, count).astype(np.uint16)
            self.write(self.src / f"wolfecameron+nanoMoE/data/shakespeare_char/{split}.bin", tokens.tobytes())
        lines = []
        for _ in range(320):
            words = self.random.integers(1, 50_000, 60 + int(self.random.integers(0, 100))).tolist()
            lines.append(json.dumps({"context": words[:40], "completion": words[40:]}))
        self.write(self.data / "lora.jsonl", "\n".join(lines) + "\n")

    def pairs(self) -> None:
        """Who took what, for recommendations: 8,000 users and 12,000 items."""
        for split, count in (("train", 30), ("test", 6)):
            rows = [
                " ".join(map(str, [user, *self.random.choice(12_000, count, replace=False)])) for user in range(8_000)
            ]
            self.write(self.src / "huangtinglin+NGCF-PyTorch/Data/gowalla" / f"{split}.txt", "\n".join(rows) + "\n")

    def small_images(self) -> None:
        """PNG files of 32 by 32, and grey ones of 28 by 28 in ten folders."""
        self.pictures(self.data / "small", 600, (32, 32), "png")
        for label in range(10):
            folder = self.src / "explainingai-code+DDPM-Pytorch/data/train/images" / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(120):
                grey = self.random.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(grey).save(folder / f"{index}.png")

    def models(self) -> None:
        """A tokenizer and configurations of small models, in Hugging Face's form."""
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(8_000))]
        for name, configuration in MODELS.items():
            size = {} if name == "vit" else {"vocab_size": len(vocabulary)}
            self.write(self.data / name / "config.json", json.dumps(configuration | size))
        self.write(self.data / "bert" / "vocab.txt", "\n".join(vocabulary) + "\n")
        tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 512}
        self.write(self.data / "bert" / "tokenizer_config.json", json.dumps(tokenizer))
        self.write(self.data / "fsdp.json", json.dumps({"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 224, "width": 224}}
        processor = json.dumps({"image_processor_type": "ViTImageProcessor", **half})
        self.write(self.data / "vit" / "preprocessor_config.json", processor)

    def books(self) -> None:
        """95 million bytes that gzip makes small, as many as enwik8 has, and texts for two more language models."""
        page = bytes(self.random.integers(32, 127, 20_000).astype(np.uint8))
        packed = gzip.compress(page * 4_800, compresslevel=1, mtime=0)
        for place in BOOK_PLACES:
            self.write(self.src / f"lucidrains+{place}/data/enwik8.gz", packed)
        letters = "".join(chr(code) for code in self.random.integers(32, 127, 300_000))
        self.write(self.src / "karpathy+minGPT/projects/chargpt/input.txt", "O God, O God!" + letters)

    def talks(self) -> None:
        """Texts and conversations for minimind's and TRL's scripts."""

        def said(words: int) -> str:
            return " ".join(f"w{word}" for word in self.random.integers(0, 8_000, words))

        def turns(words: int) -> list[dict[str, str]]:
            return [{"role": "user", "content": said(20)}, {"role": "assistant", "content": said(words)}]

        rows = {
            "texts": [{"text": said(120)} for _ in range(400)],
            "pairs": [{"chosen": turns(60), "rejected": turns(60)} for _ in range(300)],
            "plain_pairs": [{"prompt": said(20), "chosen": said(60), "rejected": said(60)} for _ in range(300)],
        }
        for name, lines in rows.items():
            self.write(self.data / "talks" / name / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def points(self) -> None:
        """Clouds of 2,600 points in two classes, in the form of ShapeNet's parts."""
        root, names = self.data / "shapes", {"Chair": "03001627", "Lamp": "03636649"}
        self.write(root / "synsetoffset2category.txt", "".join(f"{name}\t{place}\n" for name, place in names.items()))
        files = []
        for place in names.values():
            for index in range(96):
                cloud = self.random.standard_normal((2_600, 3)).round(4)
                self.write(root / place / "points" / f"{index}.pts", "\n".join(" ".join(map(str, at)) for at in cloud))
                parts = self.random.integers(1, 5, 2_600)
                self.write(root / place / "points_label" / f"{index}.seg", "\n".join(map(str, parts)))
                files.append(f"shape_data/{place}/{index}")
        for split in ("train", "test", "val"):
            self.write(root / "train_test_split" / f"shuffled_{split}_file_list.json", json.dumps(files))

    def small_models(self) -> None:
        """A small language model and a small Stable Diffusion with random weights, in Hugging Face's form."""
        from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            CLIPTextConfig,
            CLIPTextModel,
            PreTrainedTokenizerFast,
        )

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
        AutoModelForCausalLM.from_config(configuration).save_pretrained(self.data / "chat_model")
        tokenizer.save_pretrained(self.data / "chat_model")
        sizes = {"block_out_channels": (64, 128), "layers_per_block": 1, "norm_num_groups": 32, "sample_size": 32}
        unet = UNet2DConditionModel(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=128, attention_head_dim=8, **sizes,
        )  # fmt: skip
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4, **sizes,
        )  # fmt: skip
        text = CLIPTextConfig(
            hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=len(words),
            bos_token_id=0, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        tokenizer.model_max_length = 77
        StableDiffusionPipeline(
            vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer, unet=unet, scheduler=DDPMScheduler(),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        ).save_pretrained(self.data / "small_diffusion")  # fmt: skip

    def graphs(self) -> None:
        """A citation graph as large as Cora in two forms, and 188 molecules as in MUTAG."""
        import scipy.sparse

        nodes, features, classes = 2708, 1433, 7
        values = (self.random.random((nodes, features)) < 0.0127).astype(np.int32)
        values[np.arange(nodes), self.random.integers(0, features, nodes)] = 1
        label = self.random.integers(0, classes, nodes)
        edges = self.random.integers(0, nodes, (5429, 2))
        edges = edges[edges[:, 0] != edges[:, 1]]
        rows = ("\t".join([str(1000 + i), *map(str, values[i]), f"Class_{label[i]}"]) for i in range(nodes))
        content, cites = "\n".join(rows) + "\n", "\n".join(f"{1000 + a}\t{1000 + b}" for a, b in edges) + "\n"
        for place in CORA_PLACES:
            self.write(self.src / place / "cora.content", content)
            self.write(self.src / place / "cora.cites", cites)
        x, y = scipy.sparse.csr_matrix(values.astype(np.float32)), np.eye(classes, dtype=np.int32)[label]
        graph: dict[int, list[int]] = {node: [] for node in range(nodes)}
        for a, b in edges.tolist():
            graph[a].append(b)
            graph[b].append(a)
        raws = [self.src / f"pyg-team+pytorch_geometric/data/{name}/Cora/raw" for name in ("Planetoid", "Cora")]
        parts = {
            "x": x[:140], "y": y[:140], "tx": x[1708:], "ty": y[1708:], "allx": x[:1708], "ally": y[:1708],
            "graph": graph,
        }  # fmt: skip
        for raw in raws:
            for name, part in parts.items():
                self.write(raw / f"ind.cora.{name}", pickle.dumps(part, protocol=2))
            self.write(raw / "ind.cora.test.index", "\n".join(map(str, range(1708, 2708))) + "\n")
        self.molecules(self.src / "pyg-team+pytorch_geometric/data/TU/MUTAG/raw")

    def molecules(self, raw: Path) -> None:
        """Rings with chords, with labels for graphs, nodes and edges."""
        sizes = [int(size) for size in self.random.integers(10, 29, 188)]
        edges, first = [], 1
        for size in sizes:
            for a in range(size):
                for b in ((a + 1) % size, (a + 2) % size):
                    edges += [(first + a, first + b), (first + b, first + a)]
            first += size
        columns = {
            "A": [f"{a}, {b}" for a, b in edges], "edge_labels": self.random.integers(0, 4, len(edges)),
            "graph_indicator": [i + 1 for i, size in enumerate(sizes) for _ in range(size)],
            "graph_labels": [2 * (i % 2) - 1 for i in range(len(sizes))],
            "node_labels": self.random.integers(0, 7, sum(sizes)),
        }  # fmt: skip
        for name, column in columns.items():
            self.write(raw / f"MUTAG_{name}.txt", "\n".join(map(str, column)) + "\n")

    def tables(self) -> None:
        """Two years of hours with seven variables, and ratings of films."""
        dates = np.datetime64("2016-07-01T00") + np.arange(17_420).astype("timedelta64[h]")
        series = self.random.standard_normal((len(dates), 7)).cumsum(0)
        lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
        for date, row in zip(dates, series, strict=True):
            lines.append(f"{date} ".replace("T", " ").strip() + ":00:00," + ",".join(f"{value:.3f}" for value in row))
        self.write(self.data / "ETTh1.csv", "\n".join(lines) + "\n")
        columns = [self.random.integers(1, top, 100_000) for top in (6041, 3953, 6)]
        ratings = (f"{user}::{item}::{rating}::978300760" for user, item, rating in zip(*columns, strict=True))
        self.write(self.data / "ml" / "ratings.dat", "\n".join(ratings) + "\n")

    def news(self) -> None:
        """Headlines of characters, and vectors of words."""
        place = self.src / "649453932+Chinese-Text-Classification-Pytorch/THUCNews/data"
        for split, count in (("train", 6000), ("dev", 1000), ("test", 1000)):
            lines = ("".join(chr(0x4E00 + c) for c in self.random.integers(0, 3000, 5 + n % 25)) for n in range(count))
            self.write(place / f"{split}.txt", "".join(f"{line}\t{n % 10}\n" for n, line in enumerate(lines)))
        (place.parent / "saved_dict").mkdir(parents=True, exist_ok=True)
        vectors = self.random.standard_normal((400, 50)).round(3)
        lines = (f"w{n} " + " ".join(map(str, vector)) + "\n" for n, vector in enumerate(vectors))
        self.write(self.src / "jiesutd+NCRFpp/sample_data/sample.word.emb", "".join(lines))

    def measurements(self) -> None:
        """Speeds at 207 places, digits of zeros and ones, small graphs, views of a scene, and skins with masks."""
        speeds = self.random.integers(0, 70, (2000, 207))
        lines = [",".join(map(str, range(207))), *(",".join(map(str, row)) for row in speeds)]
        self.write(self.src / "hazdzz+STGCN/data/metr-la/vel.csv", "\n".join(lines) + "\n")
        digits = {f"{split}_data": self.random.integers(0, 2, (8000, 784)).astype("f4") for split in ("train", "valid")}
        np.savez(self.data / "binarized_mnist.npz", **digits)
        graphs = ["188"]
        for index in range(188):
            nodes = int(self.random.integers(10, 29))
            graphs.append(f"{nodes} {index % 2}")
            graphs.extend(f"{n % 7} 2 {(n - 1) % nodes} {(n + 1) % nodes}" for n in range(nodes))
        self.write(self.src / "weihua916+powerful-gnns/dataset/MUTAG/MUTAG.txt", "\n".join(graphs) + "\n")
        scene = self.src / "krrish94+nerf-pytorch/cache/tiny_nerf_data.npz"
        scene.parent.mkdir(parents=True, exist_ok=True)
        poses = np.tile(np.eye(4, dtype="f4"), (106, 1, 1))
        np.savez(scene, images=self.random.random((106, 100, 100, 3), "f4"), poses=poses, focal=np.array(138.9))
        place = self.src / "LeeJunHyun+Image_Segmentation/dataset"
        for split, count in (("train", 40), ("valid", 12), ("test", 12)):
            for n in range(count):
                self.picture(place / split / f"ISIC_{n:07d}.jpg", (320, 240))
                self.picture(place / f"{split}_GT" / f"ISIC_{n:07d}_segmentation.png", (320, 240), mask=True)
        photos = sorted(map(str, (self.data / "photos/train").glob("*/*.jpg")))
        self.write(self.src / "sgrvinod+a-PyTorch-Tutorial-to-Super-Resolution/train_images.json", json.dumps(photos))


def make_data(root: Path) -> None:
    """Everything that the scripts below `root/src` read, about 60 MB in all."""
    maker = Maker(root)
    (maker.src / "pytorch+examples/vae/results").mkdir(parents=True, exist_ok=True)
    for part in (
        maker.mnist, maker.image_folders, maker.coco, maker.text, maker.models, maker.graphs, maker.tables,
        maker.small_pictures, maker.cifar, maker.more_text, maker.pairs, maker.small_images, maker.books, maker.talks,
        maker.points, maker.small_models, maker.news, maker.measurements,
    ):  # fmt: skip
        part()
    make_later_data(maker)
