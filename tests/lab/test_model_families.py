"""Families of models: which a model belongs to, and which whole families are kept for testing."""

import random
from typing import Any

import pytest

from ullage.errors import InvalidValue
from ullage.jobs import Model
from ullage.units import GIB
from ullage_lab.clean.families import _DRAWN_FIRST, _FRESH, _FRESH_NAMES, _TEXT, ModelFamily, family_of, is_for_testing
from ullage_lab.draw import real as real_models
from ullage_lab.draw.generated import CNN_FORMS, MLP_FORMS, TRANSFORMER_FORMS, Cost, DrawingLimits
from ullage_lab.draw.real import counted, draw_real

GENERATED = {"mlp": (*MLP_FORMS, "random"), "cnn": CNN_FORMS, "transformer": TRANSFORMER_FORMS}
ALL = [ModelFamily(family, kind) for family, kind, _ in (*_DRAWN_FIRST, *_FRESH, *_TEXT)] + [
    ModelFamily(f"generated {kind} {form}", kind) for kind, forms in GENERATED.items() for form in forms
]


def test_test_families_are_those_that_were_laid_down() -> None:
    """Fits were judged on these: whoever changes the rule or a name has to see that."""
    assert sorted(family.name for family in ALL if is_for_testing(family.name) and family.name not in _FRESH_NAMES) == [
        "albert",
        "alexnet",
        "bloom",
        "densenet",
        "dla",
        "efficientnet",
        "generated cnn dense",
        "generated mlp random",
        "generated mlp uniform",
        "generated transformer decoder",
        "generated transformer encoder",
        "gptj",
        "inception",
        "mixer",
        "resmlp",
        "resnet",
        "twins",
        "vit",
    ]
    kinds = {(family.kind, "generated" in family.name) for family in ALL if is_for_testing(family.name)}
    assert kinds == {(kind, generated) for kind in GENERATED for generated in (True, False)}


def test_later_test_families_are_only_for_testing_and_new() -> None:
    assert all(map(is_for_testing, _FRESH_NAMES)) and len(set(_FRESH_NAMES)) == 52
    assert set(_FRESH_NAMES) <= {family.name for family in ALL}
    assert not set(_FRESH_NAMES) & {*real_models._VISION, *real_models._TEXT}
    moved = {
        "benchmarks/fresh_networks.py:unet": "ullage_lab.networks.drawn:unet",
        "benchmarks/later_steps.py:generator": "ullage_lab.networks.drawn:image_generator",
    }
    for old, new in moved.items():
        assert Model.from_row({"model": old, "batch": 1}).name == new
        assert family_of({"model": old}) == family_of({"model": new})
    assert family_of({"model": "benchmarks/fresh_networks.py:unet"}) == ModelFamily("unet", "cnn")


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("tv:resnet18", "resnet"),
        ("timm:resnetv2_50", "resnet"),
        ("tv:wide_resnet50_2", "resnet"),
        ("timm:seresnet50", "resnet"),
        ("tv:resnext50_32x4d", "resnet"),
        ("tv:fcn_resnet50", "segmentation"),
        ("timm:resmlp_12_224", "resmlp"),
        ("timm:repvgg_a0", "repvgg"),
        ("tv:vgg16_bn", "vgg"),
        ("timm:inception_next_tiny", "inception_next"),
        ("timm:inception_v3", "inception"),
        ("timm:tf_efficientnet_b0", "efficientnet"),
        ("tv:vit_b_16", "vit"),
        ("timm:deit_base_patch16_224", "vit"),
        ("timm:mobilevitv2_050", "mobilevitv"),
        ("hf:BertForMaskedLM", "bert"),
        ("hf:DebertaV2ForMaskedLM", "deberta"),
        ("hf:AlbertForMaskedLM", "albert"),
        ("hf:GPT2LMHeadModel", "gpt2"),
        ("hf:GPTJForCausalLM", "gptj"),
        ("hf:ViTForImageClassification", "vit"),
        ("package.module:my_net", "my"),
    ],
)
def test_models_have_a_family(model: str, family: str) -> None:
    assert family_of({"model": model}).name == family


def test_every_drawn_model_is_of_the_family_it_is_listed_under() -> None:
    for family, models in real_models._VISION.items():
        assert {family_of({"model": model}).name for model in models} == {family}
    chance = random.Random(0)
    for family in real_models._TEXT:
        assert family_of(real_models._of_text(chance, family)).name == family


def test_the_cost_of_a_run_comes_from_its_model() -> None:
    found = counted({"model": "mlp:x", "widths": [64, 32, 8]})
    assert found is not None and found.parameters == 64 * 32 + 32 + 32 * 8 + 8
    assert found.flops == 2 * (64 * 32 + 32 * 8)
    assert counted({"model": "no_such_package:network", "input": [3, 64, 64]}) is None


def test_real_runs_are_drawn_again_by_the_same_seed_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = Cost(parameters=25_000_000, numbers=21_000_000, flops=8e9)

    def cheap(row: dict[str, Any]) -> Cost | None:
        return None if row["model"].startswith("timm") else cost

    monkeypatch.setattr(real_models, "counted", cheap)
    limits = DrawingLimits(8 * GIB, 0.05)
    rows = [draw_real(number, 5, limits) for number in range(60)]
    assert rows[:9] == [draw_real(number, 5, limits) for number in range(9)] != [draw_real(n, 6) for n in range(9)]
    assert not any(row["model"].startswith("timm") for row in rows)
    assert max(row["guess"] for row in rows) <= 8 * GIB and min(row["batch"] for row in rows) == 1
    assert {row["precision"] for row in rows} == {"fp32", "tf32", "amp_bf16", "amp_fp16", "bf16"}
    assert all(Model.from_row(row).batch_size == row["batch"] for row in rows)
    with pytest.raises(InvalidValue, match="no feasible model"):
        draw_real(0, 5, DrawingLimits(GIB // 8, 0.05))
    long = [draw_real(number, 5, DrawingLimits(8 * GIB, 0.05, 0.02)) for number in range(20)]
    assert all(real_models._seconds(cost, row, row["batch"]) >= 0.02 for row in long)
    never = [draw_real(number, 5, DrawingLimits(8 * GIB, 9.0, 9.0)) for number in range(9)]
    larger = [cost.process(row["batch"] * 3 // 2, row["opt"], row["precision"]) for row in never]
    assert all(row["guess"] <= 8 * GIB < more for row, more in zip(never, larger, strict=True))
