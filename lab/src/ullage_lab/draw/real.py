"""Draws training runs of real models: torchvision's, timm's and those of transformers, with random weights.

As in `generate`, every row has its own random generator, seeded by seed and number. First a family is drawn, then a
model of it, so that large families are no more frequent than small ones. One forward pass on the meta device counts the
cost of a run; batches that need more memory or time than allowed are not drawn.
"""

import functools
import json
import random
from typing import Any

from ullage.errors import InvalidValue
from ullage.jobs.model import Model
from ullage_lab.clean.families import family_of
from ullage_lab.draw.configurations import draw_t5, draw_transformer
from ullage_lab.draw.generated import Cost, DrawingLimits

FAMILY = "real"
# Models of a family by name; image sizes of those that accept several.
_SIDES = (64, 96, 128, 160, 192, 224, 224, 224, 256, 288)
_VISION: dict[str, tuple[str, ...]] = {
    "resnet": (
        "tv:resnet18",
        "tv:resnet34",
        "tv:resnet50",
        "tv:resnet101",
        "tv:wide_resnet50_2",
        "tv:resnext50_32x4d",
        "timm:resnet26d",
        "timm:seresnet50",
        "timm:resnetv2_50",
    ),
    "vgg": ("tv:vgg11", "tv:vgg16", "tv:vgg16_bn", "tv:vgg19_bn"),
    "alexnet": ("tv:alexnet",),
    "squeezenet": ("tv:squeezenet1_0", "tv:squeezenet1_1"),
    "densenet": ("tv:densenet121", "tv:densenet169", "timm:densenet121"),
    "inception": ("tv:googlenet", "timm:inception_v3", "timm:inception_v4"),
    "shufflenet": ("tv:shufflenet_v2_x0_5", "tv:shufflenet_v2_x1_0", "tv:shufflenet_v2_x2_0"),
    "mobilenet": ("tv:mobilenet_v2", "tv:mobilenet_v3_small", "tv:mobilenet_v3_large", "timm:mobilenetv4_conv_small"),
    "mnasnet": ("tv:mnasnet0_5", "tv:mnasnet1_0", "timm:fbnetc_100"),
    "efficientnet": ("tv:efficientnet_b0", "tv:efficientnet_b2", "tv:efficientnet_v2_s", "timm:efficientnet_b1"),
    "regnet": ("tv:regnet_y_400mf", "tv:regnet_x_1_6gf", "tv:regnet_y_3_2gf", "timm:regnety_008"),
    "convnext": ("tv:convnext_tiny", "tv:convnext_small", "timm:convnext_nano", "timm:convnextv2_tiny"),
    "dpn": ("timm:dpn68", "timm:dpn92"),
    "dla": ("timm:dla34", "timm:dla60", "timm:dla102"),
    "hrnet": ("timm:hrnet_w18_small", "timm:hrnet_w18"),
    "ghostnet": ("timm:ghostnet_100", "timm:ghostnetv2_100"),
    "repvgg": ("timm:repvgg_a0", "timm:repvgg_b0", "timm:repvgg_b1"),
    "nfnet": ("timm:nfnet_l0", "timm:nf_resnet50"),
    "darknet": ("timm:cspdarknet53", "timm:darknet53", "timm:cspresnet50"),
    "rexnet": ("timm:rexnet_100", "timm:rexnet_200"),
    "xception": ("timm:xception41", "timm:legacy_xception"),
    "convmixer": ("timm:convmixer_768_32",),
    "inception_next": ("timm:inception_next_tiny", "timm:inception_next_small"),
    "poolformer": ("timm:poolformer_s12", "timm:poolformer_s24"),
    "segmentation": ("tv:fcn_resnet50", "tv:deeplabv3_mobilenet_v3_large", "tv:lraspp_mobilenet_v3_large"),
    "vit": (
        "tv:vit_b_16",
        "tv:vit_b_32",
        "timm:vit_tiny_patch16_224",
        "timm:vit_small_patch16_224",
        "timm:deit_base_patch16_224",
        "timm:vit_small_patch32_224",
    ),
    "cait": ("timm:cait_xxs24_224", "timm:cait_xs24_384"),
    "swin": ("tv:swin_t", "tv:swin_v2_t", "tv:swin_s", "timm:swin_tiny_patch4_window7_224"),
    "maxvit": ("tv:maxvit_t", "timm:coatnet_0_rw_224"),
    "pvt": ("timm:pvt_v2_b0", "timm:pvt_v2_b1", "timm:pvt_v2_b2"),
    "twins": ("timm:twins_svt_small", "timm:twins_pcpvt_small"),
    "xcit": ("timm:xcit_tiny_12_p16_224", "timm:xcit_small_12_p16_224"),
    "levit": ("timm:levit_128s", "timm:levit_256"),
    "mixer": ("timm:mixer_s16_224", "timm:mixer_s32_224", "timm:mixer_b16_224"),
    "gmlp": ("timm:gmlp_ti16_224", "timm:gmlp_s16_224"),
    "resmlp": ("timm:resmlp_12_224", "timm:resmlp_24_224"),
}
_ONE_SIZE = ("vit", "cait", "swin", "maxvit", "twins", "levit", "mixer", "gmlp", "resmlp", "xcit")
_TEXT = ("llama", "phi", "gpt_neox", "gpt2", "gptj", "bloom", "bert", "albert", "deberta", "bart", "t5")
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LARGE_BATCHES = (*_BATCHES, 384, 512, 768, 1024)  # for a minimum time of steps
_OPTIMIZERS = {
    "adamw": 4.0,
    "adam": 2.0,
    "sgdm": 3.0,
    "sgd": 1.0,
    "adamw_fused": 2.0,
    "sgdm_fused": 0.5,
    "rmsprop": 1.0,
    "adagrad": 0.5,
    "adafactor": 0.5,
    "adamw_single": 0.5,
}
_PRECISIONS = {"fp32": 3.0, "tf32": 1.5, "amp_bf16": 3.0, "amp_fp16": 2.0, "bf16": 2.0}
_CHECKPOINTED = ("vit", "swin", "convnext", "resnet", "mixer")
_TRIES = 40
_COUNTED = 2  # samples in the counting pass


def draw_real(number: int, seed: int, limits: DrawingLimits | None = None) -> dict[str, Any]:
    """Return the row of this number: a real model and its training. Needs PyTorch and the models' packages.

    draw_real(0, seed=1)["model"]
    """
    limits = limits or DrawingLimits()
    chance = random.Random(f"ullage {FAMILY} {seed} {number}")
    families = (*_VISION, *_TEXT, *_TEXT)  # text twice: its models differ in size and length too
    for _ in range(_TRIES):
        family = chance.choice(families)
        row = _of_text(chance, family) if family in _TEXT else _of_images(chance, family)
        row |= {"opt": _weighted(chance, _OPTIMIZERS), "precision": _weighted(chance, _PRECISIONS)}
        cost = counted(row)
        if cost is None:
            continue
        fitting = [
            batch
            for batch in (_LARGE_BATCHES if limits.least_seconds else _BATCHES)
            if cost.process(batch, row["opt"], row["precision"]) <= limits.memory
            and _seconds(cost, row, batch) <= limits.seconds
        ]
        if not fitting:
            continue
        long = [batch for batch in fitting if _seconds(cost, row, batch) >= limits.least_seconds]
        # Small batches, which wait for the host, are as frequent as large ones. Too small models get the largest.
        row["batch"] = chance.choice(long or fitting[-1:])
        return {
            "id": f"{FAMILY}-{seed}-{number:05d}",
            "family": Model.from_row(row).source,
            "arch": family,
            **row,
            "parameters": cost.parameters,
            "need": cost.memory(row["batch"], row["opt"], row["precision"]),
            "guess": cost.process(row["batch"], row["opt"], row["precision"]),
        }
    raise InvalidValue(f"no feasible model in {_TRIES} draws: allow more memory or a longer step")


def _seconds(cost: Cost, row: dict[str, Any], batch: int) -> float:
    precision = "bf16" if row["precision"] == "tf32" else row["precision"]
    return cost.seconds(batch, precision, family_of(row).kind == "cnn")


def counted(row: dict[str, Any]) -> Cost | None:
    """Return the cost of a run, by a forward pass on the meta device; `None` if the model cannot be built."""
    configuration = {**row, "batch": _COUNTED, "opt": "sgd", "precision": "fp32", "ckpt": False, "channels_last": False}
    return _count(json.dumps(configuration, sort_keys=True))


@functools.cache
def _count(row: str) -> Cost | None:
    from torch.utils.flop_counter import FlopCounterMode

    from ullage_lab.estimators.fast.features import features

    configuration = Model.from_row(json.loads(row))
    try:
        with FlopCounterMode(display=False) as counter:
            figures = features(configuration)
    except Exception:  # a model may refuse its size, or a release the model
        return None
    return Cost(
        parameters=figures.parameters,
        numbers=figures.kept_numbers,
        bytes=figures.kept_bytes,
        flops=counter.get_total_flops() / configuration.batch_size,
    )


def _of_images(chance: random.Random, family: str) -> dict[str, Any]:
    model = chance.choice(_VISION[family])
    side = chance.choice(_SIDES)
    if family in _ONE_SIZE:
        side = 384 if model.endswith("384") else 224
    elif family in ("inception", "xception"):
        side = max(side, 160)
    row: dict[str, Any] = {"model": model, "input": [3, side, side], "channels_last": chance.random() < 0.2}
    return row | ({"ckpt": True} if chance.random() < 0.06 and family in _CHECKPOINTED else {})


def _of_text(chance: random.Random, family: str) -> dict[str, Any]:
    row = draw_t5(chance) if family == "t5" else draw_transformer(chance)
    while family_of(row).name != family:
        row = draw_transformer(chance)
    return row


def _weighted(chance: random.Random, weights: dict[str, float]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]
