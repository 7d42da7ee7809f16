"""Configurations of training runs: good ones build, bad ones get one clear message."""

import pytest

from ullage.errors import InvalidValue, UnknownName
from ullage.workload import Configuration, build


@pytest.mark.parametrize(
    ("model", "near"), [("tv:resnet51", "resnet50"), ("timm:vit_smal_patch16_224", "vit_small_patch16_224")]
)
def test_a_misspelt_model_gets_the_nearest_names(model, near):
    with pytest.raises(UnknownName, match=near):
        build(Configuration(model=model, batch=1, input=[3, 32, 32]))


def test_a_model_is_built_outside_a_virtual_gpu():
    model = build(Configuration(model="tv:resnet18", batch=1, input=[3, 32, 32], classes=7))
    assert model.fc.out_features == 7 and not model.fc.weight.is_cuda


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": "resnet18", "batch": 1}, "tv:resnet50"),
        ({"model": "tv:resnet18", "batch": 1}, "'input'"),
        ({"model": "mlp:x", "batch": 1, "widths": [2, 2], "opt": "adamm"}, "opt among"),
    ],
)
def test_a_bad_configuration_says_what_is_needed(values, text):
    with pytest.raises(InvalidValue, match=text):
        Configuration(**values)
