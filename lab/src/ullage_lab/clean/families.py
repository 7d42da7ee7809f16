"""The families of models, and which of them are kept for testing.

Models of a family have the same layers in the same order except for sizes: an estimator that has seen one knows the
others. So a fit is judged on families that it has not seen. Only the family's name decides (`is_for_testing`): this was
fixed before anything was fitted, and more measurements never move a family.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ullage.jobs.model import PREFIXES, current_name

KINDS = ("cnn", "transformer", "mlp")
TEST_SHARE = 0.25
# The only salt from 0 to 9 whose test families include real and generated CNNs, MLPs and Transformers, the real ones
# over images and text; chosen by the list of names, before anything was measured or fitted.
_SALT = "families 9"
_GENERATED = "ullage_lab.networks.generated:"
# Family, kind, and prefixes of model names after the source ("tv:", "timm:", "hf:"). The first match counts.
_DRAWN_FIRST: tuple[tuple[str, str, str], ...] = (
    ("segmentation", "cnn", r"fcn_|deeplabv3|lraspp"),
    ("resnet3d", "cnn", r"r3d_|mc3_|r2plus1d|s3d"),
    ("resnet", "cnn", r"(wide_|se|eca|legacy_se)?res?ne(x?t)(v2)?_?\d|resnest|res2net|skresnet|gcresnet"),
    ("vgg", "cnn", r"vgg"),
    ("alexnet", "cnn", r"alexnet"),
    ("squeezenet", "cnn", r"squeezenet"),
    ("densenet", "cnn", r"densenet"),
    ("inception", "cnn", r"inception_v|googlenet|inception_resnet"),
    ("shufflenet", "cnn", r"shufflenet"),
    ("mobilenet", "cnn", r"mobilenet|tf_mobilenet"),
    ("mnasnet", "cnn", r"mnasnet|spnasnet|fbnet|hardcorenas"),
    ("efficientnet", "cnn", r"(tf_)?efficientnet"),
    ("regnet", "cnn", r"regnet"),
    ("convnext", "cnn", r"convnext"),
    ("dpn", "cnn", r"dpn"),
    ("dla", "cnn", r"dla"),
    ("hrnet", "cnn", r"hrnet"),
    ("ghostnet", "cnn", r"ghostnet"),
    ("repvgg", "cnn", r"repvgg"),
    ("nfnet", "cnn", r"(eca_)?nfnet|dm_nfnet|nf_"),
    ("darknet", "cnn", r"(csp)?darknet|cspres|dark"),
    ("rexnet", "cnn", r"rexnet"),
    ("xception", "cnn", r"xception|legacy_xception"),
    ("convmixer", "cnn", r"convmixer"),
    ("inception_next", "cnn", r"inception_next"),
    ("poolformer", "cnn", r"poolformer"),
    ("vit", "transformer", r"(vit|deit|deit3|beit|eva)_|ViT|DeiT"),
    ("cait", "transformer", r"cait"),
    ("swin", "transformer", r"swin"),
    ("maxvit", "transformer", r"maxvit|coatnet"),
    ("pvt", "transformer", r"pvt"),
    ("twins", "transformer", r"twins"),
    ("xcit", "transformer", r"xcit"),
    ("mvit", "transformer", r"mvit"),
    ("levit", "transformer", r"levit"),
    ("mixer", "mlp", r"mixer"),
    ("gmlp", "mlp", r"gmlp"),
    ("resmlp", "mlp", r"resmlp"),
)
# Families drawn for a second and a third test: all of them are for testing, whatever the hash.
_FRESH: tuple[tuple[str, str, str], ...] = (
    ("vovnet", "cnn", r"(ese_)?vovnet"),
    ("mixnet", "cnn", r"(tf_)?mixnet"),
    ("gernet", "cnn", r"gernet"),
    ("selecsls", "cnn", r"selecsls"),
    ("hgnet", "cnn", r"hgnet"),
    ("starnet", "cnn", r"starnet"),
    ("mambaout", "cnn", r"mambaout"),
    ("mobileone", "cnn", r"mobileone"),
    ("unet", "cnn", r"unet$"),
    ("waves", "cnn", r"waves$"),
    ("volumes", "cnn", r"volumes$"),
    ("oblong", "cnn", r"oblong$"),
    ("inverted", "cnn", r"inverted$"),
    ("davit", "transformer", r"davit"),
    ("nest", "transformer", r"nest_"),
    ("crossvit", "transformer", r"crossvit"),
    ("convit", "transformer", r"convit"),
    ("pit", "transformer", r"pit_"),
    ("hiera", "transformer", r"hiera"),
    ("gemma", "transformer", r"Gemma"),
    ("falcon", "transformer", r"Falcon"),
    ("cohere", "transformer", r"Cohere"),
    ("mpnet", "transformer", r"MPNet"),
    ("roformer", "transformer", r"RoFormer"),
    ("convbert", "transformer", r"ConvBert"),
    ("xglm", "transformer", r"XGLM"),
    ("mpt", "transformer", r"Mpt"),
    ("tabular", "mlp", r"tabular$"),
    ("gated", "mlp", r"gated$"),
    ("autoencoder", "mlp", r"autoencoder$"),
    ("experts", "mlp", r"experts$"),
    ("repvit", "cnn", r"repvit"),
    ("lambda", "cnn", r"lambda_"),
    ("botnet", "cnn", r"botnet"),
    ("temporal", "cnn", r"temporal$"),
    ("upscaling", "cnn", r"upscaling$"),
    ("generator", "cnn", r"(image_)?generator$"),
    ("gcvit", "transformer", r"gcvit"),
    ("efficientformerv", "transformer", r"efficientformerv"),
    ("vitamin", "transformer", r"vitamin"),
    ("xlnet", "transformer", r"XLNet"),
    ("ctrl", "transformer", r"CTRL"),
    ("fnet", "transformer", r"FNet"),
    ("gptneo", "transformer", r"GPTNeoF"),
    ("modernbert", "transformer", r"ModernBert"),
    ("biogpt", "transformer", r"BioGpt"),
    ("flaubert", "transformer", r"Flaubert"),
    ("gmixer", "mlp", r"gmixer"),
    ("crossed", "mlp", r"crossed$"),
    ("sines", "mlp", r"sines$"),
    ("highway", "mlp", r"highway$"),
)
# Transformers by class: those that differ only in name are one family.
_TEXT: tuple[tuple[str, str, str], ...] = (
    ("llama", "transformer", r"Llama|Mistral|Qwen|Olmo|Granite|SmolLM|StableLm|Starcoder"),
    ("phi", "transformer", r"Phi|Persimmon"),
    ("gpt_neox", "transformer", r"GPTNeoX"),
    ("gpt2", "transformer", r"GPT2|GPTBigCode"),
    ("gptj", "transformer", r"GPTJ|CodeGen"),
    ("bloom", "transformer", r"Bloom"),
    ("opt", "transformer", r"OPT"),
    ("bert", "transformer", r"Bert|Roberta|Electra|DistilBert|XLMRoberta|Camembert"),
    ("albert", "transformer", r"Albert"),
    ("deberta", "transformer", r"Deberta"),
    ("bart", "transformer", r"Bart|MBart|Pegasus"),
    ("t5", "transformer", r"T5|MT5"),
)
_PATTERNS = tuple((family, kind, re.compile(pattern)) for family, kind, pattern in (*_DRAWN_FIRST, *_FRESH, *_TEXT))
_FRESH_NAMES = {"mvit", *(family for family, _, _ in _FRESH)}


@dataclass(frozen=True)
class ModelFamily:
    """A family's name, and its kind: cnn, transformer, mlp, or "other" if unknown."""

    name: str
    kind: str


def family_of(row: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a line of configurations or measurements.

    >>> family_of({"model": "torchvision:wide_resnet50_2"}), family_of({"model": "hf:Qwen3ForCausalLM"}).name
    (ModelFamily(name='resnet', kind='cnn'), 'llama')
    >>> family_of({"model": "ullage_lab.networks.generated:mlp", "arch": "pyramid"}).name
    'generated mlp pyramid'
    """
    model = current_name(str(row["model"]))
    source, _, name = model.partition(":")
    if model.startswith(_GENERATED):
        settings = row.get("settings") or {}
        form = row.get("arch") or settings.get("arch") or settings.get("kind")
        return ModelFamily(" ".join(filter(None, ("generated", name, form))), name if name in KINDS else "other")
    if PREFIXES.get(source) == "mlp":
        return ModelFamily("generated mlp random", "mlp")
    for family, kind, pattern in _PATTERNS:
        if pattern.match(name):
            return ModelFamily(family, kind)
    return ModelFamily(re.split(r"[\d_]", name)[0].lower() or model, "other")


def is_for_testing(family: str) -> bool:
    """Whether a family is left out of every fit, for testing: about a quarter of the names, by a hash of the name.

    So are all families that were drawn for later tests.
    """
    if family in _FRESH_NAMES:
        return True
    digest = hashlib.sha256(f"{_SALT} {family}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64
